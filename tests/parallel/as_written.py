"""Trains a module as its users write it, divided and in one process, and compares."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.parallel.module import ParallelModule
from tests.parallel.oracle import SLOW, close, part_of
from tests.parallel.ranks import RankCommunicator, run_ranks

torch.set_num_threads(1)
_generator = torch.Generator().manual_seed(3)
X, Y, Z = (torch.rand(8, 8, generator=_generator, dtype=torch.float64) for _ in range(3))
LABELS = torch.tensor([0, 2, 1, -100, 2, 3, -100, 7])
SPLIT = {"a": {"n": 2}, "b": {"k": 2}}
_seeding = threading.Lock()

Step = Callable[..., list[Any]]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with _seeding:
        torch.manual_seed(0)
        return make().double()


def part(x: Any, communicator: RankCommunicator) -> Any:
    return part_of(x, communicator, "data_parallel") if isinstance(x, torch.Tensor) else x


def divided(
    make: Callable[[], nn.Module], communicator: RankCommunicator, *batch: Any, **settings: Any
) -> Any:
    own = [part(x, communicator) for x in batch]
    return muster.parallelize(made(make), own, communicator=communicator, machine=SLOW, **settings)


def train(model: Any, *batch: Any, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same(
    make: Callable[[], nn.Module], batch: Any, step: Step = train, fed: int = -1, **settings: Any
) -> None:
    """Two ranks make of ``step`` what one process makes of it; the first ``fed`` tensors are the example."""
    bare = made(make)
    want, state = step(bare, *batch), bare.state_dict()

    def one(communicator: RankCommunicator) -> Any:
        own = [part(x, communicator) for x in batch]
        example = batch if fed < 0 else batch[:fed]
        model = divided(make, communicator, *example, **settings)
        assert isinstance(model, ParallelModule), model.plan.verdict
        return step(model, *own), model.full_state_dict()

    for got, whole in run_ranks(2, one):
        assert list(whole) == list(state)
        for name, value in state.items():
            close(name, whole[name], value, 1e-10)
        for number, (value, wanted) in enumerate(zip(got, want, strict=True)):
            close(f"result {number}", value, wanted, 1e-10)


def refused(
    error: type[Exception],
    words: str,
    make: Callable[[], nn.Module],
    batch: Any,
    step: Step = train,
    **settings: Any,
) -> None:
    def one(communicator: RankCommunicator) -> Any:
        model = divided(make, communicator, *batch, **{"mode": "semi_auto"} | settings)
        return step(model, *[part(x, communicator) for x in batch])

    with pytest.raises(error, match=words):
        run_ranks(2, one)


class Two(nn.Module):
    """Two layers; what is between and behind them differs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def between(self, h: Any) -> Any:
        return torch.tanh(h)

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.b(self.between(self.a(x))), y)


class Normed(Two):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, **settings)

    def between(self, h: Any) -> Any:
        return self.norm(h)
