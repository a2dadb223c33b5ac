"""Compares sharding by a plan with data parallelism, and with sharding that a user would write by hand."""
