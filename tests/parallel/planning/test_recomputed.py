"""Which layers a plan computes again, and what it says of that."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.kept import worth_recomputing
from muster.parallel.planning.memory import peak_of, step_memory
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import find_plan, options_for
from muster.parallel.planning.problem import ALWAYS, Options, build
from muster.parallel.planning.recomputed import backward_order, layers_of
from muster.parallel.planning.search import solve
from tests.parallel.models import make
from tests.parallel.oracle import SLOW
from tests.parallel.planning.test_kept import suite_graph


class Deep(nn.Module):
    """Layers that keep much and have few weights."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))

    def forward(self, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(x)))


def deep(**given: Any) -> Graph:
    with torch.device("meta"):
        return graph_of(Deep(**given), (torch.zeros(1024, 64), torch.zeros(1024, 64)), 4)


def planned(graph: Graph, nbytes: float, **settings: Any) -> Plan:
    machine = replace(SLOW, memory_bytes=nbytes, bus_bytes_per_s=1e7)
    return find_plan(graph, 4, machine=machine, memory=1.0, mesh=(4,), **settings)


def again(plan: Plan) -> tuple[str, ...]:
    return plan.options.recomputed


def test_as_many_as_memory_needs_the_first_ones_and_no_more() -> None:
    graph = deep()
    free = planned(graph, 1e12)
    kept = step_memory(graph, free.states, free.mesh)
    assert again(free) == ()
    seen = []
    for share in (0.9, 0.7, 0.5):
        plan = planned(graph, share * kept.peak)
        assert plan.nbytes <= share * kept.peak
        assert plan.bound_s <= plan.seconds
        assert again(plan) == tuple(f"layers.{number}" for number in range(len(again(plan))))
        fewer = replace(plan.options, recomputed=again(plan)[:-1])
        problem = build(graph, plan.mesh, plan.machine, fewer)
        keys = {
            n.name: s.key
            if n.module != again(plan)[-1] and not n.module.startswith(f"{again(plan)[-1]}.")
            else s.key.removesuffix("|recomputed")
            for n, s in zip(graph.nodes, plan.states, strict=True)
        }
        assert peak_of(problem, 2)(problem.choice_of(keys)) > share * kept.peak
        assert "(activation checkpointing)" in str(plan)
        assert "(activation checkpointing)" in plan.html()
        seen.append(len(again(plan)))
    assert 0 < seen[0] < seen[1] < seen[2]


def test_what_it_costs_is_the_forward_pass_again() -> None:
    """Where nothing travels: the time of the layers' forward passes, in all three ways of adding it up."""
    graph = deep()
    machine = replace(SLOW, bus_bytes_per_s=1e15)
    once, twice = (
        find_plan(graph, 4, machine=machine, mode="data_parallel", checkpoint_activations=each)
        for each in (False, ALWAYS)
    )
    assert len(again(twice)) == 8
    more = twice.timeline.backward_s - once.timeline.backward_s
    assert twice.timeline.forward_s == once.timeline.forward_s
    assert 0.9 * once.timeline.forward_s < more < once.timeline.forward_s
    assert twice.seconds - once.seconds == pytest.approx(more, rel=1e-6)
    rows = [sum(row.predicted_ms for row in plan.rows()) for plan in (once, twice)]
    assert (rows[1] - rows[0]) * 1e-3 == pytest.approx(more, rel=1e-6)
    assert "the activations of 8 layers (layers.0 to layers.7) are not kept" in str(twice)


class Uneven(nn.Module):
    """Two layers with long products, two with short ones; all keep as much."""

    def __init__(self) -> None:
        super().__init__()
        self.dear = nn.ModuleList(_Wide(512) for _ in range(2))
        self.cheap = nn.ModuleList(_Wide(64) for _ in range(2))

    def forward(self, x: Any, y: Any) -> Any:
        for layer in (*self.dear, *self.cheap):
            x = layer(x)
        return F.mse_loss(x, y)


class _Wide(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, inner, bias=False), nn.Linear(inner, 256, bias=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x)).sigmoid().tanh().exp().square()


