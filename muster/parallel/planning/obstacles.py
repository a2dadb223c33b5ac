"""Why no plan fits into memory: which tensor is in the way, and what would help."""

from __future__ import annotations

import math

from muster.parallel.planning.problem import Problem
from muster.parallel.planning.words import size_text


def too_large(problem: Problem, limit: float) -> tuple[float, str]:
    """The bytes that a rank needs at least, and a sentence about what does not fit into ``limit``."""
    graph, mesh = problem.graph, problem.mesh
    least = [min(state.nbytes for state in states) for states in problem.states]
    of_parameters = sum(
        nbytes
        for node, nbytes in zip(graph.nodes, least, strict=True)
        if node.kind in ("parameter", "buffer")
    )
    largest = max(range(len(least)), key=least.__getitem__)
    node = graph.nodes[largest]
    value = graph.values[node.outputs[0]] if node.outputs else None
    shape = f" {list(value.shape)}" if value is not None else ""
    whole = value is not None and not any(
        isinstance(entry, int) for state in problem.states[largest] for entry in state.outs[0]
    )
    place = f" of {node.module}" if node.module and node.kind == "call" else ""
    if node.kind in ("parameter", "buffer"):
        what = f"the {node.kind} {node.name}{shape}, with gradient and optimizer"
    else:
        what = f"the result{shape} of {node.op}{place}"
    cut = "which nothing divides" if whole and math.prod(mesh) > 1 else "divided as far as it can be"
    if of_parameters >= sum(least) / 2:
        help_ = "take more ranks, or an optimizer that keeps less"
    else:
        help_ = "take a smaller batch, or more ranks"
    sentence = (
        f"no plan fits into {limit / 1e9:.1f} GB a rank: on {' x '.join(map(str, mesh))} ranks at least"
        f" {size_text(sum(least))} are needed, the most of it by {what}: {size_text(least[largest])},"
        f" {cut}; {help_}"
    )
    return sum(least), sentence
