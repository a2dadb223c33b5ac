"""Predicts a step of ``muster.DataParallel``, the baseline of plans."""

from __future__ import annotations

import math
from collections.abc import Sequence

from muster.parallel.planning.costs import Hardware, OperatorTimes
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.layouts import Mesh, slices
from muster.parallel.planning.problem import State


def data_parallel_seconds(graph: Graph, states: Sequence[State], mesh: Mesh, machine: Hardware) -> float:
    """Predicts the seconds of a step of data parallelism.

    Each rank runs the bare module on its own part of the batch, including operators that a plan could not
    split. Only gradients are communicated; BatchNorm's statistics and the loss are those of the rank's part.

    Args:
        graph: the graph of the forward pass on the whole batch.
        states: the states of a plan in which every rank holds all parameters.
        mesh: a mesh of one dimension.
        machine: the machine's costs.
    """
    times = OperatorTimes(graph, mesh, machine)
    fed: set[int] = set()  # values that depend on the batch
    total = 0.0
    for node, state in zip(graph.nodes, states, strict=True):
        if node.kind == "input" or any(value in fed for value in node.inputs):
            fed |= set(node.outputs)
        if node.kind in ("parameter", "buffer"):
            total += state.seconds
        elif node.kind in ("call", FAN_OUT):
            divided = math.prod(
                n for n, mode in zip(mesh, state.modes, strict=True) if mode not in ("-", "grad", "sum")
            )
            work = times.seconds(node, state.ins, state.outs, divided)
            whole = divided == 1 and any(value in fed for value in node.inputs)
            parts = _parts_of_batch(graph, states, mesh) if whole else 1
            total += (work.forward + work.backward) / parts
    return total


def _parts_of_batch(graph: Graph, states: Sequence[State], mesh: Mesh) -> int:
    fed = [state.outs[0] for node, state in zip(graph.nodes, states, strict=True) if node.kind == "input"]
    return max((slices(layout, mesh, 1)[0] for layout in fed), default=1)
