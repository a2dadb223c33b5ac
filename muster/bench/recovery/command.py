"""Kills workers and schedulers of a job, and measures the time from each loss to the next good step.

The processes are real, and use mutual TLS.

muster bench recovery --json results.json                 # CPU: kill 20 workers and 20 schedulers
muster bench recovery --backend nccl --json results.json  # all GPUs: ResNet-50 with captured steps
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from muster.bench.launches import stopwatch
from muster.launch.command import count_gpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--backend", choices=("tcp", "nccl"), default="tcp", help="tcp: on the CPU; nccl: on GPUs (tcp)")
    option("--workers", type=int, default=4, metavar="N", help="workers of the job on the CPU (4)")
    all_gpus = max(2, count_gpus())
    option("--gpus", type=int, default=all_gpus, metavar="N", help="workers of the job on GPUs (one on each)")
    option(
        "--ranks-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="let N workers share a GPU, to try it with fewer GPUs; the times are then meaningless (1)",
    )
    option("--kills", type=int, metavar="N", help="workers to kill (20, or 5 on GPUs)")
    option("--scheduler-kills", type=int, default=20, metavar="N", help="tcp: schedulers to kill (20)")
    option("--chaos-s", type=float, default=0, metavar="S", help="tcp: then kill at random for S seconds (0)")
    option("--epochs", type=int, default=0, metavar="N", help="tcp: epochs (10 per kill, at least 20)")
    option(
        "--pace-ms", type=float, default=20, help="tcp: least time of a step in ms, until the last kill (20)"
    )
    option("--images", type=int, default=32, metavar="N", help="images per GPU and step (32)")
    option("--seed", type=int, default=0, help="seed of the kills: which process, and when (0)")
    option("--limit-s", type=float, default=540, help="stop and report after this many seconds (540)")
    option("--keep", type=Path, metavar="DIR", help="keep logs and records there")
    option("--tiny", action="store_true", help="try the script for GPUs on a CPU, with a small net")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: the job did not behave; says how.
    """
    say = stopwatch()

    if options.kills is None:
        options.kills = 5 if options.backend == "nccl" else 20
    with tempfile.TemporaryDirectory(prefix="muster-recovery-") as scratch:
        directory = Path(scratch)
        try:
            if options.backend == "nccl":
                return _on_gpus(options, directory, say)
            from muster.bench.recovery.cpu import measure

            return measure(options, directory, say)
        finally:
            if options.keep is not None:
                _keep(directory, options.keep)


def _on_gpus(options: argparse.Namespace, directory: Path, say: Any) -> dict[str, Any]:
    from muster.bench.gpu_fleet import require_gpus
    from muster.bench.recovery.gpu import measure

    if not options.tiny:
        require_gpus(-(-options.gpus // options.ranks_per_gpu))
    results = measure(options, directory, say)
    if not options.tiny:
        from muster.bench.gpu_machine import describe_machine

        results["gpu_machine"] = describe_machine()
    return results


def _keep(directory: Path, target: Path) -> None:
    """Copies logs and records, but no keys."""
    target.mkdir(parents=True, exist_ok=True)
    for path in (*directory.rglob("*.log"), *directory.rglob("*.jsonl")):
        shutil.copy(path, target / "-".join(path.relative_to(directory).parts))


def report(results: dict[str, Any]) -> None:
    """Prints the results for people."""
    for name, value in results.get("summary", {}).items():
        print(f"{name:28} {value}")
    if "values" in results:
        print(f"{'values':28} {results['values']}")
