"""Runs one AllReduce of ones and writes the time to a file: a process of ``muster bench start``."""

import os
import sys
import time
from pathlib import Path
from typing import Any

GPU = os.environ["START_DEVICE"] == "gpu"


def muster() -> tuple[int, int, float]:
    """Runs it in a session, on CuPy or NumPy arrays; returns rank, world size and result."""
    import muster

    session = muster.init("nccl" if GPU else "tcp")
    module: Any = __import__("cupy" if GPU else "numpy")
    total = muster.all_reduce(module.ones(1024, module.float32))
    result = session.rank, session.world_size, float(total[0])
    stamp(result)
    muster.release()
    return result


def torchrun() -> tuple[int, int, float]:
    """Runs it by torch.distributed; returns rank, world size and result."""
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    if GPU:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if GPU else None
    torch.distributed.init_process_group("nccl" if GPU else "gloo", device_id=device)
    total = torch.ones(1024, device=device)
    torch.distributed.all_reduce(total)
    result = rank, torch.distributed.get_world_size(), float(total[0])
    stamp(result)
    torch.distributed.destroy_process_group()
    return result


def mpirun() -> tuple[int, int, float]:
    """Runs it by CuPy's NCCL, with mpi4py for the unique id; returns rank, world size and result."""
    import cupy
    from cupy.cuda import nccl
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank).use()
    unique_id = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    communicator = nccl.NcclCommunicator(world.size, unique_id, world.rank)
    total = cupy.ones(1024, cupy.float32)
    stream = cupy.cuda.get_current_stream().ptr
    communicator.allReduce(total.data.ptr, total.data.ptr, 1024, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
    result = world.rank, world.size, float(total[0])
    stamp(result)
    communicator.destroy()
    return result


def stamp(result: tuple[int, int, float]) -> None:
    """Writes the time at which this rank's AllReduce was over.

    Raises:
        SystemExit: the result was wrong.
    """
    rank, size, value = result
    if value != size:
        raise SystemExit(f"rank {rank} got {value} from {size} ranks")
    Path(os.environ["START_STAMPS"], f"rank-{rank}").write_text(repr(time.monotonic()))


if __name__ == "__main__":
    {"muster": muster, "torchrun": torchrun, "mpirun": mpirun}[sys.argv[1]]()
