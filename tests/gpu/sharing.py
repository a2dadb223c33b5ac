"""More ranks than GPUs: the tests for several ranks on a machine with one GPU or two.

As a program, ``sharing.py COMMAND...``, it runs a command as one of the ranks of a launch that share GPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

RANKS_PER_GPU = int(os.environ.get("MS_TEST_RANKS_PER_GPU", "1"))


def ranks_on(gpus: int) -> int:
    """How many ranks tests may start, at most 4."""
    return min(4, gpus * RANKS_PER_GPU)


def launch_options() -> tuple[str, ...]:
    """Of ``muster run``, which gives each worker a GPU of its own: these workers take theirs themselves."""
    return ("--devices=none",) if RANKS_PER_GPU > 1 else ()


def shared(*command: str) -> tuple[str, ...]:
    """``command`` of a worker, with a GPU that it may share."""
    return (sys.executable, str(Path(__file__)), *command) if RANKS_PER_GPU > 1 else command


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from muster.bench.gpu_fleet import sharing_environment

    index = int(os.environ["MS_LOCAL_INDEX"])
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(sharing_environment(index), DEVICE_ID=str(index // RANKS_PER_GPU))
    os.execvp(sys.argv[1], sys.argv[1:])
