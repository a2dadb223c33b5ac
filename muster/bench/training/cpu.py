"""Compares a training step on CPUs: DataParallel over encrypted TCP, and DistributedDataParallel over gloo.

    muster bench train-cpu --json results.json --check muster/ddp=0.87

All variants train the same net of 25 million parameters on the same batches in the same processes. Each
round runs every variant for some steps, in a new order. The gloo of DistributedDataParallel does not
encrypt. The variant ``alone`` does not communicate, and shows which share of a step is computation.

--check A/B=R ends with exit code 1 if the median ratio of A's speed to B's, over rounds, is below R.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from muster.bench.ranks import run_ranks
from muster.bench.report import bounds_of
from muster.communicators.base import Communicator

VARIANTS = {
    "muster": "DataParallel over tcp, encrypted",
    "ddp": "DistributedDataParallel over gloo, in plain text",
    "alone": "no parallel training",
}
_WIDTH, _LAYERS = 2048, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="torch's threads per rank (half of a rank's cores, at least 1)",
    )
    parser.add_argument("--batch", type=int, default=32, help="samples per rank (32)")
    parser.add_argument("--width", type=int, default=_WIDTH, help=f"width of the {_LAYERS} layers ({_WIDTH})")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each variant (15)")
    parser.add_argument("--steps", type=int, default=5, help="steps per turn (5)")
    parser.add_argument(
        "--check",
        type=bounds_of(VARIANTS, "muster/ddp=0.87"),
        nargs="+",
        default=[],
        metavar="A/B=R",
        help=f"exit with 1 if A is slower than R times B; variants: {', '.join(VARIANTS)}",
    )
    parser.set_defaults(cores=cores)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results."""
    options.threads = options.threads or max(1, options.cores // (2 * options.workers))
    with tempfile.TemporaryDirectory(prefix="muster-train-") as scratch:
        per_rank = run_ranks(options.workers, _measure, vars(options), scratch)
    rows = {}
    for name in VARIANTS:
        rounds = list(zip(*(result[name] for result in per_rank), strict=True))
        times = [max(wall for wall, _ in ranks) for ranks in rounds]
        cpu = [statistics.mean(cpu for _, cpu in ranks) for ranks in rounds]
        rows[name] = {
            "step_ms": statistics.median(times),
            "cpu_ms": statistics.median(cpu),
            "rounds_ms": times,
            "rounds_cpu_ms": cpu,
        }
    facts = {key: getattr(options, key) for key in ("workers", "threads", "batch", "width", "steps")}
    return {**facts, "parameters": _LAYERS * options.width * (options.width + 1), "results": rows}


def report(result: dict[str, Any]) -> None:
    """Prints the table."""
    for name, row in result["results"].items():
        cpu = f"{row['cpu_ms']:9.2f} ms of a core"
        print(f"{name:8} {row['step_ms']:9.2f} ms a step, {cpu}   {VARIANTS[name]}")
    ratio = _ratio(result["results"], "muster", "ddp")
    print(f"a step of muster takes {1 / ratio:.3f} times ddp's, round by round, in the median")


def check(result: dict[str, Any], bounds: list[tuple[str, str, float]]) -> int:
    """Compares speeds with the bounds of ``--check``; returns the exit code."""
    failed = False
    for one, other, least in bounds:
        ratio = _ratio(result["results"], one, other)
        failed |= ratio < least
        print(f"{one}/{other}: {ratio:.3f}, {'BELOW' if ratio < least else 'at least'} {least:g}", flush=True)
    return int(failed)


def _ratio(rows: dict[str, Any], one: str, other: str) -> float:
    """Returns the ratio of two variants' speeds: the median over the rounds."""
    pairs = zip(rows[one]["rounds_ms"], rows[other]["rounds_ms"], strict=True)
    return float(statistics.median(theirs / ours for ours, theirs in pairs))


# ---------------------------------------------------------------- in each process


def _measure(
    communicator: Communicator, given: dict[str, Any], scratch: str
) -> dict[str, list[tuple[float, float]]]:
    """Measures each variant's milliseconds per step, by round: of the clock, and of all threads' CPU time."""
    options, folder = argparse.Namespace(**given), Path(scratch)
    import torch
    from torch import distributed

    from muster.torch.data_parallel import DataParallel

    torch.set_num_threads(options.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=communicator.rank,
        world_size=communicator.world_size,
    )

    def net() -> Any:
        torch.manual_seed(0)
        layers = [(torch.nn.Linear(options.width, options.width), torch.nn.ReLU()) for _ in range(_LAYERS)]
        return torch.nn.Sequential(*(layer for pair in layers for layer in pair))

    models: dict[str, Any] = {
        "muster": DataParallel(net(), communicator=communicator),
        "ddp": torch.nn.parallel.DistributedDataParallel(net(), gradient_as_bucket_view=True),
        "alone": net(),
    }
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        for name, model in models.items()
    }
    samples = torch.randn(options.batch, options.width)

    def train(name: str, steps: int) -> tuple[float, float]:
        communicator.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizers[name].zero_grad()
            models[name](samples).square().mean().backward()
            optimizers[name].step()
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
        return wall_s / steps * 1e3, cpu_s / steps * 1e3

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for name in models:
        train(name, 3)
    order = list(models)
    for turn in range(options.rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(train(name, options.steps))
    distributed.destroy_process_group()
    return times
