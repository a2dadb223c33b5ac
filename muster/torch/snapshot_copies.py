"""Copies a rank's own parts into host memory: on a GPU while training goes on, on a CPU at once."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from muster.torch.snapshot_tensors import SnapshotTensor
from muster.training.shared_room import SharedRoom

_ALIGNMENT = 64

PIECE_BYTES = 32 << 20
"""Bytes that a GPU copies to the host at a time, which takes a PCIe 5 link about 0.7 ms."""

Source = Callable[[Any], Any]
"""Finds the copy of a GPU tensor that is kept on the GPU for another purpose; None: there is none."""


class OwnRoom:
    """Host memory for one copy, at a fixed address, so that a GPU may write there by itself.

    Args:
        size: the size in bytes.
        pinned: whether to pin the memory, for a GPU that writes there.
        host: a uint8 tensor whose memory is used instead of new memory.

    Attributes:
        shared: the memory as another process of this host can map it; None: it is private.
    """

    def __init__(self, size: int, *, pinned: bool, host: Any = None) -> None:
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned) if host is None else host
        self.data = memoryview(self.host.numpy())
        self.shared: SharedRoom | None = None

    @classmethod
    def in_shared_memory(cls, size: int) -> OwnRoom:
        """A room of 1 byte or more in shared memory, which another process of this host can read.

        Raises:
            OSError: there is not enough shared memory.
        """
        shared = SharedRoom()
        room = cls(size, pinned=False, host=torch.frombuffer(shared.take(size), dtype=torch.uint8))
        room.shared = shared
        return room


def room_bytes(size: int, *, pinned: bool) -> int:
    """Returns the bytes that a room of ``size`` bytes takes: torch rounds pinned memory to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


class GpuRead:
    """Copies tensors of the GPU into host memory, piece by piece; any thread may do it.

    Starting hundreds of copies takes the host milliseconds, for which the training need not wait. A step's
    own copies to the host, of a few bytes, wait behind all copies that were started before. So :meth:`wait`
    starts a piece only when the previous one has arrived.

    Args:
        source: where ``tensors`` were found; None: in the copier's own staging memory.
        tensors: 1-dim, on the GPU; they must not change before the copies have ended.
        targets: host memory for each.
        after: events on the GPU that the copies wait for.
        stream: the stream on which the copies run; None: there is nothing to copy.
    """

    def __init__(
        self,
        source: Source | None,
        tensors: Sequence[Any],
        targets: Callable[[], Iterable[Any]],
        after: Sequence[Any],
        stream: Any,
    ) -> None:
        self.source = source
        self._tensors, self._targets, self._after, self._stream = tensors, targets, after, stream
        self._pieces: Iterator[Sequence[tuple[Any, Any]]] | None = None
        self._end: Any = None
        self._is_dropped = False
        self._is_whole = stream is None
        self._lock = threading.Lock()

    def begin(self) -> Any:
        """Starts all copies that were not started yet, unless dropped.

        Returns:
            An event at the end of the started copies; None: there are none.
        """
        while self._start_piece():
            pass
        return self._end

    def wait(self) -> None:
        """Runs all copies, and waits until everything is in host memory.

        Raises:
            RuntimeError: it was dropped before.
        """
        while self._start_piece():
            self._end.synchronize()
        if self._end is not None:
            self._end.synchronize()
        if not self._is_whole:
            raise RuntimeError("the copy was dropped before it was whole")

    def drop(self) -> None:
        """Starts no more copies, and waits for those that were started; then the memory is free."""
        with self._lock:
            self._is_dropped = True
        if self._end is not None:
            self._end.synchronize()

    def is_over(self) -> bool:
        """Whether no copy runs or will run."""
        return (self._is_whole or self._is_dropped) and (self._end is None or bool(self._end.query()))

    def _start_piece(self) -> bool:
        """Starts the copies of the next piece; returns whether there was one."""
        with self._lock:
            if self._is_whole or self._is_dropped:
                return False
            with torch.cuda.stream(self._stream), torch.no_grad():
                if self._pieces is None:
                    self._pieces = _in_pieces(zip(self._targets(), self._tensors, strict=True))
                    for event in self._after:
                        self._stream.wait_event(event)
                piece = next(self._pieces, None)
                if piece is None:
                    self._is_whole = True
                    return False
                for target, tensor in piece:
                    target.copy_(tensor, non_blocking=True)
                self._end = self._stream.record_event(torch.cuda.Event(blocking=True))
            return True


