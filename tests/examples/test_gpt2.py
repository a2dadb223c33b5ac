"""The GPT-2 example on a tiny size: it learns, is captured, goes on after a change and a resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples import gpt2 as example
from examples.throughput import Throughput
from muster.example.status_line import StatusLine
from tests.examples.test_capture_on_cpu import WARM_UP, LoneSession
from tests.gpu import cuda_rules, graphs

ROOT = Path(__file__).parents[2]
TINY = [
    *("--layers=2", "--heads=2", "--width=16", "--context=8", "--batch-size=4", "--rate=0.05"),
    *("--print-every=1", "--no-compile", "--sample=0", "--checkpoint-dir="),
]


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    graphs.install(monkeypatch)
    monkeypatch.setattr(example, "WARM_UP_STEPS", 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the same words again and again. " * 20)
    return file


def run(text: Path, steps: int, *arguments: str, loses_members_after: int = -1) -> Any:
    """Trains in this process; returns the losses, what was done, and the job."""
    with cuda_rules.Machine():
        session: Any = LoneSession()
        session.loses_members_after = loses_members_after
        args = example.settings([str(text), f"--steps={steps}", *TINY, *arguments])
        job = example.Job(args, session, torch.device("cpu"))
        graphs.watch(job.model, job.optimizer)
        lines: list[str] = []
        out: Any = type("Lines", (StatusLine,), {"line": lambda self, line: lines.append(line)})()
        done = example.train(args, job, session, out)
        return [float(found) for found in re.findall(r"loss is ([0-9.]+),", "\n".join(lines))], done, job


def test_it_learns_in_captured_steps_and_writes(text: Path) -> None:
    losses, done, job = run(text, 40)
    assert len(losses) == 40 and losses[-1] < 2 < 5 < losses[0]
    assert isinstance(done, Throughput) and (done.steps, done.captured) == (40, 40 - WARM_UP)
    decays = {
        name: group["weight_decay"]
        for group in job.optimizer.param_groups
        for name, each in job.model.named_parameters()
        if any(each is other for other in group["params"])
    }
    assert decays["blocks.0.hidden.weight"] == 0.1 and decays["blocks.0.hidden.bias"] == 0
    assert decays["norm.weight"] == 0 and "head.weight" not in decays


def test_it_is_captured_again_after_a_change_of_members(text: Path) -> None:
    losses, done, _ = run(text, 12, loses_members_after=6)
    assert losses == run(text, 12)[0]
    assert (done.steps, done.captured) == (12, 12 - 2 * WARM_UP)


def test_a_resumed_run_is_the_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    saves = (f"--checkpoint-dir={tmp_path / 'saved'}", "--save-every=8")
    whole = run(text, 14, *saves)[0]
    max((tmp_path / "saved").glob("step_*")).unlink()  # it was lost after the 8th
    assert run(text, 14, *saves, "--resume")[0] == whole[8:]


@pytest.mark.parametrize("parallel", ["data", "auto"])
def test_two_workers_train_it_to_its_end(text: Path, tmp_path: Path, parallel: str) -> None:
    command = [
        *(sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--devices", "none"),
        *("--", sys.executable, "-m", "examples.gpt2", str(text), "--steps=4", *TINY[:-2]),
        *("--sample=20", "--print-every=2", f"--checkpoint-dir={tmp_path / 'saved'}"),
        *("--parallel", parallel, "--save-every=3"),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch: 1 step: 4, loss is " in done.stdout
    assert "4 steps, captured: 0 (the module is on the cpu)" in done.stdout
    if parallel == "auto":
        assert "data parallel" in done.stdout
        assert (tmp_path / "saved" / "divided" / ".metadata").exists()
    else:
        assert len(list((tmp_path / "saved").glob("step_*"))) == 2
