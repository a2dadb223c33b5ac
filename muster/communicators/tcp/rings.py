"""Algorithms for large arrays: pipelined rings and chains, in chunks that stay in the cache.

All are plans of views to send and to fill. Chunk ``k`` of a step may be sent on as soon as chunk ``k`` of the
previous step has arrived, so the links stay full without a barrier between steps. Each element is combined
along one fixed path and the result is copied, so that all ranks hold the same bits. Partial results of
float16 and bfloat16 are sent as float32, and rounded once the values of all ranks are combined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.communicators.arithmetic import Arithmetic, NumpyArray
from muster.communicators.arrays import as_bytes
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.transfer import Incoming, Multiplexer, Outgoing

CHUNK_BYTES = 524288
"""Number of bytes that are received before they are combined or passed on: the content of a record."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place in the ring, the connections to both sides, and the deadline of the call."""

    multiplexer: Multiplexer
    left: PeerConnection
    right: PeerConnection
    rank: int
    size: int
    deadline: float

    def run(self, outgoing: Outgoing | None, incoming: Incoming | None) -> None:
        """Runs one plan; while it runs, payloads are on the wire."""
        streams: list[Outgoing] = [] if outgoing is None else [outgoing]
        self.multiplexer.run(streams, [] if incoming is None else [incoming], self.deadline)


