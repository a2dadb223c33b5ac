"""What the training helpers share: collectives on named arrays and on text, for NumPy and CuPy alike."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from muster.worker.communicators.base import Array, Communicator
from muster.worker.errors import ArrayError

if TYPE_CHECKING:
    from muster.worker.control.session import Session


def array_module(arrays: Mapping[str, Array]) -> Any:
    """The module that the arrays come from, ``numpy`` or ``cupy``.

    Raises:
        ArrayError: they are of another kind, or of several.
    """
    kinds = {type(array).__module__.partition(".")[0] for array in arrays.values()}
    if len(kinds) != 1 or not kinds <= {"numpy", "cupy"}:
        found = ", ".join(sorted(kinds)) or "none at all"
        raise ArrayError(
            f"The arrays must be all of NumPy or all of CuPy, not {found}.",
            remedy="For torch modules use worker.DataParallel.",
        )
    return sys.modules[kinds.pop()]


def module_for(session: Session) -> Any:
    """CuPy where the session's collectives take arrays on a GPU (it becomes the current one), else NumPy.

    Raises:
        ArrayError: CuPy is not installed.
    """
    if session.backend.name != "nccl":
        return importlib.import_module("numpy")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ArrayError(
            "Arrays on a GPU need CuPy, which is not installed.",
            remedy="pip install 'muster-rendezvous[cuda12]' (or [cuda13]), or train on CPUs: MS_BACKEND=tcp.",
        ) from error
    cupy.cuda.Device(session.device_ordinal).use()
    return cupy


def broadcast_arrays(communicator: Communicator, arrays: Mapping[str, Array], source: int) -> None:
    """Overwrites the arrays of all ranks with those of rank ``source``, in place."""
    for work in [communicator.broadcast(array, source, async_op=True) for array in arrays.values()]:
        work.wait()


def on_host(xp: Any) -> bool:
    """Whether arrays of this module can be read without waiting for a device."""
    return bool(xp.__name__ == "numpy")


def exchange_text(communicator: Communicator, xp: Any, text: str, *, length: int | None = None) -> list[str]:
    """Every rank's text, on all ranks; ``length`` in bytes where all have the same."""
    raw, world_size = text.encode(), communicator.world_size
    if length is None:
        lengths = xp.zeros(world_size, dtype="int64")
        communicator.all_gather(xp.asarray([len(raw)], dtype="int64"), lengths)
        length = int(lengths.max())
    send, recv = xp.zeros(length, dtype="uint8"), xp.zeros(world_size * length, dtype="uint8")
    send[: len(raw)] = xp.asarray(bytearray(raw), dtype="uint8")
    communicator.all_gather(send, recv)
    return [bytes(part.tolist()).rstrip(b"\0").decode() for part in recv.reshape(world_size, length)]
