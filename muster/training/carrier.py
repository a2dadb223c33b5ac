"""Sends arrays, numbers and text between ranks in few large collectives."""

from __future__ import annotations

import importlib
import math
import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muster.communicators.arrays import Array
from muster.communicators.base import Communicator
from muster.communicators.work import Work
from muster.errors import ArrayError
from muster.version import how_to_install

if TYPE_CHECKING:
    from muster.worker.session.session import Session

PIECE_BYTES = 64 * 2**20
Key = TypeVar("Key", bound=Hashable)


def array_module(arrays: Mapping[str, Array]) -> Any:
    """Returns the module of the arrays, ``numpy`` or ``cupy``.

    Raises:
        ArrayError: the arrays are of another library, or of more than one.
    """
    kinds = {type(array).__module__.partition(".")[0] for array in arrays.values()}
    if len(kinds) != 1 or not kinds <= {"numpy", "cupy"}:
        found = ", ".join(sorted(kinds)) or "none at all"
        raise ArrayError(
            f"The arrays must be all of NumPy or all of CuPy, not {found}.",
            remedy="For torch modules use muster.DataParallel.",
        )
    return sys.modules[kinds.pop()]


def module_for(session: Session) -> Any:
    """Returns CuPy, and selects its GPU, if the session's collectives take arrays on a GPU; else NumPy.

    Raises:
        ArrayError: CuPy is not installed.
    """
    if not session.backend.on_device:
        return importlib.import_module("numpy")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        raise ArrayError(
            "Arrays on a GPU need CuPy, which is not installed.",
            remedy=f"{how_to_install('cuda13')} ([cuda12] for CUDA 12), or train on CPUs: MS_BACKEND=tcp.",
        ) from None
    cupy.cuda.Device(session.device_ordinal).use()
    return cupy


def on_host(xp: Any) -> bool:
    """Whether arrays of this module can be read without waiting for a device."""
    return bool(xp.__name__ == "numpy")


class Library(Protocol):
    """Operations that differ between arrays of NumPy, CuPy and torch.

    Attributes:
        in_background: whether the next piece is packed while one is being sent.
    """

    in_background: bool

    def numbers(self, values: Sequence[int], dtype: str) -> Array:
        """Returns a new 1-dim array of these values."""

    def empty(self, size: int, like: Array) -> Array:
        """Returns a new, uninitialised 1-dim array of the dtype of ``like``."""

    def packed(self, arrays: Sequence[Array]) -> Array:
        """Returns a new 1-dim array of all elements of ``arrays``, which have the same dtype."""

    def to_bytes(self, array: Array) -> bytes:
        """Returns the memory of a 1-dim array."""

    def sent(self, communicator: Communicator, flat: Array) -> Array:
        """Returns a 1-dim array's memory as the communicator sends it: as int64, or as bytes."""


class NumpyLibrary:
    """Arrays of NumPy or CuPy; see :class:`Library`."""

    in_background = True

    def __init__(self, module: Any) -> None:
        self._xp = module

    def numbers(self, values: Sequence[int], dtype: str) -> Array:
        """See :class:`Library`."""
        return self._xp.asarray(bytearray(values) if dtype == "uint8" else values, dtype=dtype)

    def empty(self, size: int, like: Array) -> Array:
        """See :class:`Library`."""
        return self._xp.empty(size, like.dtype)

    def packed(self, arrays: Sequence[Array]) -> Array:
        """See :class:`Library`."""
        return self._xp.concatenate([array.reshape(-1) for array in arrays])

    def to_bytes(self, array: Array) -> bytes:
        """See :class:`Library`."""
        raw: bytes = array.tobytes()
        return raw

    def sent(self, communicator: Communicator, flat: Array) -> Array:
        """See :class:`Library`."""
        return flat if flat.dtype == "int64" else flat.view("uint8")


