"""The ResNet example divided as a search says: it trains, and a checkpoint in parts is taken up."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.launch.launching import Place
from tests.parallel.test_divided_jobs import PATH

TINY = ("--tiny", "--no-compile", "--parallel=auto", "--data=synthetic", "--image-size=32", "--print-every=1")


@pytest.mark.timeout(300)
def test_the_resnet_example_trains_as_a_search_divides_it(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "examples.resnet50_cifar10", *TINY, "--batch-size=4", "--steps=4")
    code, out, err = Place(tmp_path).run(
        *("-n", "2", "--scheduler", "--oversubscribe", "--devices", "none"),
        command=(*command, "--checkpoint-dir="),
        PYTHONPATH=PATH,
    )
    assert code == 0, out + err
    losses = [float(loss) for loss in re.findall(r"loss is ([0-9.]+)", out)]
    assert len(losses) == 4
    assert "data parallel" in out
