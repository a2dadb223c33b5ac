"""The parallel quickstart on GPUs, over NCCL."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.gpu.sharing import launch_options, ranks_on, shared
from tests.scheduler.processes import ROOT
from tests.worker.launch.launching import Place

pytestmark = pytest.mark.gpu

PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.skipif(
    ranks_on(torch.cuda.device_count()) < 2, reason="needs 2 GPUs, or MS_TEST_RANKS_PER_GPU=2"
)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_the_quickstart_trains_on_two_gpus(tmp_path: Path, mode: str) -> None:
    place = Place(tmp_path)
    command = shared(sys.executable, "-m", "examples.quickstart_parallel", "--mode", mode)
    code, out, err = place.run("-n", "2", "--scheduler", *launch_options(), command=command, PYTHONPATH=PATH)
    assert code == 0, out + err
    losses = [float(x) for x in re.findall(r"epoch: \d step: \d, loss is ([0-9.]+)", out)]
    assert len(losses) == 20
    assert losses == sorted(losses, reverse=True)
