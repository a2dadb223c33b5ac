"""How the work of a search grows with layers and ranks, counted and not timed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from muster.parallel.planning import memory, problem, search
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.planner import find_plan
from tests.parallel.planning.test_kept import gpt_graph


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Operators whose ways are worked out, entries of tables of the elimination, and steps played through."""
    counted: Counter[str] = Counter()
    ways, best, step = problem.ways_of, search.Eliminator.best, memory.step_memory

    def counted_ways(*args: Any, **kwargs: Any) -> Any:
        counted["ways"] += 1
        return ways(*args, **kwargs)

    def counted_best(self: Any, *args: Any, **kwargs: Any) -> Any:
        for node, scope in self.order:
            counted["entries"] += math.prod(self.sizes[each] for each in (node, *scope))
        return best(self, *args, **kwargs)

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        counted["steps"] += 1
        return step(*args, **kwargs)

    monkeypatch.setattr(problem, "ways_of", counted_ways)
    monkeypatch.setattr(search.Eliminator, "best", counted_best)
    monkeypatch.setattr(memory, "step_memory", counted_step)
    return counted


def searched(work: Counter[str], ranks: int, layers: int, nbytes: float) -> Counter[str]:
    """What a search costs on meshes that are alike for all numbers of ranks."""
    graph = gpt_graph(ranks, layers=layers)
    work.clear()
    plan = find_plan(graph, ranks, machine=Hardware(memory_bytes=nbytes), mesh=(ranks // 4, 4))
    return Counter({**work, "nbytes": int(plan.nbytes)})


def test_layers_that_come_again_are_worked_out_once(work: Counter[str]) -> None:
    few, many = (searched(work, 16, layers, 1e15) for layers in (2, 4))
    assert many["ways"] == few["ways"]
    assert many["entries"] <= 2.3 * few["entries"]
    assert many["steps"] == few["steps"]


def test_a_limit_of_memory_costs_a_bounded_number_of_searches(work: Counter[str]) -> None:
    free = searched(work, 16, 2, 1e15)
    bound = searched(work, 16, 2, 0.85 * free["nbytes"] / 0.9)
    print(free, bound)
    assert bound["nbytes"] <= 0.85 * free["nbytes"]
    assert free["entries"] < bound["entries"] <= 63 * free["entries"]
    assert bound["steps"] <= 120


def test_more_ranks_cost_no_more_on_as_many_dimensions(work: Counter[str]) -> None:
    few, many = (searched(work, ranks, 2, 1e15) for ranks in (16, 64))
    assert many["ways"] <= few["ways"]
    assert many["entries"] <= 1.1 * few["entries"]
