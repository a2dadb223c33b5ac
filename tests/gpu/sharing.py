"""More ranks than GPUs: the tests for several ranks on a machine with one GPU or two.

As a program, ``sharing.py N COMMAND...``, it runs a command as one of the ranks of a launch, N to a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from muster.bench.gpu_fleet import sharing_environment

RANKS_PER_GPU = int(os.environ.get("MS_TEST_RANKS_PER_GPU", "1"))


def ranks_on(gpus: int) -> int:
    """How many ranks tests may start, at most 4."""
    return min(4, gpus * RANKS_PER_GPU)


def launch_options() -> tuple[str, ...]:
    """Of ``muster run``, which gives each worker a GPU of its own: these workers take theirs themselves."""
    return ("--devices=none",) if RANKS_PER_GPU > 1 else ()


def shared(*command: str) -> tuple[str, ...]:
    """``command`` of a worker, with a GPU that it may share."""
    return (sys.executable, __file__, str(RANKS_PER_GPU), *command) if RANKS_PER_GPU > 1 else command


def take_gpu(index: int, ranks_per_gpu: int) -> None:
    """Gives this process the GPU that it shares, before CUDA is loaded."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(sharing_environment(index), DEVICE_ID=str(index // ranks_per_gpu))


if __name__ == "__main__":
    take_gpu(int(os.environ["MS_LOCAL_INDEX"]), int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
