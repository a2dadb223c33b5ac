"""Compares Muster's store with a file: time from ``init_process_group()`` to the end of the first AllReduce.

Both are unmodified torch programs under ``muster run`` with mutual TLS, in turns. One uses ``env://``, which
is Muster's store; the other uses ``file://``, which needs no network.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from muster.bench.launches import MUSTER, environment, make_keys

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist

backend, method = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
value = torch.ones(1, device=device)
start = time.perf_counter()
dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)
dist.all_reduce(value)
assert value.item() == size
print("took", time.perf_counter() - start, flush=True)
dist.destroy_process_group()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes, or GPUs (2)")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="torch's backend (nccl)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="launches of each program (5)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures in turns, and returns the results: the time of each launch's slowest rank, in seconds."""
    took: dict[str, list[float]] = {"muster": [], "file": []}
    with tempfile.TemporaryDirectory(prefix="muster-torch-") as name:
        folder = Path(name)
        make_keys(folder)
        (folder / "program.py").write_text(PROGRAM)
        for turn in range(args.turns):
            for kind, method in (("muster", "env://"), ("file", f"file://{folder}/met-{turn}")):
                took[kind].append(_launch(args, folder, method))
                print(f"{kind:8} {took[kind][-1]:.3f} s", flush=True)
    medians = {kind: statistics.median(times) for kind, times in took.items()}
    ratio = medians["muster"] / medians["file"]
    seconds = [f"{medians[kind]:.3f} s" for kind in ("muster", "file")]
    print(f"median   {seconds[0]} by the store, {seconds[1]} by a file: {ratio:.3f}")
    return {"workers": args.workers, "backend": args.backend, "took_s": took, "ratio": ratio}


def _launch(args: argparse.Namespace, folder: Path, method: str) -> float:
    launcher = [*MUSTER, "run", "-n", str(args.workers), "--scheduler", "--tail", "all"]
    launcher += ["--config", str(folder / "config.json"), "--password-file", str(folder / "password")]
    launcher += ["--log-dir", str(folder / "logs")]
    program = [sys.executable, str(folder / "program.py"), args.backend, method]
    done = subprocess.run(
        [*launcher, "--", *program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    times = [float(each) for each in re.findall(r"took ([0-9.e-]+)", done.stdout)]
    if done.returncode or len(times) != args.workers:
        raise RuntimeError(
            f"the launch ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return max(times)
