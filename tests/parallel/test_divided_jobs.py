"""Whole jobs of divided models: launcher, scheduler, real processes, and SIGKILL during a step."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.gpu.sharing import launch_options, ranks_on
from tests.launch.launching import Place
from tests.parallel.divided_job import one_process
from tests.scheduler.processes import ROOT

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
STEPS = 7


def run(directory: Path, ranks: int, *arguments: str, gpus: bool = False) -> str:
    command = (
        sys.executable,
        "-m",
        "tests.parallel.divided_job",
        *("--out", str(directory), "--steps", str(STEPS)),
        *arguments,
    )
    code, out, err = Place(directory, gpus=gpus).run(
        *("-n", str(ranks), "--scheduler", "--max-restarts", "1", "--oversubscribe"),
        *(launch_options() if gpus else ()),
        command=command,
        PYTHONPATH=PATH,
    )
    assert code == 0, out + err
    return out + err


def check_losses(text: str, least: int, tolerance: float = 1e-10) -> None:
    """Each rank's losses are those of one process on the whole batches."""
    want = one_process(STEPS)
    found = re.findall(r"step (\d+) loss ([0-9.e-]+)", text)
    assert len(found) >= least
    for step, loss in found:
        assert abs(float(loss) - want[int(step) - 1]) < tolerance, (step, loss, want)


@pytest.mark.parametrize("split", [(), ("--split",)])
def test_a_killed_rank_is_replaced_and_losses_stay_those_of_one_process(
    tmp_path: Path, split: tuple[str, ...]
) -> None:
    text = run(tmp_path, 3 if not split else 2, "--kill", "4", *split)
    assert (tmp_path / "killed").exists()
    check_losses(text, STEPS)
    if split:  # what the lost rank held was nowhere else
        assert "held only by workers that are lost: training goes on from" in text
        assert "divided: True" in text


def test_the_big_vocabulary_is_divided_and_trains(tmp_path: Path) -> None:
    small = ("--words", "65536", "--width", "64", "--layers", "1", "--tokens", "16", "--steps", "4")
    code, out, err = Place(tmp_path).run(
        *("-n", "2", "--scheduler", "--oversubscribe"),
        command=(sys.executable, "-m", "examples.big_vocabulary", *small),
        PYTHONPATH=PATH,
    )
    assert code == 0, out + err
    assert re.search(r"times data parallel: .* travels", out), out
    losses = [float(x) for x in re.findall(r"epoch: 1 step: \d, loss is ([0-9.]+)", out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(
    ranks_on(torch.cuda.device_count()) < 2, reason="needs 2 GPUs, or MS_TEST_RANKS_PER_GPU=2"
)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("arguments", [(), ("--split",), ("--split", "--kill", "5")])
def test_divided_steps_are_captured_on_gpus(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    text = run(tmp_path, 2, *arguments, gpus=True)
    check_losses(text, STEPS, 1e-7)  # another device's sums
    if "--kill" not in arguments:
        assert "captured: True" in text, text
