"""Compares models that a plan splits with data parallelism and with what users would write by hand."""
