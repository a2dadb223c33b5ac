"""Identities, certificates, authorities and revocation lists."""
