"""The stacks of a torch program beside its agent: asked for by signal, in Python, with the lock held in C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from tests.launch.launching import environment, place
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

SCRIPT = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist

signal.signal(signal.SIGUSR1, lambda *_: open(f"usr1-{rank}", "w").close())
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))

def hangs_with_the_lock():
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()

def hangs_in_python():
    while True:
        time.sleep(0.01)

open(f"ready-{rank}", "w").close()
if rank == 1:
    hangs_with_the_lock()
if rank == 2:
    hangs_in_python()
dist.all_reduce(torch.ones(4))
"""


def test_each_rank_says_where_it_hangs_and_its_own_handlers_go_on(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        script = here.script(SCRIPT)
        launch = here.start("--scheduler", "-n", "3", command=(sys.executable, script))
        for rank in range(3):
            wait_for((tmp_path / f"ready-{rank}").exists, lambda: f"it ended with {launch.poll()}")
        told = subprocess.run(
            [sys.executable, "-m", "muster", "stacks"], cwd=tmp_path, env=environment(MS_SCHED_PORT=""),
            capture_output=True, text=True, timeout=100, check=True,
        ).stdout  # fmt: skip
        answers = told.split("---- rank ")[1:]
        for answer, where in zip(
            answers, ("in all_reduce", "in hangs_with_the_lock", "in hangs_in_python"), strict=True
        ):
            assert where in answer.partition("kernel:")[0]
        found = re.search(r"program, pid (\d+), asked by its agent", answers[2])
        assert found is not None
        os.kill(int(found[1]), signal.SIGUSR1)
        wait_for((tmp_path / "usr1-2").exists)
        assert launch.poll() is None
