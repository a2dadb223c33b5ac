"""Identities of a SPIFFE Workload API that rotate, are revoked and are unmapped while a job trains."""
