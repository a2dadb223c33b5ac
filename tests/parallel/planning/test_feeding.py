"""Which slices of the batch a rank feeds."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.feeding import feeding
from muster.parallel.planning.layouts import coordinates, factorisations
from muster.parallel.planning.planner import find_plan
from tests.parallel.oracle import state_of
from tests.parallel.ranks import RankCommunicator, run_ranks


def test_slices_of_the_data_by_input() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Any, y: Any) -> Any:
            return F.mse_loss(self.fc(x), y)

    dataset = ((2, 2), (2, 1))
    graph = graph_of(Pair(), (torch.empty(2, 4), torch.empty(2, 4)), 4, dataset)
    plan = find_plan(graph, 4, machine=Hardware(), dataset=dataset, mesh=(2, 2))
    assert state_of(plan, "x").outs == ((0, 1),)
    assert state_of(plan, "y").outs == ((0, "R"),)
    assert "fed as dataset_strategy says, there is no data parallelism" in plan.verdict


@pytest.mark.parametrize(
    ("dataset", "cells"),
    [
        (((2, 1), (2, 1)), [((r // 4, 0), (r // 4, 0)) for r in range(8)]),
        (((2, 4), (2, 1)), [((r // 4, r % 4), (r // 4, 0)) for r in range(8)]),
        (((4, 2), (1, 2)), [((r // 2, r % 2), (0, r % 2)) for r in range(8)]),
        (((2, 1), (1, 4)), [((r // 4, 0), (0, r % 4)) for r in range(8)]),
        (((1, 8), (1, 2)), [((0, r), (0, r // 4)) for r in range(8)]),
    ],
)
def test_which_slices_a_rank_feeds_does_not_depend_on_the_mesh(dataset: Any, cells: Any) -> None:
    fitting = 0
    for mesh in [*factorisations(8, 3), (1, 2, 4), (4, 1, 2)]:
        layouts = feeding(mesh, dataset, [(16, 16), (16, 16)])
        for rank in range(8) if layouts is not None else ():
            assert layouts is not None
            place = coordinates(rank, mesh)
            got = []
            for layout in layouts:
                cell = [0, 0]
                for size, entry, index in zip(mesh, layout, place, strict=True):
                    if isinstance(entry, int):
                        cell[entry] = cell[entry] * size + index
                got.append(tuple(cell))
            assert tuple(got) == cells[rank], (mesh, rank, layouts)
        fitting += layouts is not None
    assert fitting >= 2


@pytest.mark.parametrize("order", [("b0", "n"), ("n", "b0")])
@pytest.mark.parametrize("counts", [{"b0": 2, "n": 4}, {"b0": 4, "n": 2}])
def test_ranks_that_feed_slices_train_on_the_whole_batch(
    order: tuple[str, str], counts: dict[str, int]
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8).double()
    x, y = torch.rand(8, 8).double(), torch.randint(8, (8,))
    want = F.cross_entropy(net(x), y).item()
    rows = counts["b0"]

    def train(communicator: RankCommunicator) -> Any:
        mine = [each.chunk(rows)[communicator.rank * rows // 8] for each in (x, y)]
        model = muster.parallelize(
            copy.deepcopy(net),
            mine,
            loss=nn.CrossEntropyLoss(),
            communicator=communicator,
            strategies={"linear": {axis: counts[axis] for axis in order}},
            dataset_strategy=((rows, 1), (rows,)),
        )
        return model(*mine).item()

    for loss in run_ranks(8, train):
        assert loss == pytest.approx(want, abs=1e-12)
