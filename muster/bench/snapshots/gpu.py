"""Measures what snapshots cost a step on one GPU: examples/gpt2.py with and without them, in turns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.bench.launches import MUSTER, environment
from muster.bench.snapshots.keeper import write_keys
from muster.bench.training import gpt2

LIMIT_S = 500.0


def measure(options: argparse.Namespace, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains on one GPU, with a second process that keeps the copies.

    Raises:
        RuntimeError: the training ended with an error.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_keys(directory)
    gpt2.write_text(directory / "text", size_bytes=1 << 20)
    command = [
        *(*MUSTER, "run", "-n", "1", "--scheduler", "--tail", "all", "--log-dir", str(directory / "logs")),
        *("--", sys.executable, "-m", "muster.bench.snapshots.gpt2", "--directory", str(directory)),
        *("--every", str(options.every), "--batch", str(options.batch), "--rounds", str(options.rounds)),
        *("--seconds", str(options.seconds), "--mbytes-per-s", str(options.mbytes_per_s)),
        *("--checkpoints", str(options.checkpoints)),
        *(("--tiny",) if options.tiny else ()),
    ]
    more = {"CUDA_VISIBLE_DEVICES": ""} if options.tiny else {}
    done = subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    result = directory / "result.json"
    if done.returncode or not result.exists():
        raise RuntimeError(
            f"the training ended with code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    found: dict[str, Any] = json.loads(result.read_text())
    say(f"snapshots every {options.every} steps cost {found['cost']:+.2%} of a step")
    if options.checkpoints:
        durable = found["checkpoints"]
        held = durable["held_up_s"]
        say(
            f"a checkpoint beside the training holds it up {held['beside']:.2f} s, and costs"
            f" {durable['cost_while_written']:+.2%} of a step while it is written; else it waits"
            f" {held['waiting']:.2f} s"
        )
    if not options.tiny:
        from muster.bench.gpu_machine import describe_machine

        found["gpu_machine"] = describe_machine()
    return {"gpt2": found}
