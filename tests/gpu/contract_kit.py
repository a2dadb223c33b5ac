"""NCCL in the contract suite: CuPy arrays, one process per GPU unless a variable says otherwise."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, cast

from muster.worker.communicators.base import Backend
from muster.worker.launch.plan import sharing_environment
from tests.contracts.kits import Kit, NumpyArray
from tests.gpu.sharing import RANKS_PER_GPU, ranks_on

DTYPES = ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "u4", "u8")


class NcclKit(Kit):
    """As many ranks as GPUs allow; NCCL does not notice that ranks disagree."""

    def __init__(self) -> None:
        cupy = importlib.import_module("cupy")
        count = int(cupy.cuda.runtime.getDeviceCount())
        # NCCL's mean scales each rank's part before it adds them.
        super().__init__(
            "nccl",
            "nccl",
            DTYPES,
            tells_mismatch=False,
            max_world_size=ranks_on(count),
            divides_last=False,
            on_device=True,
        )

    def create(self, certificates: Path, rank: int) -> Backend:
        """On the rank's GPU; array and communicator must be on one device."""
        from muster.worker.communicators.nccl.communicator import NcclBackend

        if RANKS_PER_GPU > 1:
            os.environ.update(sharing_environment(f"rank-{rank}"))
        device = rank // RANKS_PER_GPU
        importlib.import_module("cupy").cuda.Device(device).use()
        return NcclBackend(device_index=device)

    def array(self, values: NumpyArray) -> Any:
        """A CuPy array."""
        return importlib.import_module("cupy").asarray(values)

    def numpy(self, array: Any) -> NumpyArray:
        """Waits for the current stream."""
        return cast("NumpyArray", importlib.import_module("cupy").asnumpy(array))

    def synchronize(self) -> None:
        """On CUDA ``wait()`` orders streams only."""
        importlib.import_module("cupy").cuda.get_current_stream().synchronize()
