"""NCCL in the contract suite: one process per GPU, CuPy arrays."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast

from tests.contracts.kits import Kit, NumpyArray
from worker.communicators.base import Backend

DTYPES = ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "u4", "u8")


class NcclKit(Kit):
    """As many ranks as there are GPUs; NCCL cannot tell that ranks disagree."""

    def __init__(self) -> None:
        cupy = importlib.import_module("cupy")
        count = int(cupy.cuda.runtime.getDeviceCount())
        size = min(count, 4)
        # NCCL's mean scales each rank's part before it adds them.
        super().__init__(
            "nccl", "nccl", DTYPES, tells_mismatch=False, max_world_size=size, divides_last=False
        )

    def create(self, certificates: Path, rank: int) -> Backend:
        """On the GPU of the rank's number; array and communicator must be on one device."""
        from worker.communicators.nccl import NcclBackend

        importlib.import_module("cupy").cuda.Device(rank).use()
        return NcclBackend(device_index=rank)

    def array(self, values: NumpyArray) -> Any:
        """A CuPy array."""
        return importlib.import_module("cupy").asarray(values)

    def numpy(self, array: Any) -> NumpyArray:
        """Waits for the current stream."""
        return cast("NumpyArray", importlib.import_module("cupy").asnumpy(array))

    def synchronize(self) -> None:
        """On CUDA ``wait()`` orders streams only."""
        importlib.import_module("cupy").cuda.get_current_stream().synchronize()
