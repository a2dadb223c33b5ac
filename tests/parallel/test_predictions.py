"""What plans predict beside what GPUs have measured, and what predictions count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from muster.bench.parallel.job import TASKS
from muster.bench.parallel.variants import written_loss
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.memory import step_memory
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import find_plan
from muster.parallel.planning.precision import mark_autocast

H100 = json.loads((Path(__file__).parents[2] / "muster/bench/results/parallel-1xh100.json").read_text())
MEASURED = {row["model"]: row for row in H100["rows"]}
Made = tuple[Any, tuple[Any, Any]]


def _task(name: str) -> Callable[[], Made]:
    batch = TASKS[name].batch(torch.device("cpu"), 0)
    meta = torch.device("meta")
    return lambda: (TASKS[name].make(meta), tuple(each.to(meta) for each in batch))


def planned(made: Callable[[], Made], ranks: int = 1, *, low: bool = True, **settings: Any) -> Plan:
    with torch.device("meta"):
        net, batch = made()
        graph = graph_of(net, batch, ranks, loss=written_loss)
    if low:
        mark_autocast(graph, 2)
    return find_plan(graph, ranks, machine=Hardware(**H100["costs"]), local_norm=True, **settings)


@pytest.mark.parametrize("name", MEASURED)
def test_a_predicted_step_is_within_a_tenth_of_the_measured_one(name: str) -> None:
    made, measured = _task(name), MEASURED[name]
    plan = planned(made)
    played = plan.timeline.seconds * 1e3
    memory = step_memory(plan.graph, plan.states, plan.mesh).peak / 1e9
    print(f"{name}: {played:.2f} ms of {measured['step_ms']:.2f},", end=" ")
    print(f"{memory:.2f} GB of {measured['memory_gb']:.2f}")
    assert played == pytest.approx(measured["step_ms"], rel=0.1)
    assert plan.seconds * 1e3 == pytest.approx(measured["step_ms"], rel=0.1)
    assert memory == pytest.approx(measured["memory_gb"], rel=0.1)


# ---------------------------------------------------------------- what is counted


class Small(nn.Module):
    """A norm, a residual layer and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.head = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 4096)

    def forward(self, x: Any) -> Any:
        return self.head(x + F.relu(self.mix(self.norm(x))))


def _small() -> Made:
    return Small(), (torch.empty(32, 64), torch.empty(32, dtype=torch.long))


def test_autocast_changes_what_values_take_and_not_by_what_a_plan_knows_its_model() -> None:
    low, exact = planned(_small).graph, planned(_small, low=False).graph
    sizes = {value.name: value.itemsize for value in low.values}
    assert [sizes[name] for name in ("layer_norm", "linear", "relu", "add", "linear_1")] == [4, 2, 2, 4, 2]
    assert sizes["to"] == 2  # the cross entropy reads the scores as they are
    assert sizes["cross_entropy_loss"] == 4
    assert all(value.itemsize == 4 for value in exact.values if value.floating)
    assert low.fingerprint() == exact.fingerprint()


def test_what_travels_under_autocast_is_counted_as_it_travels() -> None:
    """A product's results are in bfloat16 when the next layer, which is split, wants them whole."""

    def two() -> Made:
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4096))
        return net, (torch.empty(32, 64), torch.empty(32, dtype=torch.long))

    fixed = {"strategies": {"0": {"b0": 4}, "2": {"n": 4}}, "mode": "semi_auto", "mesh": (4,)}
    moved = {
        low: [
            each.nbytes
            for each in planned(two, 4, low=low, **fixed).collectives
            if each.kind == "all_gather" and each.phase == "forward" and each.node in ("relu", "linear_1")
        ]
        for low in (True, False)
    }
    assert moved[True] == [4 * 32 * 64 * 2]
    assert moved[False] == [4 * 32 * 64 * 4]


def test_every_rank_casts_the_weights_that_it_holds() -> None:
    """Dividing the batch divides no weight: its cast and its gradient's write stay whole on each rank."""

    def wide() -> Made:
        return nn.Linear(1024, 262_144), (torch.empty(8, 1024), torch.empty(8, dtype=torch.long))

    alone, shared = planned(wide), planned(wide, 4, mode="data_parallel")
    assert shared.timeline.forward_s > 0.9 * alone.timeline.forward_s
    split = planned(wide, 4, mode="semi_auto", strategies={"linear": {"n": 4}})
    assert split.timeline.forward_s < 0.5 * alone.timeline.forward_s


def test_the_gradient_of_many_scores_takes_their_memory() -> None:
    def many() -> Made:
        return nn.Linear(8, 65_536), (torch.empty(1024, 8), torch.empty(1024, dtype=torch.long))

    plan = planned(many)
    memory = step_memory(plan.graph, plan.states, plan.mesh)
    scores = 1024 * 65_536 * 2
    assert memory.peak - memory.held == pytest.approx(scores, rel=0.1)
