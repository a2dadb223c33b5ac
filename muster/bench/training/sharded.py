"""Compares optimizer state of AdamW on every rank with sharded state (ZeRO-1): GPU memory and step time.

The model is a stack of square linear layers in float32. The results are the bytes that torch has allocated
between two steps, and the peak during a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from muster.bench.gpu_fleet import Fleet
from muster.bench.gpu_machine import describe_machine as describe_gpu
from muster.launch.command import count_gpus

KINDS = ("undivided", "sharded")
_STEPS, _BATCH = 10, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--gpus", type=int, default=max(1, count_gpus()), help="world size (all of this host)"
    )
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=1, metavar="N", help="let N ranks share a GPU, which is slow (1)"
    )
    parser.add_argument("--layers", type=int, default=16, help="linear layers (16)")
    parser.add_argument("--width", type=int, default=8192, help="inputs and outputs of each layer (8192)")


def measure(communicator: Any, *, kind: str, layers: int, width: int) -> dict[str, Any]:
    """Runs in each process of a fleet: trains some steps; returns bytes, and seconds per step."""
    import torch

    from muster.torch.data_parallel import DataParallel
    from muster.torch.sharded_optimizer import ShardedOptimizer

    torch.manual_seed(0)
    module: Any = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False, device="cuda") for _ in range(layers))
    )
    images = torch.randn(_BATCH, width, device="cuda")
    if kind == "sharded":
        optimizer: Any = ShardedOptimizer(
            module, communicator=communicator, make=lambda part: torch.optim.AdamW(part, lr=1e-4, fused=True)
        )
    else:
        module = DataParallel(module, communicator=communicator)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(_STEPS):
        communicator.barrier()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        optimizer.zero_grad()
        module(images).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    held: dict[str, Any] = {
        "parameters": layers * width * width,
        "allocated_bytes": torch.cuda.memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "step_s": statistics.median(times),
    }
    if kind == "sharded":
        held["state_bytes"], held["undivided_state_bytes"] = optimizer.state_bytes()
    return held


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures each kind in processes of its own and returns the results."""
    rows: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    for kind in KINDS:
        with Fleet(options.gpus, timeout_s=240, ranks_per_gpu=options.ranks_per_gpu) as fleet:
            machine = fleet.run(describe_gpu)[0]
            ranks = fleet.run(measure, kind=kind, layers=options.layers, width=options.width)
        rows[kind] = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return {"world_size": options.gpus, "ranks_per_gpu": options.ranks_per_gpu, "machine": machine, **rows}


def report(results: dict[str, Any], show: Callable[[str], None] = print) -> None:
    """Prints the results for people."""
    for kind in KINDS:
        row = results[kind]
        held, peak = row["allocated_bytes"] / 2**30, row["peak_bytes"] / 2**30
        show(
            f"{kind:10} {row['parameters'] / 1e6:,.0f} M parameters  {held:6.2f} GiB held,"
            f" {peak:6.2f} GiB at most  {row['step_s'] * 1e3:8.2f} ms a step"
        )
