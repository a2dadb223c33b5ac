"""A worker whose GPU fails its check, from ``muster.init()`` to ``muster admit``, with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, Scheduler, environment, scheduler

pytestmark = pytest.mark.system

WORKER = """
import json, sys
import muster
from muster.wire.messages import Device
from muster.worker import host
from muster.worker.gpu_health import check

found = json.dumps({"word": sys.argv[1], "reason": "7 words differ"})
host.choose_device = lambda settings: host.DeviceChoice(Device("cuda", 3), 0, 1)
check.find_spec = lambda name: name
check.begin_process = lambda ordinal: check.CheckProcess(
    [sys.executable, "-S", "-c", f"print('begun', flush=True); print({found!r})"]
)
with muster.init("tcp") as session:
    print("rank", session.rank)
"""


def work(sched: Scheduler, script: Path, word: str) -> subprocess.CompletedProcess[str]:
    """A worker whose check finds this."""
    env = environment(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM="1",
        MS_SCHED_PORT=str(sched.port),
        MS_NODE_ID="7",
        MS_GPU_CHECK="on",
        PYTHONPATH=str(ROOT),
    )
    command = [sys.executable, str(script), word]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)


def test_a_gpu_that_fails_is_kept_out_until_an_operator_admits_it(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with scheduler(MS_WORKER_NUM="1") as sched:
        first = work(sched, script, "failed")
        assert first.returncode == 1
        assert "muster: Node 7 on host " in first.stderr
        assert "cuda:3 has no place: its GPU " in first.stderr
        assert "has failed its check: 7 words differ. Reset or replace it" in first.stderr
        again = work(sched, script, "passed")
        assert again.returncode == 1 and "failed a check before, under node 7: 7 words" in again.stderr
        done = sched.command("admit", "7")
        assert "1 GPU may be used again" in done.stdout, done.stderr
        last = work(sched, script, "passed")
        assert (last.returncode, last.stdout) == (0, "rank 0\n"), last.stderr
        assert "the GPU has passed its check" in last.stderr


def test_a_gpu_that_could_not_be_checked_keeps_nobody_out(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with scheduler(MS_WORKER_NUM="1") as sched:
        done = work(sched, script, "unknown")
        assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr
        assert "the GPU could not be checked: 7 words differ" in done.stderr
