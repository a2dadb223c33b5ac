"""Copies a rank's own parts into host memory: while training goes on on a GPU, at once on a CPU."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from muster.torch.snapshot_tensors import SnapshotTensor
from muster.training.shared_room import SharedRoom

_ALIGNMENT = 64

Source = Callable[[Any], Any]
"""Finds the copy of a GPU tensor that is kept on the GPU for another purpose; None: there is none."""


class OwnRoom:
    """Host memory for one copy, at a fixed address, so that a GPU may write there by itself.

    Args:
        size: the size in bytes.
        pinned: pin the memory, for a GPU that writes there.
        host: use this memory, a uint8 tensor, instead of new memory.

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
    """Bytes that a room of ``size`` bytes takes: torch rounds pinned memory up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


class KeptRead:
    """Copies what is kept on the GPU into host memory; any thread may start it.

    To start hundreds of copies takes the host milliseconds, for which the training need not wait.

    Args:
        source: where ``kept`` was found.
        kept: 1-dim tensors on the GPU.
        after: events on the GPU that the copies wait for.
        copy: copies the tensors, on the current stream.
        stream: the stream on which the copies run.
    """

    def __init__(
        self,
        source: Source,
        kept: Sequence[Any],
        after: Sequence[Any],
        copy: Callable[[Sequence[Any]], None],
        stream: Any,
    ) -> None:
        self.source = source
        self._kept: Sequence[Any] | None = kept
        self._after, self._copy, self._stream = after, copy, stream
        self._end: Any = None
        self._lock = threading.Lock()

    def begin(self) -> Any:
        """Starts the copies, unless started or dropped; returns an event at their end, None if dropped."""
        with self._lock:
            if self._end is None and self._kept is not None:
                with torch.cuda.stream(self._stream):
                    for event in self._after:
                        self._stream.wait_event(event)
                    self._copy(self._kept)
                    self._end = self._stream.record_event(torch.cuda.Event(blocking=True))
            return self._end

    def wait(self) -> None:
        """Waits until the copy is in host memory."""
        end = self.begin()
        if end is not None:
            end.synchronize()

    def drop(self) -> None:
        """Cancels the copies if they have not been started."""
        with self._lock:
            if self._end is None:
                self._kept = None

    def is_over(self) -> bool:
        """Whether the copies have ended or were cancelled."""
        with self._lock:
            return self._kept is None if self._end is None else bool(self._end.query())


class PartCopier:
    """Copies the ``own`` elements of tensors, one behind the other, into host memory.

    From a GPU they are first gathered in GPU memory, in the order of the current stream, so that later work
    may change the tensors at once; then a side stream copies them to the host. Where copies of all of them
    are kept on the GPU anyhow, those are read instead, by the thread that waits for the result; before they
    are written again, :meth:`wait_until_read` must be called.

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
        self._staged_read_end: Any = None
        self._reads: list[KeptRead] = []

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

    def take(
        self, room: OwnRoom, source: Source | None = None, *, after: Sequence[Any] = ()
    ) -> Callable[[], None]:
        """Starts to copy the tensors as they are now, or as ``source`` has them.

        Args:
            room: the memory to copy to.
            source: see :data:`Source`.
            after: events on the GPU that reading from ``source`` waits for.

        Returns:
            A function that waits until the copy is in host memory; any thread may call it.
        """
        if not self._on_gpu:
            self._gather(self._flats, room.host)
            return _nothing
        current = torch.cuda.current_stream(self.device)
        kept = [] if source is None else [source(flat) for flat in self._flats]
        if source is not None and kept and all(each is not None for each in kept):
            self._reads = [each for each in self._reads if not each.is_over()]
            copy = partial(self._gather, into=room.host)
            self._reads.append(KeptRead(source, kept, [current.record_event(), *after], copy, self._stream))
            return self._reads[-1].wait
        if self._staged is None or len(self._staged) < self.size:
            self._staged = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self._staged_read_end is not None:
            current.wait_event(self._staged_read_end)
        self._gather(self._flats, self._staged)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            room.host[: self.size].copy_(self._staged[: self.size], non_blocking=True)
            self._staged_read_end = self._stream.record_event(torch.cuda.Event(blocking=True))
        return self._staged_read_end.synchronize  # type: ignore[no-any-return]

    def beside(self) -> AbstractContextManager[Any]:
        """Context whose GPU work runs on the copies' stream, and so does not wait for the training."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_until_read(self, source: Source) -> None:
        """Makes the current stream wait until nothing that ``source`` finds is being read any more."""
        for read in self._reads:
            if read.source == source and (end := read.begin()) is not None:
                torch.cuda.current_stream(self.device).wait_event(end)

    def drop_waiting(self) -> None:
        """Cancels the copies that have not been started, for which nobody waits any more."""
        for read in self._reads:
            read.drop()

    def _gather(self, flats: Sequence[Any], into: Any) -> None:
        pairs: dict[Any, tuple[list[Any], list[Any]]] = {}
        for flat, (start, nbytes) in zip(flats, self.places, strict=True):
            if nbytes:
                targets, sources = pairs.setdefault(flat.dtype, ([], []))
                targets.append(into[start : start + nbytes].view(flat.dtype))
                sources.append(flat)
        with torch.no_grad():
            for targets, sources in pairs.values():
                if into.device == sources[0].device:
                    torch._foreach_copy_(targets, sources)
                else:
                    for target, each in zip(targets, sources, strict=True):
                        target.copy_(each, non_blocking=True)


def _nothing() -> None:
    return None
