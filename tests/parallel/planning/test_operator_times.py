"""What operators cost on one rank, beside what was seen on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster.parallel.api import graph_of
from muster.parallel.planning.costs import H100, OperatorTimes, Seconds
from muster.parallel.planning.planner import find_plan

BIG = 2**22


class _Divided(nn.Module):
    def __init__(self, forward: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scale, self._forward = nn.Parameter(torch.ones(())), forward

    def forward(self, x: Any) -> Any:
        return self._forward(x * self.scale)


def _times(forward: Callable[[Any], Any], *shape: int) -> dict[str, Seconds]:
    """By operator; of one rank, for a tensor of float32."""
    with torch.device("meta"):
        graph = graph_of(_Divided(forward), (torch.empty(shape),), 1)
        plan = find_plan(graph, 1, machine=H100)
    times = OperatorTimes(plan.graph, plan.mesh, H100)
    found: dict[str, Seconds] = {}
    for node, state in zip(plan.graph.nodes, plan.states, strict=True):
        once = times.seconds(node, state.ins, state.outs, 1)
        found[node.op] = found.get(node.op, Seconds()) + once
    return found


def _copy_s(elements: int) -> float:
    return 2 * 4 * elements / H100.memory_bytes_per_s


def test_parts_cost_nothing_until_their_gradients_are_joined() -> None:
    times = _times(lambda x: torch.mul(*x.chunk(2, -1)), BIG // 64, 64)
    assert times["chunk"].forward == 0.0
    assert 2 * _copy_s(BIG) < times["chunk"].backward < 3.5 * _copy_s(BIG)


def test_gradients_of_parts_in_another_order_are_brought_back_besides() -> None:
    plain = _times(lambda x: torch.mul(*x.unbind(0)), 2, BIG // 128, 64)["unbind"]
    turned = _times(lambda x: torch.mul(*x.permute(1, 0, 2).unbind(0)), BIG // 128, 2, 64)["unbind"]
    assert plain.backward + 1.5 * _copy_s(BIG) < turned.backward < plain.backward + 3 * _copy_s(BIG)


def test_joining_costs_more_than_a_copy_and_its_gradients_are_views() -> None:
    times = _times(lambda x: torch.cat((x, x.sin()), -1), BIG // 64, 64)["cat"]
    assert times.backward == 0.0
    assert 2 * _copy_s(2 * BIG) < times.forward < 3.5 * _copy_s(2 * BIG)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_attention_waits_for_memory_and_for_its_products(tokens: int) -> None:
    """With few tokens reading counts, with many what is computed; never only the greater of both."""
    heads, each = 16, 64
    samples = BIG // (heads * tokens * each)
    attention = nn.functional.scaled_dot_product_attention
    times = _times(lambda x: attention(x, x, x), samples, heads, tokens, each)["scaled_dot_product_attention"]
    products = 4.0 * BIG * tokens / H100.flops_per_s
    moved = 4 * 4 * BIG / H100.memory_bytes_per_s
    assert times.forward > products + moved
    assert times.backward > 2.5 * products + 2 * moved
