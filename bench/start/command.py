"""How long a GPU job takes from its start command to the end of its first AllReduce on all ranks.

Muster's side is ``muster run -n N --scheduler`` with mutual TLS, the scheduler's start included, and
CuPy arrays. The peers are ``torchrun`` and ``mpirun`` with CuPy, which encrypt nothing. All are measured in
turn, run by run. ``--cpu`` tries the same without GPUs (embedded TCP against torchrun with Gloo).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import SAFE_ENVIRONMENT
from muster.bench.gpu_machine import describe_nccl, driver_version
from muster.bench.start.formation import RUN_TIMEOUT_S
from muster.bench.start.formation import _summary as summary_of

JOB = str(Path(__file__).with_name("job.py"))
ROOT = str(Path(__file__).resolve().parents[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="workers, one per GPU (4)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="measured runs (3)")
    parser.add_argument("--warmups", type=int, default=1, metavar="N", help="runs before those (1)")
    parser.add_argument("--cpu", action="store_true", help="no GPUs; leaves mpirun out")
    parser.add_argument("--mpirun", default="mpirun", metavar="PROGRAM")
    parser.add_argument("--peers", nargs="*", choices=("torchrun", "mpirun"), default=["torchrun", "mpirun"])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: a run failed; shows the end of its output.
    """
    facts: dict[str, Any] = {"device": "cpu" if options.cpu else "gpu"}
    if not options.cpu:
        facts |= {"driver": driver_version(), **describe_nccl()}
    with tempfile.TemporaryDirectory(prefix="muster-start-") as scratch:
        directory = Path(scratch)
        commands = _commands(options, directory)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for index in range(options.warmups + options.runs):
            for name, command in commands.items():
                taken_s = _timed(command, directory / f"{name}-{index}", options)
                if index >= options.warmups:
                    times[name].append(taken_s)
    results: dict[str, Any] = {name: summary_of(taken) for name, taken in times.items()}
    ratios = {
        f"to_{name}": round(results["muster"]["median_s"] / results[name]["median_s"], 3)
        for name in commands
        if name != "muster"
    }
    return {"workers": options.workers, **facts, **results, "ratio": ratios}


def _commands(options: argparse.Namespace, directory: Path) -> dict[str, list[str]]:
    keys = directory / "keys"
    password = keys / "password"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "muster",
            "certs",
            "init",
            "--dir",
            str(keys),
            "--password-file",
            str(password),
        ],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    count = str(options.workers)
    devices = ["--devices", "none"] if options.cpu else []
    commands = {
        "muster": [
            *(sys.executable, "-m", "muster", "run", "-n", count, "--scheduler", "--tail", "none", *devices),
            *("--config", str(keys / "config.json"), "--password-file", str(password)),
            *("--", sys.executable, JOB, "muster"),
        ]
    }
    if "torchrun" in options.peers:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
        commands["torchrun"] = [*torchrun, "--master-port", "29613", JOB, "torchrun"]
    if "mpirun" in options.peers and not options.cpu:
        if shutil.which(options.mpirun) is None:
            raise RuntimeError(f"{options.mpirun} is not found; name it with --mpirun, or leave it out.")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        commands["mpirun"] = [options.mpirun, *root, "-n", count, sys.executable, JOB, "mpirun"]
    return commands


def _timed(command: Sequence[str], directory: Path, options: argparse.Namespace) -> float:
    """Seconds until the last rank's AllReduce was over: each writes the time of the common clock."""
    directory.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    env |= SAFE_ENVIRONMENT | {"OMP_NUM_THREADS": "1", "START_STAMPS": str(directory)}
    env["START_DEVICE"] = "cpu" if options.cpu else "gpu"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, env.get("PYTHONPATH", "")]))
    begun = time.monotonic()
    done = subprocess.run(
        command,
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    stamps = [float(path.read_text()) for path in directory.glob("rank-*")]
    if done.returncode or len(stamps) != options.workers:
        end = done.stdout.decode(errors="replace")[-4000:]
        raise RuntimeError(f"{command[0]} ended with code {done.returncode}:\n{end}")
    return max(stamps) - begun


def report(results: dict[str, Any], show: Callable[[str], None] = print) -> None:
    """Prints the results for people."""
    for name in ("muster", "torchrun", "mpirun"):
        if name in results:
            one = results[name]
            ratio = results["ratio"].get(f"to_{name}")
            note = f"; muster takes {ratio:.2f} times as long" if ratio else ""
            show(f"{name:8} {one['median_s']:.2f} s  ({one['min_s']:.2f} to {one['max_s']:.2f}){note}")
