"""Plans are read and questioned."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import find_plan
from tests.parallel.models import MODELS, Gpt, make
from tests.parallel.oracle import part_of
from tests.parallel.ranks import RankCommunicator, run_ranks


class Wide(nn.Module):
    """A last layer so large that splitting it pays."""

    def __init__(self, classes: int = 400_000, width: int = 512) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.fc(torch.relu(self.body(x))), y)


def wide(world: int = 4, **settings: Any) -> Plan:
    with torch.device("meta"):
        net = Wide(settings.pop("classes", 400_000))
        graph = graph_of(net, (torch.empty(16, 512), torch.empty(16, dtype=torch.long)), world)
    return find_plan(graph, world, machine=settings.pop("machine", Hardware()), **settings)


def test_a_plan_is_printed_with_a_verdict_and_a_row_for_each_module() -> None:
    plan = wide()
    text = str(plan)
    assert re.match(r"\d\.\d\d times data parallel: fc's gradient of 819\.2 MB no longer travels\.", text)
    assert "4 ranks as 4; mode auto; gradients are averaged" in text
    fc = next(line for line in text.splitlines() if line.startswith("fc "))
    assert "linear ((1, 1), (4, 1), (4))" in fc
    assert "64x512 100000x512" in fc
    assert re.search(r"\d\.\d{3}", fc)
    assert "data parallel: " in text
    rows = {row.module: row for row in plan.rows()}
    assert set(rows) == {"(top)", "body", "fc"}
    assert rows["fc"].gigabytes > rows["body"].gigabytes
    # The rows' times add up to the plan's: every collective and operator stands in one of them.
    assert sum(row.predicted_ms for row in rows.values()) == pytest.approx(1e3 * plan.seconds, rel=0.01)


def test_why_shows_the_alternatives_and_what_they_would_cost() -> None:
    plan = wide()
    text = plan.why("fc")
    assert re.search(r"-> n: \(\(1, 1\), \(4, 1\), \(4\)\)", text)
    assert re.search(r"   b0: \(\(4, 1\), \(1, 1\), \(1\)\) \d+\.\d+ ms \(\+\d+\.\d%\)", text)
    costs = [each.seconds for each in plan.alternatives("linear_1")]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(plan.seconds)
    with pytest.raises(SettingsError, match="no module or operator 'fd'; it has: body, fc"):
        plan.why("fd")


def test_fused_projections_say_why_they_cannot_be_split() -> None:
    graph = graph_of(Gpt(fused=True), MODELS["gpt"][1](0), 2)
    plan = find_plan(graph, 2, machine=Hardware())
    assert "the dimension that it divides cannot be split" in plan.why("chunk")


def test_data_parallel_is_an_answer() -> None:
    plan = wide(classes=10)
    assert plan.is_data_parallel
    assert plan.verdict.startswith("data parallel is best")
    assert plan.seconds <= (plan.baseline_s or 0) + 3 * plan.machine.latency_s  # of a loss of the whole batch


def test_data_parallelism_computes_its_part_of_the_batch_and_nothing_twice() -> None:
    plan = wide(mode="data_parallel")
    for node, state in zip(plan.graph.nodes, plan.states, strict=True):
        if node.kind == "call":
            assert state.modes[0] in ("b0", "d0", "m"), node.name
    gradients = [each for each in plan.collectives if each.phase == "gradients"]
    whole = sum(v.nbytes for v in plan.graph.values if v.needs_grad and v.name.startswith("p_"))
    parameters = sum(node.kind == "parameter" for node in plan.graph.nodes)
    assert sum(each.nbytes for each in gradients) == whole + 4 * parameters  # and whether there is one
    assert {each.kind for each in plan.collectives if each.phase != "gradients"} == {"all_reduce"}
    assert plan.seconds == pytest.approx(
        wide().baseline_s or 0, rel=0.01
    )  # but for the loss of the whole batch


def test_operators_without_a_rule_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.fc(x).cummax(1).values.sum()

    plan = find_plan(graph_of(Odd(), (torch.empty(8, 4),), 2), 2, machine=Hardware())
    assert "kept whole, for want of a rule: cummax" in str(plan)


def test_a_plan_says_what_the_loss_of_a_rank_would_mean() -> None:
    from tests.parallel.planning.test_search import graph  # ResNet-50 with a million classes

    split = str(find_plan(graph("resnet50_faces"), 4, machine=Hardware()))
    assert "if rank 0 is lost, parts of " in split
    assert "survive=1 keeps every part on two" in split
    hosts = ("a", "a", "b", "b")
    kept = str(find_plan(graph("resnet50_faces"), 4, machine=Hardware(), hosts=hosts))
    assert "if any one host is lost, the others hold every part of the state" in kept


def test_measured_times_stand_beside_the_predicted_ones() -> None:
    batch = MODELS["mlp"][1](0)

    def train(communicator: RankCommunicator) -> Any:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        model = muster.parallelize(make("mlp"), mine, communicator=communicator)
        for _ in range(9):
            model(*mine).backward()
        return model.plan

    plan = run_ranks(2, train)[0]
    assert re.search(r"measured \d+\.\d{3} ms a step \(median of 5\)", str(plan))
    assert all(row.measured_ms is not None and row.measured_ms > 0 for row in plan.rows())
