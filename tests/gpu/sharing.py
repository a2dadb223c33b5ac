"""More ranks than GPUs: the tests for several ranks on a machine with one GPU or two."""

from __future__ import annotations

import os

RANKS_PER_GPU = int(os.environ.get("MS_TEST_RANKS_PER_GPU", "1"))


def ranks_on(gpus: int) -> int:
    """How many ranks tests may start, at most 4."""
    return min(4, gpus * RANKS_PER_GPU)


def launch_options() -> tuple[str, ...]:
    """Of ``muster run``, which else gives each worker a GPU of its own."""
    return ("--share-gpus",) if RANKS_PER_GPU > 1 else ()
