"""What parallelize falls back to, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import muster
from muster.errors import CollectiveMismatchError, NotInitializedError, SettingsError
from muster.torch.data_parallel import DataParallel
from tests.parallel.models import MODELS, Mlp, make
from tests.parallel.oracle import part_of
from tests.parallel.ranks import RankCommunicator, run_ranks


def test_ranks_with_different_models_are_told_so() -> None:
    def train(communicator: RankCommunicator) -> Any:
        net = Mlp() if communicator.rank else Mlp().requires_grad_(False)
        net.up.requires_grad_(True)
        mine = [x.float()[:4] for x in MODELS["mlp"][1](0)]
        with pytest.raises(
            CollectiveMismatchError, match=r"The ranks \[1\] came to another plan than rank 0"
        ):
            muster.parallelize(net, mine, communicator=communicator)

    run_ranks(2, train)


def test_data_parallel_is_dataparallel_with_a_plan() -> None:
    batch = MODELS["quick"][1](0)
    reference = make("quick")
    reference(*batch).backward()

    def train(communicator: RankCommunicator) -> Any:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        model = muster.parallelize(make("quick"), mine, communicator=communicator, mode="data_parallel")
        assert isinstance(model, DataParallel)
        model(*mine).backward()
        return {name: p.grad for name, p in model.module.named_parameters()}, model.plan

    for grads, plan in run_ranks(2, train):
        assert plan.verdict.startswith("data parallel, as asked: ")
        for name, p in reference.named_parameters():
            torch.testing.assert_close(grads[name], p.grad)


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        out = self.fc(x)
        if out.sum() > 0:  # the line that is named
            out = -out
        return out.square().mean()


def test_control_flow_is_named_by_its_line_and_falls_back_to_data_parallelism(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "the line that is named" in text)

    def train(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(Choosy(), (torch.rand(2, 4),), communicator=communicator)
        model(torch.rand(2, 4)).backward()
        with pytest.raises(muster.WorkerError, match=f"test_api.py:{line}"):
            muster.parallelize(Choosy(), (torch.rand(2, 4),), communicator=communicator, mode="semi_auto")
        return model

    model = run_ranks(2, train)[0]
    assert isinstance(model, DataParallel)
    assert f"test_api.py:{line}" in str(model.plan)
    assert "data parallel, because nothing else can be searched" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "both"}, 'mode is "auto", "semi_auto"'),
        ({"search": "fast"}, "search is one of exact"),
        ({"memory": 2}, "memory is a share above 0 and up to 1"),
        ({"batch_norm": "none"}, 'batch_norm is "local" or "synchronised"'),
        ({"mode": "hybrid", "strategies": {"up": {"n": 2}}}, 'strategies need "semi_auto" or "auto"'),
        ({"mesh": (3,)}, r"the mesh \[3\] has 3 ranks, and the job 1"),
        ({"mesh": "1"}, "a mesh is the ranks along each of its dimensions"),
        ({"mode": "stand_alone", "strategies": {"up": {"n": 2}}}, "the strategy of 'up' needs"),
        ({"strategies": {"up": 2}}, "a strategy is a tuple of slices for each input"),
        ({"strategies": {"nobody": {"n": 1}}}, "there is no operator or module 'nobody'"),
        ({"dataset_strategy": ((1, 1),) * 3}, "dataset_strategy has 3 tuples, and the batch 2 tensors"),
        ({"machine": "none.json"}, "the measured machine none.json cannot be read"),
        ({"autocast": torch.float16}, "a GradScaler sees the gradients of one rank's parts"),
    ],
)
def test_wrong_arguments_are_refused_in_words(settings: Any, words: str) -> None:
    def train(communicator: RankCommunicator) -> None:
        with pytest.raises(SettingsError, match=words):
            muster.parallelize(make("mlp"), MODELS["mlp"][1](0), communicator=communicator, **settings)

    run_ranks(1, train)


def test_without_a_session_it_says_so() -> None:
    with pytest.raises(NotInitializedError):
        muster.parallelize(make("mlp"), MODELS["mlp"][1](0))
    with pytest.raises(SettingsError, match="example is a tuple of the tensors"):
        run_ranks(1, lambda c: muster.parallelize(make("mlp"), "batch", communicator=c))
