"""A session on GPUs in the contract suite: one process per GPU unless a variable says otherwise."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, cast

from muster.communicators.base import Backend
from muster.communicators.following import FollowingBackend
from muster.communicators.tcp.backend import TcpBackend
from muster.launch.plan import sharing_environment
from tests.contracts.kits import ALL_DTYPES, Kit, NumpyArray
from tests.gpu.sharing import RANKS_PER_GPU, ranks_on

DTYPES = ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "u4", "u8")


class NcclKit(Kit):
    """CuPy arrays, which go over NCCL; it does not notice that ranks disagree."""

    def __init__(self, name: str = "nccl", **changes: Any) -> None:
        cupy = importlib.import_module("cupy")
        count = int(cupy.cuda.runtime.getDeviceCount())
        # NCCL's mean scales each rank's part before it adds them.
        facts: dict[str, Any] = {"dtypes": DTYPES, "divides_last": False, "on_device": True, **changes}
        super().__init__(name, "nccl", tells_mismatch=False, max_world_size=ranks_on(count), **facts)

    def create(self, certificates: Path, rank: int) -> Backend:
        """On the rank's GPU; array and communicator must be on one device."""
        from muster.communicators.nccl.communicator import NcclBackend

        if RANKS_PER_GPU > 1:
            os.environ.update(sharing_environment(f"rank-{rank}"))
        device = rank // RANKS_PER_GPU
        importlib.import_module("cupy").cuda.Device(device).use()
        return FollowingBackend(NcclBackend(device_index=device), TcpBackend(tls=None))

    def array(self, values: NumpyArray) -> Any:
        """A CuPy array."""
        return importlib.import_module("cupy").asarray(values)

    def numpy(self, array: Any) -> NumpyArray:
        """Waits for the current stream."""
        return cast("NumpyArray", importlib.import_module("cupy").asnumpy(array))

    def synchronize(self) -> None:
        """On CUDA ``wait()`` orders streams only."""
        importlib.import_module("cupy").cuda.get_current_stream().synchronize()


class NcclCpuKit(NcclKit):
    """NumPy arrays in the same session, which go over tcp."""

    def __init__(self) -> None:
        super().__init__("nccl-cpu", dtypes=ALL_DTYPES, divides_last=True, on_device=False)

    array = Kit.array
    numpy = Kit.numpy
    synchronize = Kit.synchronize
