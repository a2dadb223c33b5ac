"""The loss of connectionist temporal classification is one operator, which samples divide."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster.parallel.planning.rules import modes_of
from muster.parallel.planning.search import solve
from tests.parallel.oracle import Case

torch.set_num_threads(1)


class Letters(nn.Module):
    """Scores of 6 letters in 8 steps, and targets of different lengths."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(4, 6).double(), nn.CTCLoss(reduction=reduction, zero_infinity=True)

    def forward(self, x: Any, targets: Any, lengths: Any) -> Any:
        logs = self.head(x).log_softmax(-1).transpose(0, 1)
        return self.loss(logs, targets, torch.full_like(lengths, 8), lengths).sum()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_samples_are_divided(reduction: str) -> None:
    draw = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(4, 8, 4, generator=draw, dtype=torch.float64),
        torch.randint(1, 6, (4, 3), generator=draw),
        torch.tensor([3, 1, 2, 3]),
    )
    one = Case("letters", module=Letters(reduction), batches=[batch])
    graph = one.traced.graph
    (node,) = (each for each in graph.nodes if each.op == "ctc_loss")
    assert [mode.name for mode in modes_of(graph, node)[0]] == ["-", "m"]
    pinned = one.problem((2,), {node.name: lambda _, state: state.modes[0] == "m"})
    solution = solve(pinned)
    assert solution is not None
    one.check(one.plan(pinned, solution.choice))
