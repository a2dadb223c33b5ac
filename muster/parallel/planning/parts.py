"""Which elements of each parameter every rank of a plan holds, as boxes of the whole tensor: pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from muster.parallel.planning.buckets import parameter_shards
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh, Placements, Shape, coordinates, local_shape
from muster.parallel.planning.problem import State


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor.

    Attributes:
        offsets: of its first element, one for each dimension.
        sizes: elements along each dimension.
        start: where its elements, row by row, begin in the flat tensor of the rank that holds it.
    """

    offsets: Shape
    sizes: Shape
    start: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: of a box of it, row by row, the elements from start to stop.

    Attributes:
        offsets: of the box in the whole tensor.
        sizes: of the box.
        start: first element of the box that the rank holds; 0 unless the update is divided.
        stop: the one behind the last.
    """

    offsets: Shape
    sizes: Shape
    start: int
    stop: int

    def boxes(self) -> list[Box]:
        """The same elements as boxes, in the order in which the rank holds them."""
        found, place = [], 0
        for offsets, sizes in _boxes(self.sizes, self.start, self.stop):
            whole = tuple(a + b for a, b in zip(self.offsets, offsets, strict=True))
            found.append(Box(whole, sizes, place))
            place += math.prod(sizes)
        return found


def whole_part(shape: Shape) -> Part:
    """All of a tensor."""
    return Part((0,) * len(shape), shape, 0, math.prod(shape))


def parts_of(graph: Graph, states: Sequence[State], mesh: Mesh) -> dict[str, list[Part]]:
    """What each rank holds of each parameter and buffer of the graph, by node and rank."""
    held = parameter_shards(graph, states, mesh)
    places = [coordinates(rank, mesh) for rank in range(math.prod(mesh))]
    found: dict[str, list[Part]] = {}
    for node, state in zip(graph.nodes, states, strict=True):
        if node.kind not in ("parameter", "buffer"):
            continue
        shape = graph.values[node.outputs[0]].shape
        sizes = local_shape(state.outs[0], mesh, shape)
        count = math.prod(sizes)
        parts = []
        for place in places:
            start, stop = 0, count
            shard = held.get(node.name)
            if shard is not None and shard.sharded:
                number = 0
                for d in shard.dims:
                    number = number * mesh[d] + place[d]
                start = min(number * shard.own_numel, count)
                stop = min(start + shard.own_numel, count)
            parts.append(Part(_offsets(state.outs[0], mesh, place, sizes), sizes, start, stop))
        found[node.name] = parts
    return found


def gone_with(graph: Graph, states: Sequence[State], mesh: Mesh, lost: Collection[int]) -> list[str]:
    """The parameters and buffers, by node, of which only these ranks hold some part."""
    found = []
    for name, parts in parts_of(graph, states, mesh).items():
        kept = {part for rank, part in enumerate(parts) if rank not in lost}
        if any(part not in kept for part in parts if part.stop > part.start):
            found.append(name)
    return found


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; ``start`` has no meaning there."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def _offsets(layout: Placements, mesh: Mesh, place: Sequence[int], sizes: Shape) -> Shape:
    """Where a rank's part begins: mesh dimensions that split the same tensor dimension do so in order."""
    numbers = [0] * len(sizes)
    for size, entry, index in zip(mesh, layout, place, strict=True):
        if isinstance(entry, int):
            numbers[entry] = numbers[entry] * size + index
    return tuple(number * size for number, size in zip(numbers, sizes, strict=True))


def _boxes(sizes: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cuts elements start to stop of a tensor, row by row, into boxes: (offsets, sizes), in order."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, within = divmod(start, row)
    if within:  # the rest of a row that is begun
        end = min(stop, (first + 1) * row)
        for offsets, inner in _boxes(sizes[1:], within, end - first * row):
            yield (first, *offsets), (1, *inner)
        first, start = first + 1, end
    rows = (stop - start) // row
    if rows:
        yield (first, *(0,) * (len(sizes) - 1)), (rows, *sizes[1:])
        first, start = first + rows, start + rows * row
    for offsets, inner in _boxes(sizes[1:], 0, stop - start):
        yield (first, *offsets), (1, *inner)
