"""Measures AllReduce on the GPUs of this host: Muster, torch.distributed, and NVIDIA's nccl-tests.

``muster bench allreduce --backend nccl`` runs this.

Bus bandwidth is defined as in nccl-tests: ``size / time * 2 * (n - 1) / n``, in place, in GB/s (10**9
bytes).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import SAFE_ENVIRONMENT, Fleet
from muster.bench.gpu_machine import describe_machine

GRADIENT_BYTES = 25_557_032 * 4
"""The size of ResNet-50's gradients in float32, with 1000 classes."""
SIZES = (4, 1024, 64 * 1024, 2**20, 16 * 2**20, GRADIENT_BYTES, 2**28, 2**30, 2**32)
_BURST = 200


KINDS = ("muster", "muster-cupy", "torch")


def measure(
    communicator: Any, *, sizes: tuple[int, ...], init_file: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Times in-place AllReduce of float32 by size; runs in each process of a fleet.

    All kinds take turns, round by round, so that other load of the machine affects all of them alike.

    Args:
        communicator: Muster's communicator.
        sizes: the sizes in bytes.
        init_file: the rendezvous file of torch.distributed's processes.
    """
    callers = {kind: _caller(communicator, kind, init_file) for kind in KINDS}
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for size in sizes:
        arrays = {kind: make(size // 4) for kind, (_, make, _, _) in callers.items()}
        iterations, rounds = (20, 5) if size >= 2**28 else (_BURST, 15)
        taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for turn in range(rounds):
            for kind in turned(KINDS, turn):
                taken[kind].append(_burst(callers[kind], arrays[kind], iterations))
        for kind, times in taken.items():
            issue_us, time_us = (statistics.median(each) * 1e6 for each in zip(*times, strict=True))
            all_us = [round(t * 1e6, 2) for _, t in times]
            rows[kind].append({"bytes": size, "issue_us": issue_us, "time_us": time_us, "rounds_us": all_us})
        del arrays
    import torch

    torch.distributed.destroy_process_group()
    return rows


def turned(kinds: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Rotates the order in each round, so that none always follows the same one."""
    start = turn % len(kinds)
    return kinds[start:] + kinds[:start]


def _burst(caller: tuple[Any, Any, Any, Any], array: Any, iterations: int) -> tuple[float, float]:
    """Runs a burst of calls; returns the seconds per call until all are issued, and until all are done."""
    call, _, synchronize, barrier = caller
    for _ in range(5):
        call(array)
    synchronize()
    barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        call(array)
    issued = time.perf_counter()
    synchronize()
    return (issued - begin) / iterations, (time.perf_counter() - begin) / iterations


def _caller(communicator: Any, kind: str, init_file: str) -> tuple[Any, Any, Any, Any]:
    from muster.communicators.reduce_ops import ReduceOp

    op = ReduceOp.SUM
    if kind == "muster-cupy":
        import cupy

        cupy.cuda.Device(communicator.device_index).use()
        all_reduce = communicator.all_reduce
        return (
            lambda array: all_reduce(array, array, op),
            lambda count: cupy.zeros(count, dtype=cupy.float32),
            cupy.cuda.Device().synchronize,
            communicator.barrier,
        )
    import torch

    def make(count: int) -> Any:
        return torch.zeros(count, device="cuda")

    if kind == "muster":
        all_reduce = communicator.all_reduce
        return lambda array: all_reduce(array, array, op), make, torch.cuda.synchronize, communicator.barrier
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{init_file}",
        rank=communicator.rank,
        world_size=communicator.world_size,
        device_id=torch.device("cuda", communicator.device_index),
    )
    return torch.distributed.all_reduce, make, torch.cuda.synchronize, communicator.barrier


def run_nccl_tests(binary: Path, gpus: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Runs ``all_reduce_perf`` in place for each size; returns the averages over its iterations."""
    rows = []
    for size in sizes:
        count = "20" if size >= 2**28 else "200"
        output = subprocess.run(
            [
                str(binary),
                "-b",
                str(size),
                "-e",
                str(size),
                "-g",
                str(gpus),
                "-n",
                count,
                "-w",
                "5",
                "-c",
                "0",
            ],
            env={**os.environ, **SAFE_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        ).stdout
        for line in output.splitlines():
            words = line.split()
            if words and words[0] == str(size):
                # size count type redop root | out-of-place: time algbw busbw wrong | in-place: the same
                rows.append({"bytes": size, "time_us": float(words[9])})
    return rows


def add_bus_bandwidth(rows: list[dict[str, Any]], gpus: int) -> list[dict[str, Any]]:
    """Adds ``bus_gb_s`` to rows of ``bytes`` and ``time_us``."""
    for row in rows:
        row["bus_gb_s"] = row["bytes"] / (row["time_us"] * 1e-6) * 2 * (gpus - 1) / gpus / 1e9
    return rows


def run(*, gpus: int, sizes: tuple[int, ...], nccl_tests: Path | None, json_path: Path | None) -> int:
    """Measures, prints and writes; returns the exit code.

    Args:
        gpus: the number of this host's GPUs to use.
        sizes: the sizes in bytes, multiples of 4.
        nccl_tests: the path of ``all_reduce_perf`` of nccl-tests; None to leave it out.
        json_path: the file for the results; None for no file.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as directory, Fleet(gpus, timeout_s=240) as fleet:
        machine = fleet.run(describe_machine)[0]
        per_rank = fleet.run(measure, sizes=sizes, init_file=f"{directory}/meet")
        for kind in KINDS:
            kinds[kind] = add_bus_bandwidth(_slowest([rows[kind] for rows in per_rank]), gpus)
    if nccl_tests:
        kinds["nccl-tests"] = add_bus_bandwidth(run_nccl_tests(nccl_tests, gpus, sizes), gpus)
    for kind, rows in kinds.items():
        for row in rows:
            issue = f"  issue {row['issue_us']:8.2f} us" if "issue_us" in row else ""
            print(
                f"{kind:12} {row['bytes']:>11} B  {row['time_us']:10.2f} us"
                f"  {row['bus_gb_s']:8.2f} GB/s{issue}"
            )
    if json_path:
        report = {
            "benchmark": "nccl-allreduce",
            "gpus": gpus,
            "machine": machine,
            "results": kinds,
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _slowest(per_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [max(rows, key=lambda row: float(row["time_us"])) for rows in zip(*per_rank, strict=True)]
