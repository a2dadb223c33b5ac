"""Copies of a rank's own parts in host memory: beside the training on a GPU, at once on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from muster.torch.snapshot_tensors import SnapshotTensor
from muster.training.shared_room import SharedRoom

_ALIGNMENT = 64

Source = Callable[[Any], Any]
"""Finds a copy of a tensor of the GPU that is kept there anyhow; None: there is none."""


class OwnRoom:
    """Host memory for one copy; its address stays, so that a GPU may write there by itself.

    Args:
        size: in bytes.
        pinned: a GPU writes there.
        host: the memory, where it is there already.

    Attributes:
        shared: the memory for another process of this host; None: it is this process's alone.
    """

    def __init__(self, size: int, *, pinned: bool, host: Any = None) -> None:
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned) if host is None else host
        self.data = memoryview(self.host.numpy())
        self.shared: SharedRoom | None = None

    @classmethod
    def in_shared_memory(cls, size: int) -> OwnRoom:
        """A room of the host, 1 byte or more, that another process reads, too.

        Raises:
            OSError: there is not as much shared memory.
        """
        shared = SharedRoom()
        room = cls(size, pinned=False, host=torch.frombuffer(shared.take(size), dtype=torch.uint8))
        room.shared = shared
        return room


def room_bytes(size: int, *, pinned: bool) -> int:
    """Memory that a room of this many bytes takes: torch rounds pinned memory up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


class PartCopier:
    """Copies the ``own`` elements of tensors, one behind the other, into host memory.

    On a GPU they are first gathered there, in the order of the current stream, so that what follows may
    change the tensors at once; then a stream of its own takes them to the host. Where a copy of all of them
    is kept on the GPU anyhow, that is read instead, and must stay until :attr:`read_end`.

    Args:
        tensors: in an order that stays.
        device: where they are.
    """

    def __init__(self, tensors: Sequence[SnapshotTensor], device: Any) -> None:
        self.device = device
        self.follow(tensors)
        self._on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None
        self._staged: Any = None
        self.read_end: Any = None
        """Event on the GPU behind which nothing is read any more; None: nothing is."""

    def follow(self, tensors: Sequence[SnapshotTensor]) -> None:
        """Copies these tensors from now on."""
        self.tensors = list(tensors)
        self.places: list[tuple[int, int]] = []
        end = 0
        for each in self.tensors:
            nbytes = (each.own.stop - each.own.start) * each.tensor.element_size()
            self.places.append((end, nbytes))
            end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.size = end

    def take(
        self, room: OwnRoom, source: Source | None = None, *, after: Sequence[Any] = ()
    ) -> Callable[[], None]:
        """Begins to copy the tensors as they are now, or as ``source`` has them.

        Args:
            room: where to.
            source: see :data:`Source`.
            after: events on the GPU that the reading of ``source`` waits for.

        Returns:
            What waits until the copy is in host memory.
        """
        flats = [each.own_flat() for each in self.tensors]
        if not self._on_gpu:
            self._gather(flats, room.host)
            return _nothing
        kept = [source(flat) for flat in flats] if source is not None else []
        current = torch.cuda.current_stream(self.device)
        from_kept = bool(kept) and all(each is not None for each in kept)
        if not from_kept:
            if self._staged is None or len(self._staged) < self.size:
                self._staged = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            if self.read_end is not None:
                current.wait_event(self.read_end)
            self._gather(flats, self._staged)
        self._stream.wait_stream(current)
        for event in after if from_kept else ():
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            if from_kept:
                self._gather(kept, room.host)
            else:
                room.host[: self.size].copy_(self._staged[: self.size], non_blocking=True)
            self.read_end = self._stream.record_event(torch.cuda.Event(blocking=True))
        return self.read_end.synchronize  # type: ignore[no-any-return]

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
