"""When the parts of a step run: gradients travel beside the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from muster.parallel.planning.costs import Hardware
from tests.parallel.models import Stack

torch.set_num_threads(1)


def planned(machine: Hardware, rows: int = 64, **settings: Any) -> Any:
    from muster.parallel.api import graph_of
    from muster.parallel.planning.planner import find_plan

    with torch.device("meta"):
        graph = graph_of(Stack(), (torch.zeros(rows, 1024), torch.zeros(rows, 1024)), 4)
    return find_plan(graph, 4, machine=machine, mode="data_parallel", **settings)


EVEN = Hardware(
    "even", flops_per_s=1e12, memory_bytes_per_s=1e15, bus_bytes_per_s=1e15, latency_s=0, launch_s=0
)
PRODUCT = 2 * 64 * 1024 * 1024 / 1e12
"""Seconds of one product of a rank's 64 samples with one layer's weights."""
SUM = 2 * 0.75 * 4 * 2**20
"""Bytes that each rank sends for one layer's gradients, over four ranks."""


def test_sums_that_cost_nothing_leave_only_computing() -> None:
    played = planned(EVEN).timeline
    assert played.forward_s == pytest.approx(4 * PRODUCT, rel=1e-3)
    assert played.backward_s == pytest.approx(7 * PRODUCT, rel=1e-3)  # the batch needs no gradient
    assert played.exposed_s == pytest.approx(0, abs=1e-2 * PRODUCT)


def test_small_sums_hide_behind_the_backward_pass_but_for_the_last_bucket() -> None:
    """All four layers are one bucket of 16 MiB, which is full when the backward pass is over."""
    slow = replace(EVEN, bus_bytes_per_s=SUM / PRODUCT)  # a layer's sum takes as long as a product
    played = planned(slow).timeline
    assert played.gradients_s == pytest.approx(4 * PRODUCT, rel=1e-2)
    assert played.hidden == pytest.approx(0, abs=0.01)
    assert played.seconds == pytest.approx(15 * PRODUCT, rel=1e-2)


def test_buckets_travel_while_earlier_layers_go_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each layer: three of four sums are done when the last gradient is there."""
    from muster.parallel.planning import buckets

    monkeypatch.setattr(buckets.gradient_buckets, "__defaults__", (4 * 2**20,))
    slow = replace(EVEN, bus_bytes_per_s=SUM / PRODUCT)
    played = planned(slow).timeline
    assert played.gradients_s == pytest.approx(4 * PRODUCT, rel=1e-2)
    assert played.exposed_s == pytest.approx(PRODUCT, rel=1e-2)
    slower = planned(replace(EVEN, bus_bytes_per_s=SUM / PRODUCT / 10)).timeline
    assert slower.exposed_s == pytest.approx((40 - 5) * PRODUCT, rel=1e-2)  # the first begins after 2 of 7
    text = str(planned(slow))
    assert "of which the backward pass hides 75%" in text
