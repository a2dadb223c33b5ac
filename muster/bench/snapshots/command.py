"""Tests snapshots in other ranks' memory: kills hosts on the CPU, or measures their cost on one GPU.

muster bench snapshots --json results.json         # CPU: kill 20 hosts, and compare the restored state
muster bench snapshots --gpu --json results.json   # one GPU: GPT-2 with and without snapshots
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from muster.bench.launches import stopwatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--gpu", action="store_true", help="measure steps on one GPU; default: kill hosts on the CPU")
    option("--kills", type=int, default=20, metavar="N", help="CPU: hosts to kill, for each kind (20)")
    option("--kinds", nargs="+", choices=("sharded", "parallel"), default=["sharded"], help="kinds of state")
    option("--loss", choices=("kill", "cut"), default="kill", help="kill a host's workers, or disconnect it")
    option("--namespaces", action="store_true", help="CPU: hosts are network namespaces; requires root")
    option("--every", type=int, default=10, metavar="N", help="steps between two snapshots (10)")
    option("--pace-ms", type=float, default=30, help="CPU: least time of a step in ms (30)")
    option("--seed", type=int, default=0, help="seed of the kills: which hosts, and when (0)")
    option("--batch", type=int, default=16, metavar="N", help="GPU: windows of 1,024 bytes per step (16)")
    option("--rounds", type=int, default=6, metavar="N", help="GPU: turns of each variant (6)")
    option("--seconds", type=float, default=5.0, metavar="S", help="GPU: length of a turn (5)")
    option("--mbytes-per-s", type=float, default=0.0, help="GPU: limit of sending and writing (0: none)")
    option("--checkpoints", type=int, default=4, metavar="N", help="GPU: turns with checkpoints (4; 0: none)")
    option("--tiny", action="store_true", help="try the script for GPUs on a CPU, with a small net")
    option("--keep", type=Path, metavar="DIR", help="keep logs and records there")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: the job did not behave; says how.
    """
    say = stopwatch()
    with tempfile.TemporaryDirectory(prefix="muster-snapshots-") as scratch:
        directory = Path(scratch)
        try:
            if options.gpu:
                from muster.bench.snapshots.gpu import measure as measure_on_gpu

                return measure_on_gpu(options, directory, say)
            from muster.bench.snapshots.cpu import measure

            return measure(options, directory, say)
        finally:
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                for path in (*directory.rglob("*.log"), *directory.rglob("*.jsonl")):
                    shutil.copy(path, options.keep / "-".join(path.relative_to(directory).parts))


def report(results: dict[str, Any]) -> None:
    """Prints the results for people."""
    for name, value in results.items():
        print(f"{name:12} {value.get('summary', value)}")
