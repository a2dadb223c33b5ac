"""What the search adds up is at most a step's peak, and a plan is announced with that peak."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh
from muster.parallel.planning.memory import peak_of, step_memory
from muster.parallel.planning.planner import find_plan, options_for
from muster.parallel.planning.precision import mark_autocast
from muster.parallel.planning.problem import Options, Problem, State, build
from muster.parallel.planning.search import Solution, solve
from tests.parallel.large_models import _Gpt, _words
from tests.parallel.suite import SUITE

MESHES: list[Mesh] = [(4,), (2, 2)]


def suite_graph(name: str) -> Graph:
    return graph_of(SUITE[name].make(), SUITE[name].batch(0), 4)


def gpt_graph(ranks: int, *, layers: int = 2) -> Graph:
    """Wide and short: parameters and activations are both large."""
    with torch.device("meta"):
        graph = graph_of(_Gpt(32_000, 8192, 64, layers, 2048), _words(2, 2048), ranks)
    mark_autocast(graph, 2)
    return graph


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["vit_pooled", "mobile_block", "dlrm_bags", "lstm_words", "soft_targets"])
def test_the_sums_of_both_moments_are_at_most_the_peak(name: str, mesh: Mesh) -> None:
    """Of the best choice, and of random ones that can be run."""
    graph = suite_graph(name)
    options = options_for(graph, mesh, "data_parallel", Options((), ()))
    assert options is not None
    problem = build(graph, mesh, Hardware(), options)
    solution, draw = solve(problem), random.Random(0)
    assert solution is not None
    peak, choices = peak_of(problem, 2), [solution.choice]
    while len(choices) < 6:
        choice = [draw.randrange(len(s)) if draw.random() < 0.2 else c for s, c in _with(problem, solution)]
        if math.isfinite(problem.seconds(choice)):
            choices.append(choice)
    for choice in choices:
        first, last = problem.nbytes_at_ends(choice)
        assert max(first, last) <= peak(choice) * (1 + 1e-9)
    assert problem.nbytes(solution.choice) >= 0.5 * peak(solution.choice)


def _with(problem: Problem, solution: Solution) -> Iterator[tuple[list[State], int]]:
    return zip(problem.states, solution.choice, strict=True)


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_a_plan_is_announced_with_its_peak_which_fits(share: float) -> None:
    """Memory binds: what tensor parallelism gathers for a layer, and keeps for its backward pass, counts."""
    graph = gpt_graph(16)
    free = find_plan(graph, 16, machine=Hardware(memory_bytes=1e15), mesh=(4, 4))
    machine = Hardware(memory_bytes=share * free.nbytes / 0.9)
    plan = find_plan(graph, 16, machine=machine, mesh=(4, 4))
    memory = step_memory(plan.graph, plan.states, plan.mesh)
    assert plan.nbytes == memory.peak
    assert plan.nbytes <= plan.limit_bytes
    assert f"memory peaks at {memory.peak / 1e9:.1f} GB" in str(plan)
    assert plan.bound_s <= plan.seconds


def test_what_does_not_fit_at_its_peak_is_not_announced() -> None:
    """The sum of the results alone would fit."""
    graph = gpt_graph(4)
    free = find_plan(graph, 4, machine=Hardware(memory_bytes=1e15), mesh=(4,))
    memory = step_memory(free.graph, free.states, free.mesh)
    limit = memory.held + 0.97 * (memory.peak - memory.held)
    plan = find_plan(graph, 4, machine=Hardware(memory_bytes=limit / 0.9), mesh=(4,))
    assert plan.nbytes <= limit
    assert plan.digest != free.digest
