"""No plan is called best for what it does not know, and what is in the way is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import find_plan
from tests.parallel.planning.test_plan import wide
from tests.parallel.suite import SUITE


class Scan(nn.Module):
    """Layers around an operator along the second dimension."""

    def __init__(self, scan: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.down, self.scan = nn.Linear(64, 1024), nn.Linear(1024, 8), scan

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.down(self.scan(self.up(x))), y)


def without_rule(x: Any) -> Any:
    return x.cummax(1).values


def with_rule(x: Any) -> Any:
    return x.cumsum(1)


def plan_of(scan: Callable[[Any], Any], **settings: Any) -> Plan:
    example = torch.empty(32, 64, 64), torch.empty(32, 64, 8)
    return find_plan(graph_of(Scan(scan), example, 8), 8, machine=Hardware(), **settings)


def test_data_parallel_is_not_called_best_where_an_operator_is_kept_whole() -> None:
    plan = plan_of(without_rule)
    assert re.match(
        r'mode="data_parallel" is predicted \d+\.\d\d times as fast: no rule divides cummax of'
        r" test_verdict\.py:\d+ \(\d+\.\d%\), so each rank does all of it\.",
        plan.verdict,
    )
    assert plan_of(with_rule).verdict.startswith("data parallel is best")


def test_the_baseline_is_what_data_parallel_does() -> None:
    """Its ranks know nothing of rules: a part of the batch costs a part of the whole."""
    plans = [plan_of(scan) for scan in (without_rule, with_rule)]
    first, second = (plan.baseline_s or 0.0 for plan in plans)
    assert first == pytest.approx(second, rel=0.3)
    assert plans[0].seconds > 2 * first
    asked = plan_of(without_rule, mode="data_parallel")
    assert asked.verdict == f"data parallel, as asked: {first * 1e3:.3g} ms a step predicted."
    assert "kept whole" not in str(asked)


@pytest.mark.parametrize("mode", ["auto", "data_parallel"])
def test_the_baseline_holds_parameters_whole_also_where_the_plan_does_not(mode: str) -> None:
    made = SUITE["vit_pooled"]
    graph = graph_of(made.make(), made.batch(0), 2)
    plain = find_plan(graph, 2, machine=Hardware(), mode="data_parallel")
    shared = find_plan(graph, 2, machine=Hardware(), mode=mode, shard_parameters="always")
    assert any(state.regathered for state in shared.states)
    assert shared.baseline_s == plain.baseline_s
    assert shared.baseline_nbytes == plain.baseline_nbytes


def test_a_plan_that_data_parallel_beats_says_so() -> None:
    """Small steps wait for the sum of a loss, which data parallelism does not make."""
    plan = wide(classes=10)
    assert plan.seconds > 1.2 * (plan.baseline_s or 0.0)
    assert re.match(
        r'data parallel is best, and mode="data_parallel" is predicted \d\.\d\d times as fast as this plan:'
        r" its loss is of each rank's part\.",
        plan.verdict,
    )


def test_what_is_small_does_not_count() -> None:
    graph = graph_of(SUITE["two_towers"].make(), SUITE["two_towers"].batch(0), 2)
    assert find_plan(graph, 2, machine=Hardware()).undivided == []


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "wide",
            {},
            r"p_fc_weight \[400000, 512\], with gradient and optimizer: .*; a smaller batch would not help:"
            r" take \d+ ranks or more, or an optimizer that keeps less",
        ),
        (
            "scan",
            {},
            r"what cummax keeps, with the result \[256, 64, 1024\]: .*, which nothing divides; take a smaller"
            r" batch, \d+% of this one or less",
        ),
    ],
)
def test_what_does_not_fit_is_named(name: str, settings: dict[str, Any], words: str) -> None:
    machine = Hardware(memory_bytes=1e8)
    with pytest.raises(
        SettingsError, match=r"no plan fits into 90\.0 MB a rank: on 8 ranks at least"
    ) as raised:
        if name == "wide":
            wide(8, machine=machine)
        else:
            example = torch.empty(32, 64, 64), torch.empty(32, 64, 8)
            find_plan(graph_of(Scan(without_rule), example, 8), 8, machine=machine)
    assert re.search(words, str(raised.value)), raised.value


def test_meshes_that_could_not_be_searched_are_named() -> None:
    graph = graph_of(SUITE["llama_fused"].make(), SUITE["llama_fused"].batch(0), 4)
    text = str(find_plan(graph, 4, machine=Hardware()))
    assert "not searched, for the graph is too connected there" in text
    assert "others promise more: ranks as 2 x 2" in text
    assert "from the best possible on the meshes that were searched" in text
