"""Divided models against data parallelism and what users would write by hand."""
