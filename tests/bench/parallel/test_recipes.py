"""Plans of well-known models: what stands in a row. The search of the small ones is run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from muster.bench.parallel import recipes
from muster.bench.parallel.variants import written_loss
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import H100
from muster.parallel.planning.planner import find_plan


@pytest.mark.parametrize("model", ["dlrm", "classes"])
def test_small_ones_are_planned(model: str) -> None:
    row = recipes.planned(model, 8)
    assert row["split"] > 0
    assert row["layers_again"] == 0
    assert row["memory_gb"] < 0.9 * H100.memory_bytes / 1e9
    assert "8 ranks, searched" in recipes.text(row)


def test_what_is_computed_again_is_counted() -> None:
    with torch.device("meta"):
        net = recipes.Llama3(512, 2, 8, 1536, 128)
        ids = torch.zeros(1, 128, dtype=torch.long)
        graph = graph_of(net, (ids, ids), 2, loss=written_loss)
    plan = find_plan(graph, 2, machine=H100, mode="data_parallel", checkpoint_activations="always")
    row = recipes.described(plan)
    assert row["layers_again"] >= 2
    assert row["split"] == row["zero_3"] == 0
