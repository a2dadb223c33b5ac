"""Plans of the suite's models are exact, and which operators they keep whole is known."""

from __future__ import annotations

import contextlib
import functools
import random

import pytest

pytest.importorskip("torch")

import torch

from muster.parallel.planning.planner import find_plan
from muster.parallel.planning.search import TooWide, solve
from muster.parallel.planning.undivided import undivided
from tests.parallel.oracle import SLOW, Case
from tests.parallel.suite import SUITE

torch.set_num_threads(1)
PLAYED = random.Random(5).sample(sorted(SUITE), 12)


@functools.cache
def case(name: str) -> Case:
    entry = SUITE[name]
    return Case(name, module=entry.make(), batches=[entry.batch(seed) for seed in range(2)])


def check(name: str) -> None:
    """The best plan, data parallelism and a random plan give what one process gives."""
    one = case(name)
    for plain in (False, True):
        problem = one.problem((2,), whole_parameters=plain, shard_updates=not plain)
        solution = solve(problem)
        assert solution is not None
        one.check(one.plan(problem, solution.choice))
    with contextlib.suppress(TooWide):
        one.check(one.random_plan((2, 2), 3))


def kept_whole(name: str) -> list[str]:
    """The operators above 1 % of the step that data parallelism on four ranks keeps whole."""
    graph = case(name).traced.graph
    plan = find_plan(graph, 4, machine=SLOW, mode="data_parallel")
    return [str(each) for each in undivided(graph, plan.states, plan.mesh, SLOW, plan.seconds)]


def test_the_suite_has_forty_models_of_twelve_kinds() -> None:
    assert len(SUITE) >= 40
    assert len({entry.kind for entry in SUITE.values()}) >= 12


@pytest.mark.parametrize("name", PLAYED)
def test_plans_of_some_are_exact(name: str) -> None:
    check(name)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", sorted(SUITE))
def test_plans_of_all_are_exact(name: str) -> None:
    check(name)
    one = case(name)
    for seed in range(6):
        with contextlib.suppress(TooWide):
            one.check(one.random_plan(((2,), (4,), (2, 2), (2, 2, 2))[seed % 4], seed))


@pytest.mark.exhaustive
def test_at_most_two_models_keep_an_operator_whole() -> None:
    found = {name: kept_whole(name) for name in sorted(SUITE)}
    named = {name: whole for name, whole in found.items() if whole}
    for name, whole in named.items():
        print(f"{name}: {', '.join(whole)}")
    assert len(named) <= 2, named
