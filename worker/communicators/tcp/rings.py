"""Algorithms for large arrays: pipelined rings and chains, in chunks that stay in the cache.

All are plans of views to send and to fill. Chunk ``k`` of a step may go on as soon as chunk ``k`` of the
step before has come, so the links stay full without a barrier between steps. Each element is combined
along one fixed path and its result copied, so that all ranks hold the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from muster.worker.communicators import numpy_arrays as arrays
from muster.worker.communicators.base import ReduceOp
from muster.worker.communicators.numpy_arrays import NumpyArray, as_bytes
from muster.worker.communicators.tcp.connection import Connection
from muster.worker.communicators.tcp.transfer import Incoming, Mover, Outgoing

CHUNK_BYTES = 131072
"""Bytes that are received before they are combined or passed on."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place in the ring, the connections to both sides, and the deadline of the call."""

    mover: Mover
    left: Connection
    right: Connection
    rank: int
    size: int
    deadline: float

    def run(self, outgoing: Outgoing | None, incoming: Incoming | None) -> None:
        """Runs one plan; while it runs, payloads are on the wire."""
        streams: list[Outgoing] = [] if outgoing is None else [outgoing]
        self.mover.run(streams, [] if incoming is None else [incoming], self.deadline)


class Segments:
    """An array of ``count`` elements cut into one segment per rank, and each into ``chunks`` chunks."""

    def __init__(self, count: int, ranks: int, itemsize: int) -> None:
        self._bounds = [i * count // ranks for i in range(ranks + 1)]
        self._step = max(1, CHUNK_BYTES // itemsize)
        longest = -(-count // ranks)
        self.chunks = max(1, -(-longest // self._step))
        self.chunk_size = min(self._step, longest)

    def slice(self, segment: int, chunk: int) -> slice:
        """Where the chunk lies; empty where the segment is shorter than others."""
        start, stop = self._bounds[segment], self._bounds[segment + 1]
        begin = min(start + chunk * self._step, stop)
        return slice(begin, min(begin + self._step, stop))


def all_reduce_plan(
    ring: Ring, send: NumpyArray, recv: NumpyArray, op: ReduceOp
) -> tuple[Outgoing, Incoming]:
    """Plans a ring: segments are combined on one way round and copied on a second."""
    size, rank = ring.size, ring.rank
    cut = Segments(recv.size, size, recv.itemsize)
    scratch = np.empty(cut.chunk_size, recv.dtype)
    sent, received, scratch_bytes = as_bytes(send), as_bytes(recv), as_bytes(scratch)
    item = recv.itemsize
    out_views, in_views, places = [], [], []
    for step in range(2 * (size - 1)):
        source = sent if step == 0 else received
        for chunk in range(cut.chunks):
            out_place = cut.slice((rank - step) % size, chunk)
            place = cut.slice((rank - step - 1) % size, chunk)
            out_views.append(source[out_place.start * item : out_place.stop * item])
            places.append(place)
            if step < size - 1:
                in_views.append(scratch_bytes[: (place.stop - place.start) * item])
            else:
                in_views.append(received[place.start * item : place.stop * item])
    outgoing = Outgoing(ring.right, out_views, cut.chunks)
    combining, last = (size - 1) * cut.chunks, (size - 2) * cut.chunks

    def filled(index: int) -> None:
        if index < combining:
            place = places[index]
            out = recv[place]
            arrays.combine(op, scratch[: out.size], send[place], out)
            if index >= last:
                arrays.finish(op, out, size)
        outgoing.ready += 1

    return outgoing, Incoming(ring.left, in_views, filled)


def reduce_scatter(ring: Ring, send: NumpyArray, recv: NumpyArray, op: ReduceOp) -> None:
    """One way round a ring; rank r ends with the combined segment r."""
    size, rank = ring.size, ring.rank
    cut = Segments(send.size, size, send.itemsize)
    item = send.itemsize
    scratch = np.empty(cut.chunk_size, recv.dtype)
    work = np.empty((max(0, size - 2), recv.size), recv.dtype)
    targets = [*work, recv]
    base = [i * recv.size for i in range(size)]
    out_views, in_views, plan = [], [], []
    for step in range(size - 1):
        out_segment, segment = (rank - step - 1) % size, (rank - step - 2) % size
        source = as_bytes(send) if step == 0 else as_bytes(targets[step - 1])
        shift = 0 if step == 0 else base[out_segment]
        for chunk in range(cut.chunks):
            place = cut.slice(out_segment, chunk)
            out_views.append(source[(place.start - shift) * item : (place.stop - shift) * item])
            place = cut.slice(segment, chunk)
            in_views.append(as_bytes(scratch)[: (place.stop - place.start) * item])
            plan.append((place, targets[step][place.start - base[segment] : place.stop - base[segment]]))
    outgoing = Outgoing(ring.right, out_views, cut.chunks)

    def filled(index: int) -> None:
        place, out = plan[index]
        arrays.combine(op, scratch[: out.size], send[place], out)
        if index >= (size - 2) * cut.chunks:
            arrays.finish(op, out, size)
        outgoing.ready += 1

    ring.run(outgoing, Incoming(ring.left, in_views, filled))


def all_gather(ring: Ring, recv: NumpyArray) -> None:
    """One way round a ring; rank r's segment of ``recv`` is there already."""
    size, rank = ring.size, ring.rank
    cut = Segments(recv.size, size, recv.itemsize)
    item, memory = recv.itemsize, as_bytes(recv)

    def views(first: int) -> list[memoryview]:
        places = [cut.slice((first - step) % size, k) for step in range(size - 1) for k in range(cut.chunks)]
        return [memory[place.start * item : place.stop * item] for place in places]

    outgoing = Outgoing(ring.right, views(rank), cut.chunks)

    def filled(_index: int) -> None:
        outgoing.ready += 1

    ring.run(outgoing, Incoming(ring.left, views(rank - 1), filled))


def broadcast(ring: Ring, buffer: NumpyArray, root: int) -> None:
    """A chain from the root to the right, each rank passing on chunks as they come."""
    place = (ring.rank - root) % ring.size
    memory = as_bytes(buffer)
    views = [memory[i : i + CHUNK_BYTES] for i in range(0, len(memory), CHUNK_BYTES)]
    outgoing = Outgoing(ring.right, views, len(views) if place == 0 else 0) if place < ring.size - 1 else None

    def filled(_index: int) -> None:
        if outgoing is not None:
            outgoing.ready += 1

    ring.run(outgoing, None if place == 0 else Incoming(ring.left, views, filled))


def reduce(ring: Ring, send: NumpyArray, recv: NumpyArray | None, op: ReduceOp, root: int) -> None:
    """A chain that ends at the root; each rank adds its chunk to what comes from the left."""
    place = (ring.rank - root - 1) % ring.size
    at_root = place == ring.size - 1
    step = max(1, CHUNK_BYTES // send.itemsize)
    places = [slice(i, min(i + step, send.size)) for i in range(0, send.size, step)]
    if place == 0:
        memory = as_bytes(send)
        views = [memory[p.start * send.itemsize : p.stop * send.itemsize] for p in places]
        ring.run(Outgoing(ring.right, views), None)
        return
    result = recv if at_root and recv is not None else np.empty_like(send)
    scratch = np.empty(min(step, send.size), send.dtype)
    in_views = [as_bytes(scratch)[: (p.stop - p.start) * send.itemsize] for p in places]
    out_views = [as_bytes(result[p]) for p in places]
    outgoing = None if at_root else Outgoing(ring.right, out_views, 0)

    def filled(index: int) -> None:
        out = result[places[index]]
        arrays.combine(op, scratch[: out.size], send[places[index]], out)
        if outgoing is None:
            arrays.finish(op, out, ring.size)
        else:
            outgoing.ready += 1

    ring.run(outgoing, Incoming(ring.left, in_views, filled))
