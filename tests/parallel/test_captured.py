"""What steps of divided models draw as graphs: those of tests/gpu/graphs.py, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.torch.capture import capture_step
from muster.torch.captured_model import captured_model
from tests.gpu import graphs
from tests.gpu.threads import _Meeting

torch.set_num_threads(1)
STEPS = 8


class Noisy(nn.Module):
    """Attention and layers that drop."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any, y: Any) -> Any:
        x = F.dropout(torch.relu(self.up(x)), 0.4, self.training)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2 if self.training else 0.0)
        return F.mse_loss(self.down(x.transpose(1, 2).flatten(2)), y)


def losses(capture: bool, accumulate: int, rate: float) -> tuple[list[float], bool, list[int]]:
    torch.manual_seed(0)
    net, (x, y) = Noisy(), (torch.rand(4, 3, 8), torch.rand(4, 3, 8))
    parts = tuple(each[: 4 // accumulate] for each in (x, y))
    communicator = graphs.GraphCommunicator(_Meeting(1), 0)
    model = muster.parallelize(net, parts, communicator=communicator, mode="semi_auto", seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
    graphs.watch(model, optimizer)
    asked: Any = captured_model(model, optimizer)
    assert asked is model
    step = capture_step(model, model, optimizer, capture=capture, accumulate=accumulate)
    return [step(x, y).item() for _ in range(STEPS)], step.captured, model.draws()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_captured_step_draws_again_and_what_an_eager_one_draws(
    monkeypatch: pytest.MonkeyPatch, accumulate: int, rate: float
) -> None:
    graphs.install(monkeypatch)
    eager, was_captured, position = losses(False, accumulate, rate)
    assert not was_captured
    captured, was_captured, same_position = losses(True, accumulate, rate)
    assert was_captured
    assert captured == pytest.approx(eager, rel=1e-6)
    assert len(set(captured)) == STEPS
    assert same_position == position == [5, STEPS * accumulate]
