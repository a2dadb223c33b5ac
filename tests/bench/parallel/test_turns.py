"""The models of the comparison in turns are twenty, can be planned, and are judged by what was predicted."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from muster.bench.parallel.turns import MODELS, judged
from muster.parallel.api import graph_of
from muster.parallel.planning.planner import find_plan
from tests.parallel.oracle import SLOW


def test_there_are_twenty() -> None:
    assert len(MODELS) == 20


@pytest.mark.parametrize("name", MODELS)
def test_each_can_be_planned(name: str) -> None:
    make, inputs, targets, loss = MODELS[name]
    with torch.device("meta"):
        graph = graph_of(make(), (inputs(), targets()), 2, loss=loss)
    plan = find_plan(graph, 2, machine=SLOW, local_norm=True)
    assert plan.seconds > 0
    assert not plan.undivided


def test_what_is_called_faster_must_be() -> None:
    def row(model: str, predicted: float, measured: float, base: float | None = 10.0) -> dict[str, object]:
        return {
            "model": model,
            "predicted_ms": predicted,
            "data_parallel_predicted_ms": base,
            "step_ms": measured,
            "data_parallel_step_ms": 10.0,
        }

    rows = [row("a", 5, 6), row("b", 5, 10.2), row("c", 5, 11), row("d", 9.9, 20), row("e", 5, 6, None)]
    assert judged(rows) == {"called_faster": ["a", "b", "c"], "are_faster": ["a"], "are_slower": ["c"]}
