"""Runs unmodified torch and JAX programs: an agent with their session, their store over mutual TLS.

On CPUs torch.distributed's process groups go over Muster's encrypted connections: the backend "muster".
"""

BACKEND = "muster"
"""What torch calls the backend of those process groups."""