def _in_pieces(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Sequence[tuple[Any, Any]]]:
    """Divides pairs of tensors of the same size into groups of about PIECE_BYTES."""
    piece: list[tuple[Any, Any]] = []
    room = PIECE_BYTES
    for target, tensor in pairs:
        most = max(1, PIECE_BYTES // tensor.element_size())
        for one, other in zip(target.split(most), tensor.split(most), strict=True):
            piece.append((one, other))
            room -= one.numel() * one.element_size()
            if room <= 0:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


class PartCopier:
    """Copies the ``own`` elements of tensors, one after the other, into host memory.

    From a GPU they are first gathered in GPU memory, in the order of the current stream, so that later work
    may change the tensors at once. Then a side stream copies them to the host. If copies of all of them exist
    on the GPU anyhow, the thread that waits for the result reads those instead. Before these are written
    again, :meth:`wait_until_read` must be called.

    Args:
        tensors: the tensors, in a fixed order.
        device: their device.
    """

    def __init__(self, tensors: Sequence[SnapshotTensor], device: Any) -> None:
        self.device = device
        self.tensors: list[SnapshotTensor] = []
        self.places: list[tuple[int, int]] = []
        self.size = 0
        self._flats: list[Any] = []
        self.follow(tensors)
        self._on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None
        self._staged: Any = None
        self._reads: list[GpuRead] = []

    def follow(self, tensors: Sequence[SnapshotTensor]) -> None:
        """Copies these tensors from now on."""
        if len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors)):
            return
        self.tensors, self.places, end = list(tensors), [], 0
        for each in self.tensors:
            nbytes = (each.own.stop - each.own.start) * each.tensor.element_size()
            self.places.append((end, nbytes))
            end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.size = end
        self._flats = [each.own_flat() for each in self.tensors]

    def take(self, room: OwnRoom, source: Source | None = None, *, after: Sequence[Any] = ()) -> GpuRead:
        """Takes a copy of the tensors as they are now, or as ``source`` has them.

        Args:
            room: the memory to copy to.
            source: see :data:`Source`.
            after: events on the GPU for which reading from ``source`` waits.

        Returns:
            An object whose :meth:`GpuRead.wait` copies it into host memory; without a GPU, all is done
            already.
        """
        if not self._on_gpu:
            self._gather(room.host)
            return GpuRead(None, [], list, [], None)
        current = torch.cuda.current_stream(self.device)
        kept = [] if source is None else [source(flat) for flat in self._flats]
        if source is not None and kept and all(each is not None for each in kept):
            targets = partial(self._targets, room.host, self.places, kept)
            read = GpuRead(source, kept, targets, [current.record_event(), *after], self._stream)
        else:
            self.wait_until_read(None)
            if self._staged is None or len(self._staged) < self.size:
                self._staged = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            self._gather(self._staged)
            staged, target = self._staged[: self.size], room.host[: self.size]
            read = GpuRead(None, [staged], lambda: [target], [current.record_event()], self._stream)
        self._reads = [*(each for each in self._reads if not each.is_over()), read]
        return read

    def beside(self) -> AbstractContextManager[Any]:
        """Context whose GPU work runs on the copies' stream, so that it does not wait for the training."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_until_read(self, source: Source | None) -> None:
        """Makes the current stream wait until no tensor that ``source`` finds is being read any more.

        Args:
            source: see :data:`Source`; None: the staging memory.
        """
        for read in self._reads:
            if read.source == source and (end := read.begin()) is not None:
                torch.cuda.current_stream(self.device).wait_event(end)

    def drop_reads(self) -> None:
        """Ends all copies, because their results are no longer needed."""
        for read in self._reads:
            read.drop()

    def _gather(self, into: Any) -> None:
        """Copies the tensors into memory of their own device."""
        pairs: dict[Any, tuple[list[Any], list[Any]]] = {}
        for target, flat in zip(self._targets(into, self.places, self._flats), self._flats, strict=True):
            if flat.numel():
                targets, sources = pairs.setdefault(flat.dtype, ([], []))
                targets.append(target)
                sources.append(flat)
        with torch.no_grad():
            for targets, sources in pairs.values():
                torch._foreach_copy_(targets, sources)

    @staticmethod
    def _targets(into: Any, places: Sequence[tuple[int, int]], like: Sequence[Any]) -> Iterator[Any]:
        """The place of each tensor in ``into``, with its dtype."""
        for (start, nbytes), flat in zip(places, like, strict=True):
            yield into[start : start + nbytes].view(flat.dtype)