class Carrier:
    """Sends numbers, text and arrays between ranks. The host waits for the results.

    Args:
        communicator: the communicator of all ranks.
        library: the operations on the arrays.
    """

    def __init__(self, communicator: Communicator, library: Library) -> None:
        self._communicator = communicator
        self._library = library

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of every rank, by rank: below 2**63, and the same count on each rank."""
        library, count = self._library, len(row)
        send = library.numbers(row, "int64")
        recv = library.numbers([0] * (count * self._communicator.world_size), "int64")
        self._communicator.all_gather(*(library.sent(self._communicator, each) for each in (send, recv)))
        self._wait()
        numbers: list[int] = recv.tolist()
        return [numbers[start : start + count] for start in range(0, len(numbers), count)]

    def gather_texts(self, text: str, *, length: int | None = None) -> list[str]:
        """Returns every rank's text, by rank; ``length``: its size in bytes, if known and equal on all."""
        raw, library, world_size = text.encode(), self._library, self._communicator.world_size
        if length is None:
            length = max(row[0] for row in self.gather([len(raw)]))
        send = library.numbers(raw.ljust(length, b"\0"), "uint8")
        recv = library.numbers(bytes(world_size * length), "uint8")
        self._communicator.all_gather(*(library.sent(self._communicator, each) for each in (send, recv)))
        self._wait()
        everything = library.to_bytes(recv)
        starts = range(0, world_size * length, length) if length else [0] * world_size
        return [everything[start : start + length].rstrip(b"\0").decode() for start in starts]

    def broadcast_text(self, mine: bytes, length: int, source: int) -> str:
        """Returns the text of the rank ``source``, which is ``length`` bytes long."""
        buffer = self._library.numbers(mine if self._communicator.rank == source else bytes(length), "uint8")
        self._communicator.broadcast(self._library.sent(self._communicator, buffer), source)
        self._wait()
        return self._library.to_bytes(buffer).decode()

    def broadcast(self, arrays: Mapping[Key, Array], source: int) -> Iterator[tuple[Key, Array]]:
        """Yields the arrays of ``source`` by name, on every rank; this rank's arrays stay untouched.

        On a GPU an error of a broadcast is raised only later; see :meth:`receive`.
        """
        under_way: deque[tuple[Work, list[Key], Array]] = deque()
        library, communicator = self._library, self._communicator
        for names in _pieces(arrays):
            mine = [arrays[name] for name in names]
            if communicator.rank == source:
                flat = library.packed(mine)
            else:
                flat = library.empty(sum(math.prod(array.shape) for array in mine), mine[0])
            sent = library.sent(communicator, flat)
            work = communicator.broadcast(sent, source, async_op=library.in_background)
            under_way.append((work, names, flat))
            if not library.in_background:
                yield from _parts(under_way, arrays)
        yield from _parts(under_way, arrays)

    def overwrite(self, arrays: Mapping[Key, Array], source: int) -> None:
        """Overwrites NumPy's or CuPy's arrays of all ranks with those of ``source``."""
        for name, part in self.broadcast(arrays, source):
            arrays[name][...] = part

    def receive(self, arrays: Mapping[Key, Array], source: int) -> dict[Key, Array]:
        """Returns the arrays of ``source`` by name, once all have arrived; this rank's stay untouched."""
        received = dict(self.broadcast(arrays, source))
        self._wait()  # the result of a failed broadcast must not be used
        return received

    def _wait(self) -> None:
        """Waits for a collective; otherwise a read after an aborted one might hang or return garbage."""
        self._communicator.synchronize()


def _pieces(arrays: Mapping[Key, Array]) -> Iterator[list[Key]]:
    """Groups arrays of the same dtype into lists; each list is sent by one broadcast."""
    groups: dict[Any, list[Key]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.dtype, []).append(name)
    for group in groups.values():
        piece: list[Key] = []
        size = 0
        for name in group:
            piece.append(name)
            size += arrays[name].nbytes
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece


def _parts(
    under_way: deque[tuple[Work, list[Key], Array]], arrays: Mapping[Key, Array]
) -> Iterator[tuple[Key, Array]]:
    """Waits for the pieces, and yields the arrays in them."""
    while under_way:
        work, names, flat = under_way.popleft()
        work.wait()
        start = 0
        for name in names:
            shape = arrays[name].shape
            end = start + math.prod(shape)
            yield name, flat[start:end].reshape(shape)
            start = end
