"""Divided models on GPUs, over NCCL; two ranks may share one, see tests/gpu/sharing.py."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from muster.bench.gpu_fleet import Fleet
from tests.gpu.sharing import RANKS_PER_GPU, launch_options, ranks_on
from tests.launch.launching import Place
from tests.parallel import gpu_checks
from tests.scheduler.processes import ROOT

pytestmark = pytest.mark.gpu

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.skipif(
    ranks_on(torch.cuda.device_count()) < 2, reason="needs 2 GPUs, or MS_TEST_RANKS_PER_GPU=2"
)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_the_quickstart_trains_on_two_gpus(tmp_path: Path, mode: str) -> None:
    place = Place(tmp_path, gpus=True)
    command = (sys.executable, "-m", "examples.quickstart_parallel", "--mode", mode)
    code, out, err = place.run("-n", "2", "--scheduler", *launch_options(), command=command, PYTHONPATH=PATH)
    assert code == 0, out + err
    losses = [float(x) for x in re.findall(r"epoch: \d step: \d, loss is ([0-9.]+)", out)]
    assert len(losses) == 20
    assert losses == sorted(losses, reverse=True)


SPLITS: dict[str, Any] = {
    "data parallel": {},
    "classes": {"head": {"n": 2}},
    "layers": {"up": {"n": 2}, "down": {"k": 2}, "head": {"n": 2}},
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    if ranks_on(torch.cuda.device_count()) < 2:
        pytest.skip("needs 2 GPUs, or MS_TEST_RANKS_PER_GPU=2")
    with Fleet(2, timeout_s=120, ranks_per_gpu=RANKS_PER_GPU) as found:
        yield found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("split", SPLITS)
def test_a_captured_step_drops_what_an_eager_one_drops(fleet: Fleet, split: str) -> None:
    """In float32: what differs would be other draws."""
    settings: dict[str, Any] = {"strategies": SPLITS[split], "dropout": 0.3, "low": False}
    eager = fleet.run(gpu_checks.train, capture=False, **settings)
    captured = fleet.run(gpu_checks.train, capture=True, **settings)
    for rank, each in enumerate(captured):
        assert each["captured"], each["reason"]
        assert each["losses"] == pytest.approx(eager[rank]["losses"], rel=1e-4)
        assert each["draws"] == eager[rank]["draws"]
    assert captured[0]["losses"] == pytest.approx(captured[1]["losses"], rel=1e-5)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("split", SPLITS)
def test_captured_steps_in_bfloat16_give_the_losses_of_one_process(fleet: Fleet, split: str) -> None:
    want = fleet.run(gpu_checks.alone)[0]
    found = fleet.run(gpu_checks.train, capture=True, dropout=0.0, low=True, strategies=SPLITS[split])[0]
    assert found["captured"], found["reason"]
    assert found["losses"] == pytest.approx(want, rel=5e-3)


def same_as_one_process(found: dict[str, Any], want: dict[str, Any]) -> None:
    """In float64, but for the order of sums in products."""
    assert found["losses"] == pytest.approx(want["losses"], rel=1e-9)
    for name, weight in want["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-8, msg=name)


WEIGHTS: dict[str, Any] = {"layers": 16, "width": 1024, "samples": 16}
"""256 MiB of weights in 32 parameters of 8 MiB, three of which fill a bucket; activations are small."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("capture", [False, True])
def test_parameters_in_shares_give_what_one_process_gives_in_less_memory(fleet: Fleet, capture: bool) -> None:
    want = fleet.run(gpu_checks.alone_deep, **WEIGHTS)[0]
    ways = {"shard_parameters": "always"}, {"shard_updates": "always", "shard_parameters": False}
    shared, whole = (
        fleet.run(gpu_checks.train_deep, capture=capture, settings=settings, **WEIGHTS) for settings in ways
    )
    for each in (*shared, *whole):
        assert each["captured"] == capture, each["reason"]
        same_as_one_process(each, want)
    if not capture:  # a graph keeps memory of its own beside that of the eager steps before it
        assert shared[0]["memory"] < 0.8 * whole[0]["memory"]


ACTIVATIONS: dict[str, Any] = {"layers": 12, "width": 512, "samples": 8192}
"""Each layer keeps some activations of 32 MiB; weights are small."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("shares", [False, "always"])
def test_layers_that_are_computed_again_give_what_one_process_gives_in_less_memory(
    fleet: Fleet, capture: bool, shares: bool | str
) -> None:
    want = fleet.run(gpu_checks.alone_deep, **ACTIVATIONS)[0]
    again, kept = (
        fleet.run(
            gpu_checks.train_deep,
            capture=capture,
            settings={
                "checkpoint_activations": each,
                "shard_parameters": shares,
                "shard_updates": "always",  # so that a plan runs, and no DataParallel
            },
            **ACTIVATIONS,
        )
        for each in ("always", False)
    )
    for each in (*again, *kept):
        assert each["captured"] == capture, each["reason"]
        same_as_one_process(each, want)
    assert again[0]["again"] > 0 == kept[0]["again"]
    if not capture:
        assert again[0]["activations"] < 0.6 * kept[0]["activations"]


@pytest.mark.timeout(240)
def test_a_captured_step_drops_again_what_it_dropped(fleet: Fleet) -> None:
    """And what an eager one drops; losses and weights would differ from step to step otherwise."""
    settings = {"checkpoint_activations": "always", "shard_parameters": "always"}
    small: dict[str, Any] = {"layers": 3, "width": 64, "samples": 32, "dropout": 0.3, "settings": settings}
    eager, captured = (fleet.run(gpu_checks.train_deep, capture=each, **small)[0] for each in (False, True))
    assert captured["captured"], captured["reason"]
    same_as_one_process(captured, eager)
