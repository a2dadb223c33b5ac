"""The number that tells a process from the one that had its node id before."""

from __future__ import annotations

import os


def new_incarnation() -> int:
    """A random number from 1 to 2**64 - 1, different for each process."""
    return int.from_bytes(os.urandom(8), "big") or 1