def test_the_cheapest_bytes_first() -> None:
    with torch.device("meta"):
        graph = graph_of(Uneven(), (torch.zeros(8192, 256), torch.zeros(8192, 256)), 4)
    fixed = {"mode": "semi_auto", "rest": "data_parallel", "shard_updates": False}
    peak = step_memory(graph, planned(graph, 1e12, **fixed).states, (4,)).peak
    assert [layer.name for layer in layers_of(graph)] == ["dear.0", "dear.1", "cheap.0", "cheap.1"]
    for share in (0.97, 0.93):
        chosen = again(planned(graph, share * peak, **fixed))
        assert chosen and set(chosen) <= {"cheap.0", "cheap.1"}, chosen


def test_it_is_left_out_where_it_is_not_wanted_and_then_it_does_not_fit() -> None:
    graph = deep()
    peak = step_memory(graph, planned(graph, 1e12).states, (4,)).peak
    fixed = {"mode": "semi_auto", "rest": "data_parallel"}
    plan = planned(graph, 0.5 * peak, **fixed)
    assert again(plan)
    with pytest.raises(SettingsError, match="no plan fits"):
        planned(graph, 0.5 * peak, checkpoint_activations=False, **fixed)
    with pytest.raises(SettingsError, match="no plan fits"):
        planned(graph, 0.05 * peak, **fixed)


@pytest.mark.parametrize("name", ["llama_halves", "unet_transposed", "dlrm_bags", "lstm_words"])
def test_the_sums_of_both_moments_are_at_most_the_peak(name: str) -> None:
    graph, draw = suite_graph(name), random.Random(1)
    for mesh in ((4,), (2, 2)):
        given = options_for(graph, mesh, "data_parallel", Options((), ()))
        assert given is not None
        names = [layer.name for layer in layers_of(graph)]
        for _ in range(4):
            some = tuple(sorted(draw.sample(names, len(names) // 2), key=names.index))
            problem = build(graph, mesh, Hardware(), replace(given, recomputed=some))
            solution = solve(problem)
            assert solution is not None
            first, last = problem.nbytes_at_ends(solution.choice)
            assert max(first, last) <= peak_of(problem, 2)(solution.choice) * (1 + 1e-9)


def test_what_layers_are_given_is_in_the_sums() -> None:
    graph = deep()
    plan = planned(graph, 1e12, mode="data_parallel", checkpoint_activations=ALWAYS)
    problem = build(graph, (4,), plan.machine, plan.options)
    first, _ = problem.nbytes_at_ends(problem.choice_of(plan.to_json()["states"]))
    memory = step_memory(graph, plan.states, plan.mesh)
    assert memory.kept >= 7 * 1024 * 64 * 4
    assert first - memory.held == pytest.approx(memory.kept, rel=0.01)


def test_layers_end_with_what_keeps_something_and_are_worth_it() -> None:
    graph = graph_of(make("gpt"), (torch.zeros(2, 8, dtype=torch.long),) * 2, 4)
    layers = {layer.name: layer for layer in layers_of(graph)}
    block = layers["blocks.0"]
    assert graph.nodes[block.last].module == "blocks.0.down"  # what follows is a sum
    assert {graph.nodes[index].module.split(".")[0] for index in block.indices} == {"blocks"}
    assert [graph.values[value].name for value in block.left][-1] == graph.nodes[block.last].name
    assert [layer.name for layer in worth_recomputing(graph)] == ["blocks.0", "ln"]


class _Counting(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(16, 16), reads
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        x = self.linear(x).exp()
        return x * self.seen if self.reads else x.exp()


def test_a_layer_that_reads_what_it_changes_is_none() -> None:
    net = nn.Sequential(_Counting(reads=False), _Counting(reads=True))
    names = [layer.name for layer in layers_of(graph_of(net, (torch.zeros(4, 16),), 2))]
    assert names == ["0"]


def test_the_backward_pass_begins_a_layer_at_its_end() -> None:
    graph = deep(layers=2)
    layers = layers_of(graph)
    order = list(backward_order(graph, layers[:1]))
    first = [place for place, (index, second) in enumerate(order) if second]
    assert [order[place][0] for place in first] == list(layers[0].indices)
    assert order[first[-1] + 1] == (layers[0].last, False)
    assert len(order) == len(graph.nodes) + len(layers[0].indices)
