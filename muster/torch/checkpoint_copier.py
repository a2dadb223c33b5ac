"""Copies tensors into memory from which another process writes a checkpoint, while training goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from muster.torch.snapshot_copies import OwnRoom, PartCopier
from muster.torch.snapshot_tensors import SnapshotTensor
from muster.training.checkpoint_copy import CheckpointCopy, Room, arrays_in, place_arrays
from muster.training.parts import Part

_LOG = logging.getLogger("muster.worker")


class CheckpointCopier:
    """Copies a state's tensors in the order of the current stream, so that later work may change them.

    Args:
        device: the tensors' device.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._copier = PartCopier([], device)
        self._host: Any = None

    def copy(
        self, description: str, tensors: Mapping[str, Any], more: Mapping[str, NDArray[Any]], room: Room
    ) -> CheckpointCopy:
        """Starts to copy a state.

        Args:
            description: the state's description, JSON.
            tensors: the tensors by name; if NumPy lacks a dtype, the copy is float32, which is exact.
            more: the state's arrays in host memory, by name.
            room: the memory to copy to; it may be read once the copy's ``ready`` has returned.

        Raises:
            OSError: ``room`` does not have enough memory.
            torch.OutOfMemoryError: the GPU has no room for a copy.
        """
        known = {
            name: tensor if _in_numpy(tensor.dtype) else tensor.float() for name, tensor in tensors.items()
        }
        kinds = {name: (_in_numpy(each.dtype), tuple(each.shape)) for name, each in known.items()}
        kinds |= {name: (each.dtype.str, each.shape) for name, each in more.items()}
        places, size = place_arrays(kinds)
        self._copier.follow([_whole(name, tensor) for name, tensor in known.items()])
        data = room.take(size)
        for name, target in arrays_in(data, {name: places[name] for name in more}).items():
            np.copyto(target, more[name])
        read = self._copier.take(OwnRoom(size, pinned=False, host=self._host_of(data)))
        return CheckpointCopy(description, places, size, read.wait)

    def _host_of(self, data: memoryview) -> Any:
        """Returns the memory as a uint8 tensor, pinned so that a GPU may write to it by itself."""
        old = self._host
        host = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        if old is not None and (old.data_ptr(), len(old)) == (host.data_ptr(), len(host)):
            return old
        if self._device.type == "cuda":
            runtime = torch.cuda.cudart()
            if old is not None:
                torch.cuda.synchronize(self._device)  # a copy into it may still run
                runtime.cudaHostUnregister(old.data_ptr())
            code = int(runtime.cudaHostRegister(host.data_ptr(), len(host), 0))
            if code:  # not pinned: the copy takes longer, and the training waits for it
                _LOG.warning("memory for checkpoints cannot be pinned: CUDA error %d", code)
        self._host = host
        return host


def _whole(name: str, tensor: Any) -> SnapshotTensor:
    """Describes a whole tensor for a PartCopier: its elements, row by row."""
    shape = tuple(tensor.shape)
    flat = tensor.detach().contiguous().reshape(-1)
    part = Part((0,), (flat.numel(),), 0, math.prod(shape))
    return SnapshotTensor(name, shape, flat, part, part)


def _in_numpy(dtype: Any) -> str:
    """Returns the dtype as NumPy writes it; "" if NumPy has none."""
    try:
        return str(torch.empty(0, dtype=dtype).numpy().dtype.str)
    except TypeError:
        return ""
