"""``muster bench parallel`` as far as it runs without GPUs: variants agree on what they train."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from muster.bench.parallel import job
from tests.parallel.ranks import RankCommunicator, run_ranks


def test_the_variants_train_alike(tmp_path: Path) -> None:
    def losses(variant: str) -> list[list[float]]:
        def one(communicator: RankCommunicator) -> list[float]:
            cpu = torch.device("cpu")
            step, _ = job.make_step(variant, job.TASKS["tiny"], communicator, cpu, None, str(tmp_path / "m"))
            return [float(step()) for _ in range(4)]

        return run_ranks(2, one)

    divided, by_hand, apart = losses("auto"), losses("by-hand"), losses("data-parallel")
    assert divided[0] == pytest.approx(divided[1])
    assert divided[0] == pytest.approx(by_hand[0], rel=1e-5)
    mean = [sum(each) / 2 for each in zip(*apart, strict=True)]
    assert divided[0] == pytest.approx(mean, rel=1e-5)
