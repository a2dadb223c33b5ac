"""Computes which elements of each parameter a plan's ranks hold, as boxes of the whole tensor. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from muster.parallel.planning.buckets import parameter_shards
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh, Placements, Shape, coordinates, local_shape
from muster.parallel.planning.problem import State
from muster.training.parts import Box as Box
from muster.training.parts import Part as Part
from muster.training.parts import overlap as overlap
from muster.training.parts import whole_part as whole_part


def parts_of(graph: Graph, states: Sequence[State], mesh: Mesh) -> dict[str, list[Part]]:
    """Returns the parts of each parameter and buffer by node, one per rank, in the order of ranks."""
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
    """Returns the nodes of parameters and buffers that have a part held only by the ranks in ``lost``."""
    found = []
    for name, parts in parts_of(graph, states, mesh).items():
        kept = {part for rank, part in enumerate(parts) if rank not in lost}
        if any(part not in kept for part in parts if part.stop > part.start):
            found.append(name)
    return found


def _offsets(layout: Placements, mesh: Mesh, place: Sequence[int], sizes: Shape) -> Shape:
    """Returns the offsets of a rank's shard: the first mesh dimension splits a tensor dimension first."""
    numbers = [0] * len(sizes)
    for size, entry, index in zip(mesh, layout, place, strict=True):
        if isinstance(entry, int):
            numbers[entry] = numbers[entry] * size + index
    return tuple(number * size for number, size in zip(numbers, sizes, strict=True))