class Segments:
    """An array of ``count`` elements cut into one segment per rank, and each into ``chunks`` chunks."""

    def __init__(self, count: int, ranks: int, itemsize: int) -> None:
        self._bounds = [i * count // ranks for i in range(ranks + 1)]
        self._step = max(1, CHUNK_BYTES // itemsize)
        longest = -(-count // ranks)
        self.chunks = max(1, -(-longest // self._step))
        self.chunk_size = min(self._step, longest)

    def slice(self, segment: int, chunk: int) -> slice:
        """The chunk's slice of the array; empty where this segment is shorter than others."""
        start, stop = self._bounds[segment], self._bounds[segment + 1]
        begin = min(start + chunk * self._step, stop)
        return slice(begin, min(begin + self._step, stop))


class _Combining:
    """Combines the chunks that arrive from the left neighbour with this rank's values.

    Args:
        numbers: the arithmetic of the dtype.
        op: the reduction.
        ranks: the number of ranks.
        chunk_size: the largest number of elements of a chunk.
    """

    def __init__(self, numbers: Arithmetic, op: ReduceOp, ranks: int, chunk_size: int) -> None:
        self._numbers, self._op, self._ranks = numbers, op, ranks
        self._first = np.empty(chunk_size, numbers.storage)
        self._later = np.empty(chunk_size if numbers.is_short and ranks > 2 else 0, numbers.wide)

    def room(self, count: int, first: bool) -> NumpyArray:
        """Returns the buffer for a chunk: of the user's dtype from the ``first`` rank, wide otherwise."""
        short = not first and self._numbers.is_short
        return (self._later if short else self._first)[:count]

    def add(self, mine: NumpyArray, first: bool, partial: NumpyArray | None, out: Any) -> None:
        """Combines the arrived chunk with ``mine`` into ``partial``, or if that is None into ``out``."""
        numbers = self._numbers
        arrived = numbers.widen(self.room(mine.size, first))
        into = partial if partial is not None else arrived if numbers.is_short else out
        numbers.combine(self._op, arrived, numbers.widen(mine), into)
        if partial is None:
            numbers.finish(self._op, into, self._ranks, out)


def all_reduce_plan(
    ring: Ring, send: NumpyArray, recv: NumpyArray, numbers: Arithmetic, op: ReduceOp
) -> tuple[Outgoing, Incoming]:
    """Plans a ring: segments are combined in the first round and copied in the second."""
    size, rank = ring.size, ring.rank
    cut = Segments(recv.size, size, recv.itemsize)
    scratch = _Combining(numbers, op, size, cut.chunk_size)
    partial = np.empty(recv.size if size > 2 else 0, numbers.wide) if numbers.is_short else recv
    out_views, in_views, places = [], [], []
    for step in range(2 * (size - 1)):
        source = send if step == 0 else partial if step < size - 1 else recv
        for chunk in range(cut.chunks):
            place = cut.slice((rank - step - 1) % size, chunk)
            out_views.append(as_bytes(source[cut.slice((rank - step) % size, chunk)]))
            places.append(place)
            room = scratch.room(place.stop - place.start, step == 0) if step < size - 1 else recv[place]
            in_views.append(as_bytes(room))
    outgoing = Outgoing(ring.right, out_views, cut.chunks)
    combining, last = (size - 1) * cut.chunks, (size - 2) * cut.chunks

    def filled(index: int) -> None:
        if index < combining:
            place = places[index]
            into = partial[place] if index < last else None
            scratch.add(send[place], index < cut.chunks, into, recv[place])
        outgoing.ready += 1

    return outgoing, Incoming(ring.left, in_views, filled)


def reduce_scatter(ring: Ring, send: NumpyArray, recv: NumpyArray, numbers: Arithmetic, op: ReduceOp) -> None:
    """Runs one round of a ring; rank r ends with the combined segment r."""
    size, rank = ring.size, ring.rank
    cut = Segments(send.size, size, send.itemsize)
    scratch = _Combining(numbers, op, size, cut.chunk_size)
    partial = np.empty((size - 2, recv.size), numbers.wide)
    out_views, in_views, plan = [], [], []
    for step in range(size - 1):
        for chunk in range(cut.chunks):
            out_place, place = (cut.slice((rank - step - back) % size, chunk) for back in (1, 2))
            start = (rank - step - 1) % size * recv.size
            source = send[out_place] if step == 0 else partial[step - 1][_moved(out_place, start)]
            out_views.append(as_bytes(source))
            in_views.append(as_bytes(scratch.room(place.stop - place.start, step == 0)))
            within = _moved(place, (rank - step - 2) % size * recv.size)
            plan.append((place, partial[step][within] if step < size - 2 else None, recv[within]))
    outgoing = Outgoing(ring.right, out_views, cut.chunks)

    def filled(index: int) -> None:
        place, into, out = plan[index]
        scratch.add(send[place], index < cut.chunks, into, out)
        outgoing.ready += 1

    ring.run(outgoing, Incoming(ring.left, in_views, filled))


def _moved(place: slice, start: int) -> slice:
    return slice(place.start - start, place.stop - start)


def all_gather(ring: Ring, recv: NumpyArray) -> None:
    """Runs one round of a ring; ``recv`` of rank r already contains segment r."""
    size, rank = ring.size, ring.rank
    cut = Segments(recv.size, size, recv.itemsize)

    def views(first: int) -> list[memoryview]:
        places = [cut.slice((first - step) % size, k) for step in range(size - 1) for k in range(cut.chunks)]
        return [as_bytes(recv[place]) for place in places]

    outgoing = Outgoing(ring.right, views(rank), cut.chunks)

    def filled(_index: int) -> None:
        outgoing.ready += 1

    ring.run(outgoing, Incoming(ring.left, views(rank - 1), filled))


def broadcast(ring: Ring, buffer: NumpyArray, root: int) -> None:
    """Runs a chain from the root to the right; each rank passes on chunks as they arrive."""
    place = (ring.rank - root) % ring.size
    memory = as_bytes(buffer)
    views = [memory[i : i + CHUNK_BYTES] for i in range(0, len(memory), CHUNK_BYTES)]
    outgoing = Outgoing(ring.right, views, len(views) if place == 0 else 0) if place < ring.size - 1 else None

    def filled(_index: int) -> None:
        if outgoing is not None:
            outgoing.ready += 1

    ring.run(outgoing, None if place == 0 else Incoming(ring.left, views, filled))


def reduce(
    ring: Ring, send: NumpyArray, recv: NumpyArray | None, numbers: Arithmetic, op: ReduceOp, root: int
) -> None:
    """Runs a chain that ends at the root; each rank combines its chunk with the one from the left."""
    place = (ring.rank - root - 1) % ring.size
    step = max(1, CHUNK_BYTES // send.itemsize)
    places = [slice(i, min(i + step, send.size)) for i in range(0, send.size, step)]
    if place == 0:
        ring.run(Outgoing(ring.right, [as_bytes(send[each]) for each in places]), None)
        return
    scratch = _Combining(numbers, op, ring.size, min(step, send.size))
    partial = None if recv is not None else np.empty(send.size, numbers.wide)
    outgoing = None if partial is None else Outgoing(ring.right, [as_bytes(partial[p]) for p in places], 0)

    def filled(index: int) -> None:
        chunk = places[index]
        into = None if partial is None else partial[chunk]
        scratch.add(send[chunk], place == 1, into, into if recv is None else recv[chunk])
        if outgoing is not None:
            outgoing.ready += 1

    in_views = [as_bytes(scratch.room(each.stop - each.start, place == 1)) for each in places]
    ring.run(outgoing, Incoming(ring.left, in_views, filled))
