"""Runs unmodified torch and JAX programs: an agent holds the session and serves the store over mutual TLS.

On CPUs the backend "muster" gives torch.distributed process groups over Muster's encrypted connections.
"""

BACKEND = "muster"
"""The name of this backend in torch."""
