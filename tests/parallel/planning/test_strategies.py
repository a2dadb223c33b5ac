"""What users fix is propagated as in MindSpore, and checked in words."""

from __future__ import annotations

import copy
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
from tests.parallel.models import MODELS, Mlp
from tests.parallel.oracle import part_of, state_of
from tests.parallel.planning.test_plan import wide
from tests.parallel.ranks import RankCommunicator, run_ranks


def quick(strategies: Any, world: int = 8, **settings: Any) -> Plan:
    from tests.parallel.models import Quick

    graph = graph_of(Quick(), (torch.empty(2, 32), torch.empty(2, 16)), world)
    return find_plan(graph, world, machine=Hardware(), mode="semi_auto", strategies=strategies, **settings)


def test_the_tutorials_strategy_is_propagated_as_there() -> None:
    plan = quick({"matmul": ((2, 4), (4, 1))}, search="propagation")
    assert plan.mesh == (2, 4)
    rows = plan.rows()
    assert rows[0].strategies.startswith("matmul ((2, 4), (4, 1)); relu ((2, 4)); matmul ((2, 4), (4, 1))")
    assert rows[0].local.startswith("8x8 8x16; 8x4; 8x4 4x16")
    first = [each for each in plan.collectives if each.node == "relu" and each.phase == "forward"]
    assert [(each.kind, each.dims, each.nbytes) for each in first] == [("reduce_scatter", (1,), 8 * 16 * 4)]


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ({"matmul": ((2, 4), (2, 4))}, "the axis k is cut into 4 and into 2"),
        ({"matmul": ((2, 4, 1), (4, 1))}, "input 0 has 2 dimensions"),
        (
            {"matmul": ((3, 1), (1, 1))},
            r"its axis m has 16 elements, which 3 slices cannot share evenly; 18 could",
        ),
        ({"matmul": {"q": 2}}, r"has no axis 'q'; it has m \(16\), k \(32\), n \(16\)"),
        ({"nothing": ((1, 1), (1, 1))}, "there is no operator or module 'nothing'; there are: "),
        ({"matmul": ((16, 1), (1, 1))}, "cannot be split as its strategy .* on 8 ranks"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_in_words(strategies: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        quick(strategies)


def test_a_vocabulary_that_does_not_divide_is_offered_padding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(50257, 8), nn.Linear(8, 50257)

        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.head(self.tok(x)), y)

    graph = graph_of(Words(), (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)), 8)
    with pytest.raises(
        SettingsError, match=r"50257 elements, which 8 slices .* 50264 could. Build the layer with 50264"
    ):
        find_plan(graph, 8, machine=Hardware(), strategies={"tok": {"v": 8}})


def test_a_linear_layers_strategy_in_either_order() -> None:
    graph = graph_of(Mlp(), [x.float() for x in MODELS["mlp"][1](0)], 2)
    for strategy in (((1, 2), (1, 2)), ((1, 2), (2, 1)), {"k": 2}):
        plan = find_plan(graph, 2, machine=Hardware(), strategies={"down": strategy})
        assert state_of(plan, "linear_1").modes == ("k",)


def test_operators_without_a_strategy_run_data_parallel_if_asked_to() -> None:
    settings: dict[str, Any] = {"mode": "semi_auto", "strategies": {"body": {"n": 4}}}
    plan = wide(4, rest="data_parallel", **settings)
    assert state_of(plan, _linear_of(plan, "body")).modes == ("n",)
    assert set(state_of(plan, _linear_of(plan, "fc")).modes) == {"b0"}
    searched = wide(4, **settings)
    assert set(state_of(searched, _linear_of(searched, "fc")).modes) != {"b0"}
    mixed = wide(4, rest="data_parallel", mode="semi_auto", strategies={"body": {"b0": 2, "n": 2}})
    assert len(mixed.mesh) == 2
    assert state_of(mixed, _linear_of(mixed, "fc")).modes == ("b0", "b0")
    with pytest.raises(SettingsError, match='the last only in mode "semi_auto"'):
        wide(4, rest="data_parallel")


def _linear_of(plan: Plan, module: str) -> str:
    [name] = [node.name for node in plan.graph.nodes if node.module == module and node.op == "linear"]
    return name


def test_one_parameter_may_have_another_strategy_in_each_operator() -> None:
    """MindSpore refuses that; here the parameter is laid out again for one of them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Any) -> Any:
            return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight).square().mean()

    x, net = torch.randn(8, 8), Tied()

    def train(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(
            copy.deepcopy(net),
            (part_of(x, communicator, "data_parallel"),),
            communicator=communicator,
            mode="semi_auto",
            strategies={"linear": {"n": 2}, "linear_1": {"k": 2}},
        )
        return model(part_of(x, communicator, "data_parallel")).item()

    wanted = net(x).item()
    assert run_ranks(2, train) == pytest.approx([wanted, wanted])
