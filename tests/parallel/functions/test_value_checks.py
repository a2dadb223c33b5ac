"""A loss that looks at its values first is recorded and divided; elsewhere it looks as ever."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster.parallel.planning.search import solve
from muster.parallel.trace import trace
from tests.parallel.oracle import Case

torch.set_num_threads(1)


class Forecast(nn.Module):
    """A mean and a variance, some smaller than ``eps``: of each number, or of each sample."""

    def __init__(self, full: bool, variances: int = 4, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.variance = nn.Linear(8, 4).double(), nn.Linear(8, variances).double()
        self.loss = nn.GaussianNLLLoss(full=full, eps=0.4, reduction=reduction)

    def forward(self, x: Any, y: Any) -> Any:
        return self.loss(self.mean(x), y, self.variance(x).square()).sum()


@pytest.mark.parametrize(
    ("full", "variances", "reduction"), [(False, 4, "mean"), (True, 4, "sum"), (True, 1, "none")]
)
def test_a_gaussian_loss_is_divided_as_one_process_computes_it(
    full: bool, variances: int, reduction: str
) -> None:
    draw = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(8, size, generator=draw, dtype=torch.float64) for size in (8, 4))
    one = Case("forecast", module=Forecast(full, variances, reduction), batches=[batch])
    problem = one.problem((2,), whole_parameters=True)
    solution = solve(problem)
    assert solution is not None
    one.check(one.plan(problem, solution.choice))


def test_a_negative_variance_is_refused_once_the_recording_is_over() -> None:
    trace(Forecast(False), (torch.randn(4, 8).double(), torch.randn(4, 4).double()))
    with pytest.raises(ValueError, match="negative"):
        nn.functional.gaussian_nll_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]))
