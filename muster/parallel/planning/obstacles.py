"""Explains why no plan fits into memory: names the largest part, and what would help."""

from __future__ import annotations

import math

from muster.parallel.planning.memory import peak_of
from muster.parallel.planning.problem import Problem
from muster.parallel.planning.search import leanest
from muster.parallel.planning.words import size_text


def too_large(problem: Problem, limit: float, optimizer_states: int) -> tuple[float, str]:
    """Explains why no plan fits into ``limit`` bytes per rank.

    Args:
        problem: the search problem.
        limit: the memory limit of a rank, in bytes.
        optimizer_states: the number of tensors that the optimizer keeps per parameter.

    Returns:
        The peak memory of the plan that needs the least, in bytes, and a sentence about what does not fit.
    """
    graph, mesh = problem.graph, problem.mesh
    choice, needed = leanest(problem, peak_of(problem, optimizer_states))
    chosen = problem.chosen(choice)
    sizes = [state.nbytes + state.grad_nbytes for state in chosen]
    of_parameters = sum(
        nbytes
        for node, nbytes in zip(graph.nodes, sizes, strict=True)
        if node.kind in ("parameter", "buffer")
    )
    largest = max(range(len(sizes)), key=sizes.__getitem__)
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
        what = f"what {node.op}{place} keeps, with the result{shape}"
    cut = "which nothing divides" if whole and math.prod(mesh) > 1 else "divided as far as it can be"
    sentence = (
        f"no plan fits into {size_text(limit)} a rank: on {' x '.join(map(str, mesh))} ranks at least"
        f" {size_text(needed)} are needed, {size_text(of_parameters)} of it by parameters with gradients and"
        f" optimizer; the largest part is {what}: {size_text(sizes[largest])}, {cut};"
        f" {_help(math.prod(mesh), of_parameters, needed, limit)}"
    )
    return needed, sentence


def _help(ranks: int, of_parameters: float, needed: float, limit: float) -> str:
    """Returns a remedy: more ranks for parameters that do not fit, a smaller batch for the rest."""
    if of_parameters > limit:
        return (
            f"a smaller batch would not help: take {math.ceil(ranks * of_parameters / limit)} ranks or more,"
            " or an optimizer that keeps less"
        )
    rest = (limit - of_parameters) / max(1.0, needed - of_parameters)
    return f"take a smaller batch, {min(rest, 0.99):.0%} of this one or less, or more ranks"
