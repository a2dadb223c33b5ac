"""Searches by their names, and what no plan can do."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning import planner
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.planner import find_plan
from tests.parallel.models import MODELS, Mlp
from tests.parallel.planning.test_kept import gpt_graph
from tests.parallel.planning.test_plan import wide
from tests.parallel.planning.test_strategies import quick


def test_no_plan_is_faster_than_the_exact_searchs() -> None:
    assert quick({}, search="propagation").seconds >= quick({}, search="exact").seconds
    with pytest.raises(SettingsError, match="search is one of exact, propagation, not 'best'"):
        quick({}, search="best")


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    graph = graph_of(Mlp(), [x.float() for x in MODELS["mlp"][1](0)], 1)
    with pytest.raises(
        SettingsError, match=r"the batch \(x \[8, 16\], y \[8, 8\]\) cannot be shared by 3 ranks"
    ):
        find_plan(graph, 3, machine=Hardware())


def test_what_does_not_fit_is_refused_and_what_does_is_within_the_limit() -> None:
    plan = wide(machine=Hardware(memory_bytes=2.4e9))
    assert plan.verdict.startswith("data parallel does not fit: it needs ")
    assert plan.nbytes <= 0.9 * 2.4e9
    with pytest.raises(SettingsError, match=r"no plan fits into \d+\.\d MB a rank"):
        wide(machine=Hardware(memory_bytes=1e8))


def test_of_large_graphs_the_promising_meshes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are named; what the plan is, and that it fits, is as before."""
    graph = gpt_graph(16)
    every = find_plan(graph, 16, machine=Hardware(memory_bytes=30e9))
    assert not every.skipped
    monkeypatch.setattr(planner, "LARGE_GRAPH", 10)
    found = find_plan(graph, 16, machine=Hardware(memory_bytes=30e9))
    assert len(found.skipped) == 2
    assert found.nbytes <= 0.9 * 30e9
    assert found.seconds <= 1.05 * every.seconds
    assert "others promise more" in str(found)
