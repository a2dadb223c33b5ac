"""Describes a plan's sizes, edges and buckets in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muster.parallel.planning.buckets import PlannedBucket, edge_layouts, gradient_buckets, parameter_shards
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh, layout_text
from muster.parallel.planning.problem import State


def edges_text(graph: Graph, states: Sequence[State], index: int) -> Iterable[str]:
    """Yields one line per input of a node, with its layout before and after redistribution."""
    node = graph.nodes[index]
    for position, value in enumerate(node.inputs):
        before, after, _, _ = edge_layouts(graph, states, index, position)
        arrow = layout_text(before) if before == after else f"{layout_text(before)} -> {layout_text(after)}"
        yield f"{graph.values[value].name}: {arrow}"


def bucket_text(graph: Graph, states: Sequence[State], mesh: Mesh) -> list[str]:
    """Returns one line per gradient bucket."""
    held = list(parameter_shards(graph, states, mesh).values())
    return [
        f"{_collectives_of(each)} over {each.dims}: {size_text(each.nbytes)} of {len(each.nodes)} parameters"
        for each in gradient_buckets(held)
    ]


def _collectives_of(bucket: PlannedBucket) -> str:
    if not bucket.sharded:
        return "all_reduce"
    return "reduce_scatter + all_gather" + (" in both passes" if bucket.regathered else "")


def size_text(nbytes: float) -> str:
    """Returns a number of bytes in its largest unit, such as ``1.5 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def times_text(ratio: float) -> str:
    """Returns a ratio in words, such as ``1.25 times``."""
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"


def shortened(text: str, width: int) -> str:
    """Returns the text, cut to ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."
