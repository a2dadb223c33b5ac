"""``muster bench parallel`` as far as it runs without GPUs: variants agree on what they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from muster.bench.parallel import command, job
from muster.bench.parallel.models import Llama, Vision
from muster.bench.parallel.variants import Task, make_step
from tests.parallel.ranks import RankCommunicator, run_ranks

CPU = torch.device("cpu")


def losses(variant: str, communicator: Any, init_file: Path) -> list[float]:
    step, _, _ = make_step(variant, job.TASKS["tiny"], communicator, CPU, None, str(init_file))
    return [float(step()) for _ in range(4)]


def on_threads(variant: str, folder: Path) -> list[list[float]]:
    return run_ranks(2, lambda communicator: losses(variant, communicator, folder / "m"))


def test_plans_and_a_split_by_hand_train_alike(tmp_path: Path) -> None:
    apart = on_threads("data-parallel", tmp_path)
    mean = [sum(each) / 2 for each in zip(*apart, strict=True)]
    for variant in (*command.PLANS, "by-hand"):
        first, second = on_threads(variant, tmp_path)
        if variant == "plan-data-parallel":  # DataParallel: each rank has the loss of its own part
            first = [sum(each) / 2 for each in zip(first, second, strict=True)]
        else:
            assert first == pytest.approx(second)
        assert first == pytest.approx(mean, rel=1e-5), variant


def _peer(rank: int, variant: str, folder: Path) -> None:
    torch.set_num_threads(1)
    found = losses(variant, SimpleNamespace(rank=rank, world_size=2), folder / "meeting")
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("variant", ["tensor-parallel", "ddp-compiled"])
def test_torchs_own_ways_train_alike(variant: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_peer, (variant, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    mean = [sum(each) / 2 for each in zip(*ranks, strict=True)]
    divided = on_threads("auto", tmp_path)[0]
    assert mean == pytest.approx(divided, rel=1e-4)


def row(variant: str, ms: float | None, model: str = "tiny") -> dict[str, Any]:
    return {"model": model, "variant": variant} | ({"error": "no"} if ms is None else {"step_ms": ms})


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: Vision(10, 64, 2, 32), lambda: (torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))),
        (lambda: Llama(50, 64, 2, 16), lambda: (torch.randint(50, (2, 16)), torch.randint(50, (2, 16)))),
    ],
)
def test_models_train_under_a_plan_as_without_one(
    make: Callable[[], Any], batch: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    drawn = batch()
    task = Task(lambda device: make(), lambda device, rank: drawn, "head", lambda module: [])

    def trained(variant: str) -> list[float]:
        def run(communicator: Any) -> list[float]:
            step, _, _ = make_step(variant, task, communicator, CPU, None, str(tmp_path / "m"))
            return [float(step()) for _ in range(3)]

        found: list[float] = run_ranks(1, run)[0]
        return found

    planned = trained("auto")
    assert planned[2] < planned[0]
    assert planned == pytest.approx(trained("data-parallel"), rel=1e-5)


def test_passes_become_medians_and_one_that_failed_spoils_none() -> None:
    rows = [row("auto", 3.0), row("zero-1", None), row("auto", 1.0), row("auto", None), row("auto", 2.0)]
    auto, zero = command.medians(rows)
    assert auto["step_ms"] == 2.0
    assert auto["passes_ms"] == [3.0, 1.0, 2.0]
    assert zero["error"] == "no"


def test_the_chosen_plan_is_compared_with_the_plans_that_ran_and_not_with_peers() -> None:
    rows = [
        row("auto", 11.0),
        row("plan-least-sent", 10.0),
        row("plan-whole-updates", 12.0),
        row("zero-1", 5.0),
    ]
    assert command.behind_the_best(rows, "tiny") == pytest.approx(0.1)
    assert command.behind_the_best([*rows, row("auto", 1.0, "other")], "other") is None


def test_a_row_has_what_its_plan_predicts() -> None:
    def one(communicator: RankCommunicator) -> dict[str, Any]:
        found: dict[str, Any] = job.measure(
            communicator, model="tiny", variant="auto", seconds=0.01, init_file="", machine={}
        )
        return found

    for found in run_ranks(2, one):
        assert {"step_ms", "predicted_ms", "predicted_gb", "verdict", "plan", "captured"} <= found.keys()
