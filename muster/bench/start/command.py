"""Measures the time of a GPU job from its start command to the end of its first AllReduce on all ranks.

Muster's command is ``muster run -n N --scheduler``, with mutual TLS and CuPy arrays; its time includes the
start of the scheduler. It is compared with ``torchrun`` and with ``mpirun`` and CuPy, which do not encrypt.
Runs of all are made in turns. ``--cpu`` does the same without GPUs (embedded TCP, and torchrun with Gloo).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import SAFE_ENVIRONMENT
from muster.bench.gpu_machine import describe_nccl
from muster.bench.launches import MUSTER, environment, in_turns, make_keys, run_to_end, show_times
from muster.launch.command import count_gpus
from muster.worker.host import driver_version

JOB = str(Path(__file__).with_name("job.py"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--workers",
        type=int,
        default=max(2, count_gpus()),
        metavar="N",
        help="workers (one per GPU, at least 2)",
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="measured runs (3)")
    parser.add_argument(
        "--warmups", type=int, default=1, metavar="N", help="runs before the measured ones (1)"
    )
    parser.add_argument("--cpu", action="store_true", help="use no GPUs, and leave out mpirun")
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
        commands = launch_commands(options, directory)
        results = in_turns(
            commands,
            lambda name, index: timed_launch(commands[name], directory / f"{name}-{index}", options),
            warmups=options.warmups,
            runs=options.runs,
        )
    ratios = {
        f"to_{name}": round(results["muster"]["median_s"] / results[name]["median_s"], 3)
        for name in commands
        if name != "muster"
    }
    return {"workers": options.workers, **facts, **results, "ratio": ratios}


def launch_commands(options: argparse.Namespace, directory: Path) -> dict[str, list[str]]:
    """Returns the command lines of the launchers that are compared, by name."""
    config, password = make_keys(directory / "keys")
    count = str(options.workers)
    devices = ["--devices", "none"] if options.cpu else []
    commands = {
        "muster": [
            *(*MUSTER, "run", "-n", count, "--scheduler", "--tail", "none", *devices),
            *("--config", str(config), "--password-file", str(password)),
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


def timed_launch(command: Sequence[str], directory: Path, options: argparse.Namespace) -> float:
    """Launches once; returns the seconds until the last rank's AllReduce was over.

    Raises:
        RuntimeError: the launch failed, or not all ranks have written their times.
    """
    directory.mkdir()
    own = {"START_STAMPS": str(directory), "START_DEVICE": "cpu" if options.cpu else "gpu"}
    begun = time.monotonic()
    run_to_end(command, directory, environment(OMP_NUM_THREADS="1", **SAFE_ENVIRONMENT, **own))
    stamps = [float(path.read_text()) for path in directory.glob("rank-*")]
    if len(stamps) != options.workers:
        raise RuntimeError(f"{command[0]} ended well, with {len(stamps)} of {options.workers} ranks.")
    return max(stamps) - begun


def report(results: dict[str, Any], show: Callable[[str], None] = print) -> None:
    """Prints the results for people."""
    show_times(results, {name.removeprefix("to_"): each for name, each in results["ratio"].items()}, show)
