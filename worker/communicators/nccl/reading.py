"""How a communicator reads its arguments: which library an array is of, where it is, whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from muster.worker.communicators.base import Array
from muster.worker.communicators.nccl.arrays import (
    ITEM_SIZES,
    TYPE_NAMES,
    Facts,
    exported_stream,
    read_cupy,
    read_interface,
    read_torch,
    reader_of,
)
from muster.worker.communicators.nccl.reduction import Issued
from muster.worker.communicators.nccl.streams import CudaLibrary, library_of, loaded_library
from muster.worker.communicators.validation import overlapping
from muster.worker.errors import ArrayError


class ArrayReading:
    """Reads arrays of one device; remembers by type how.

    Args:
        device_index: the communicator's GPU.
    """

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        raise NotImplementedError

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self._readers: dict[type, tuple[Callable[..., Facts], Callable[[], int], Issued]] = {}
        self._libraries: dict[str, CudaLibrary] = {}
        self._own_streams: dict[str, tuple[Any, int]] = {}

    def check(self) -> None:
        """Raises what ended the communicator."""
        raise NotImplementedError

    def _learn(self, array: Array) -> tuple[Callable[..., Facts], Callable[[], int], Issued]:
        read = reader_of(array)
        name = {read_torch: "torch", read_cupy: "cupy"}.get(read) or loaded_library()
        library = self._library(name)
        if read is read_interface:
            read = _in_order(library)
        entry = (read, library.current, Issued(self, library))
        self._readers[type(array)] = entry
        return entry

    def _library(self, name: str) -> CudaLibrary:
        library = self._libraries.get(name)
        if library is None:
            library = self._libraries[name] = library_of(name, self.device_index)
        return library

    def share_libraries(self, other: ArrayReading) -> None:
        """Takes part in what ``other`` knows of the libraries in use."""
        self._libraries = other._libraries

    def _libraries_in_use(self) -> list[CudaLibrary]:
        """Those whose arrays there were; before the first, the one that is loaded."""
        return list(self._libraries.values()) or [self._library(loaded_library())]

    def _own_stream(self, library: CudaLibrary) -> tuple[Any, int]:
        stream = self._own_streams.get(library.name)
        if stream is None:
            stream = self._own_streams[library.name] = library.new_stream()
        return stream

    def _read(self, array: Array, moved: bool = False) -> tuple[int, int, int]:
        """Address, count and dtype; ``moved``: what NCCL does with it needs no arithmetic."""
        read = (self._readers.get(type(array)) or self._learn(array))[0]
        pointer, count, dtype, device = read(array, moved)
        if device != self.device_index and device >= 0:
            self._refuse_device(device)
        return pointer, count, dtype

    def _read_like(
        self,
        array: Array,
        count: int,
        dtype: int,
        first: int,
        length: int,
        at: int | None,
        moved: bool = False,
    ) -> int:
        """Address of an array of so many elements.

        Args:
            array: the second one of a collective.
            count: its number of elements.
            dtype: NCCL's number of its dtype.
            first: address of the first one.
            length: its number of elements.
            at: so many elements behind the first one it may begin, and so be in place; nowhere else may it
                share memory. None: not even there.
            moved: what NCCL does with it needs no arithmetic.
        """
        pointer, found, found_dtype = self._read(array, moved)
        if found != count or found_dtype != dtype:
            raise ArrayError(
                f"the arrays do not fit: one has {found} elements of {TYPE_NAMES[found_dtype]} where"
                f" {count} of {TYPE_NAMES[dtype]} are needed (group of {self.world_size} ranks)"
            )
        item = ITEM_SIZES[dtype]
        apart = pointer >= first + length * item or first >= pointer + count * item
        if not apart and (at is None or pointer != first + at * item):
            raise overlapping()
        return pointer

    def _refuse_device(self, device: int) -> NoReturn:
        raise ArrayError(
            f"the array is on GPU {device}, the communicator of rank {self.rank} on GPU {self.device_index}",
            remedy=f"Move the array to GPU {self.device_index}.",
        )


def _in_order(library: CudaLibrary) -> Callable[..., Facts]:
    """:func:`read_interface`; the current stream waits for the one on which the array is exported."""

    def read(array: Array, moved: bool = False) -> Facts:
        facts = read_interface(array, moved)
        stream = exported_stream(array)
        if stream is not None:
            library.follow_exported(stream)
        return facts

    return read
