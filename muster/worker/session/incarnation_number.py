"""The number that distinguishes a process from an earlier one with the same node id."""

from __future__ import annotations

import os


def new_incarnation() -> int:
    """Returns a random number from 1 to 2**64 - 1, different for each process."""
    return int.from_bytes(os.urandom(8), "big") or 1
