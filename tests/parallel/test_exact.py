"""Plans compute what one process computes, send what they list, and hold what they say."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster.parallel.planning.problem import Pin
from muster.parallel.planning.search import solve
from tests.parallel.models import MODELS
from tests.parallel.oracle import Case

torch.set_num_threads(1)


@functools.cache
def case(name: str, dataset: str = "data_parallel") -> Case:
    return Case(name, dataset=dataset)


def pins(one: Case) -> list[tuple[str, str]]:
    """Every state that a node may be in on two ranks, and that some plan can hold."""
    problem = one.problem((2,))
    return [
        (node.name, state.key)
        for node, states in zip(one.traced.graph.nodes, problem.states, strict=True)
        for state in states
        if len(states) > 1
    ]


def _keyed(key: str) -> Pin:
    return lambda _, state: state.key == key


def check_pin(one: Case, name: str, key: str) -> bool:
    problem = one.problem((2,), {name: _keyed(key)})
    solution = solve(problem)
    if solution is None:  # such as a buffer that is written, split as nobody writes it
        return False
    plan = one.plan(problem, solution.choice)
    try:
        one.check(plan)
    except AssertionError as error:
        raise AssertionError(f"{one.name}: {name} as {key}: {error}") from error
    return True


@pytest.mark.parametrize("name", MODELS)
def test_each_axis_by_itself(name: str) -> None:
    one = case(name)
    every = pins(one)
    stride = max(1, len(every) // 12)
    chosen = every[sum(map(ord, name)) % stride :: stride]
    assert sum(check_pin(one, *pin) for pin in chosen) >= len(chosen) // 2


@pytest.mark.parametrize("name", MODELS)
def test_the_best_plan_and_random_ones(name: str) -> None:
    one = case(name)
    for mesh in ((2,), (2, 2)):
        problem = one.problem(mesh)
        solution = solve(problem)
        assert solution is not None
        one.check(one.plan(problem, solution.choice))
    one.check(one.random_plan((2, 2), 7))


@pytest.mark.parametrize("name", ["gpt", "residual"])
def test_data_parallelism_as_a_plan(name: str) -> None:
    one = case(name)
    problem = one.problem((4,), whole_parameters=True, shard_updates=False)
    solution = solve(problem)
    assert solution is not None
    plan = one.plan(problem, solution.choice)
    assert plan.is_data_parallel
    one.check(plan)


@pytest.mark.parametrize("name", ["mlp", "gpt_fused_tied"])
def test_the_whole_batch_on_every_rank(name: str) -> None:
    one = case(name, "full_batch")
    one.check(one.random_plan((2, 2), 5))


def test_three_mesh_dimensions() -> None:
    one = case("quick")
    one.check(one.random_plan((2, 2, 2), 3))


class OfOneElement(nn.Module):
    """Parts of one element, whose gradients are views of a number: contiguous, in whatever stride."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.one = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))
        self.row, self.column = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Any) -> Any:
        loss = self.number.expand(4).sum() + (self.row + self.one.expand(4)).sum() + self.row.exp().sum()
        return loss + x.mean() * self.column.expand(4, 4).sum() + self.column.exp().sum()


def test_parts_of_one_element() -> None:
    batches = [(torch.rand(4, 2).double(),)]
    one = Case("one element", dataset="full_batch", module=OfOneElement().double(), batches=batches)
    for mesh in ((4,), (2, 2)):
        for seed in range(4):
            one.check(one.random_plan(mesh, seed))


def test_parameters_kept_in_parts_and_gathered_for_use() -> None:
    """Little memory: what is stored split is gathered forward, and its gradient scattered."""
    one = case("mlp")
    keys = {"p_up_weight": "S0|S0", "linear": "b0"}
    pinned = one.problem((2,), {name: _keyed(key) for name, key in keys.items()})
    solution = solve(pinned)
    assert solution is not None
    plan = one.plan(pinned, solution.choice)
    kinds = {(each.phase, each.kind) for each in plan.collectives if each.node == "linear"}
    assert {("forward", "all_gather"), ("backward", "reduce_scatter")} <= kinds
    one.check(plan)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", MODELS)
def test_every_axis_of_every_operator(name: str) -> None:
    one = case(name)
    chosen = pins(one)
    ran = sum(check_pin(one, *pin) for pin in chosen)
    print(f"{name}: {ran} of {len(chosen)} pins")
    assert ran >= len(chosen) * 0.8


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans(name: str) -> None:
    one = case(name)
    for seed in range(25):
        one.check(one.random_plan(((2,), (2, 2), (4,))[seed % 3], seed))
