"""Tests whether a launch names the worker that failed first: each way to fail, on each rank, many times.

A job of a few CPU workers trains in a loop that does not know Muster's errors. One rank fails within a step:
it raises, calls ``sys.exit(3)``, is killed by SIGKILL, calls ``os._exit(4)``, or runs out of memory in its
backward pass. The launch must end with that worker's exit code, name the worker first, show the end of its
log, and not show the consequent failures of the others as the cause. The exit code is 1 unless all launches
do so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.bench.launches import MUSTER, environment

SCRIPT = """\
import os, signal, sys
import numpy as np
import muster
from muster.training.gradient_reducer import GradientReducer

WAY, RANK, STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def fail():
    if WAY == "raise":
        raise ValueError("a planned failure")
    if WAY == "exit":
        sys.exit(3)
    if WAY == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if WAY == "_exit":
        os._exit(4)


def backward(gradients, step, ready):
    for name in reversed(list(gradients)):
        if WAY == "memory" and step == STEP and session.rank == RANK and name == "b":
            raise MemoryError("a planned lack of memory")
        ready(name, gradients[name])


session = muster.init()
gradients = {name: np.ones(1000, np.float32) for name in "abc"}
reducer = GradientReducer(session, gradients)
for step in range(100_000):
    if step == STEP and session.rank == RANK:
        fail()
    backward(gradients, step, reducer.ready)
    reducer.finish()
muster.release()
"""


@dataclass(frozen=True)
class Way:
    """One way to fail: the expected exit code of the launch, and words that its output must contain."""

    code: int
    words: str


WAYS = {
    "raise": Way(1, "ValueError: a planned failure"),
    "exit": Way(3, "exited with code 3"),
    "kill": Way(128 + 9, "was ended by SIGKILL"),
    "_exit": Way(4, "exited with code 4"),
    "memory": Way(1, "MemoryError: a planned lack of memory"),
}
LIMIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=3, help="workers of each job (3)")
    parser.add_argument(
        "--runs", type=int, default=20, help="launches for each way to fail and each rank (20)"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help=f"ways to fail ({','.join(WAYS)})")


def run(options: argparse.Namespace) -> dict[str, Any] | int:
    """Runs all launches; returns the figures, or 1 if a launch blamed the wrong worker."""
    results = []
    for way in options.ways.split(","):
        if way not in WAYS:
            raise RuntimeError(f"there is no way to fail called {way!r}; there are {', '.join(WAYS)}")
        for rank in range(options.workers):
            faults = [launch(way, rank, workers=options.workers, step=3 + n) for n in range(options.runs)]
            wrong = [fault for fault in faults if fault]
            results.append({"way": way, "rank": rank, "runs": options.runs, "wrong": len(wrong)})
            print(f"{way:7} rank {rank}: {options.runs - len(wrong)} of {options.runs} right", flush=True)
            if wrong:
                print(wrong[0], file=sys.stderr)
    return 1 if any(each["wrong"] for each in results) else {"workers": options.workers, "results": results}


def launch(way: str, rank: int, *, workers: int, step: int) -> str:
    """Runs one launch in which ``rank`` fails.

    Args:
        way: one of :data:`WAYS`.
        rank: the rank that fails.
        workers: the number of workers.
        step: the step in which it fails, from 0.

    Returns:
        What was wrong with the blame, with the launch's output; empty if nothing was.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "script.py").write_text(SCRIPT)
        launcher = [*MUSTER, "run", "-n", str(workers), "--scheduler"]
        done = subprocess.run(
            [*launcher, "--", sys.executable, "script.py", way, str(rank), str(step)],
            cwd=directory,
            env=environment(MS_BACKEND="tcp", CUDA_VISIBLE_DEVICES=""),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    fault = judge(WAYS[way], rank, workers, done.returncode, done.stderr)
    return f"{way} on rank {rank}: {fault}\n{done.stderr}" if fault else ""


def judge(way: Way, rank: int, workers: int, code: int, said: str) -> str:
    """Returns what is wrong with a launch's last output; empty if nothing is."""
    if code != way.code:
        return f"the launch ended with {code} instead of {way.code}"
    heads = [line for line in said.splitlines() if "; the end of " in line]
    if len(heads) != 1 or not heads[0].startswith(f"muster: worker {rank} ("):
        return f"worker {rank} is not the one that is blamed"
    blame = said[said.index(heads[0]) :]
    shown = [line for line in blame.splitlines()[1:] if line.startswith("    ")]
    if any(word in line for line in shown for word in ("PeerLostError", "MembershipChanged")):
        return "what others failed with is shown as the cause"
    if way.words not in blame:
        return f"{way.words!r} is not shown"
    others = [line for line in blame.splitlines() if line.startswith("muster: worker ")][1:]
    if len(others) != workers - 1:
        return f"there are {len(others)} lines for {workers - 1} others"
    return ""
