"""AllReduce of torch.distributed on CPUs: the encrypted backend "muster" and Gloo in plain text, in turns.

The same processes have a group of each backend. Each turn measures one group after the other. A round begins
with a barrier, and its time is that of the slowest rank; the result is the median. Sums are checked.

  muster bench torch-groups --json torch-groups.json --check 4K=2 1M=1.3 16M=1.3
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from muster.bench.allreduce.command import rounds_of, size_in_bytes, slowest
from muster.bench.launches import by_pipes, make_keys, receive
from muster.bench.report import summary
from muster.programs import assignment, registration

SIZES = (4096, 1 << 20, 16 << 20)
BACKENDS = ("gloo", "muster")
_WARMUPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument(
        "--sizes",
        type=size_in_bytes,
        nargs="+",
        default=SIZES,
        metavar="BYTES",
        help="buffer sizes (4K 1M 16M)",
    )
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="number of turns (3)")
    parser.add_argument(
        "--check",
        nargs="+",
        default=[],
        metavar="SIZE=RATIO",
        help='exit with 1 if "muster" takes more than RATIO times as long as Gloo',
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results."""
    samples = measure(options.workers, tuple(options.sizes), options.turns)
    rows, ratios = [], {}
    for size in options.sizes:
        medians = {}
        for backend in BACKENDS:
            found = summary(samples[backend, size])
            medians[backend] = found["median"]
            row = {"backend": backend, "bytes": size, "samples": len(samples[backend, size])}
            rows.append(row | {f"{key}_ms": found[key] * 1e3 for key in ("median", "min", "p90")})
        ratios[size] = medians["muster"] / medians["gloo"]
    conditions = {"workers": options.workers, "turns": options.turns, "dtype": "float32", "op": "sum"}
    return {**conditions, "rows": rows, "ratios": {str(size): ratio for size, ratio in ratios.items()}}


def check(results: dict[str, Any], bounds: list[str]) -> int:
    """Returns 1, and prints why, if the backend "muster" takes longer than these bounds allow."""
    limits = {str(size_in_bytes(text.split("=")[0])): float(text.split("=")[1]) for text in bounds}
    over = {
        size: results["ratios"][size] for size, limit in limits.items() if results["ratios"][size] > limit
    }
    for size, ratio in over.items():
        print(f"{size} bytes take {ratio:.2f} times as long as with Gloo; {limits[size]:g} is the limit.")
    return 1 if over else 0


def report(results: dict[str, Any]) -> None:
    """Prints the times and their ratios."""
    rows, ratios = results["rows"], results["ratios"]
    print(f"{'backend':8} {'bytes':>10} {'median ms':>10} {'min ms':>9} {'p90 ms':>9} {'to Gloo':>8}")
    for row in rows:
        ratio = f"{ratios[str(row['bytes'])]:8.2f}" if row["backend"] == "muster" else ""
        times = f"{row['median_ms']:10.3f} {row['min_ms']:9.3f} {row['p90_ms']:9.3f}"
        print(f"{row['backend']:8} {row['bytes']:10} {times} {ratio}")


def measure(workers: int, sizes: tuple[int, ...], turns: int) -> dict[tuple[str, int], list[float]]:
    """Measures the seconds of each round, by backend and size.

    Raises:
        RuntimeError: a process failed.
    """
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as scratch:
        folder = Path(scratch)
        make_keys(folder)
        with by_pipes(workers, _rank, (workers, folder, os.urandom(128)), sizes, turns) as pipes:
            found = [receive(pipe) for pipe in pipes]
    return {key: slowest([each[key] for each in found]) for key in found[0]}


def _rank(
    rank: int, pipe: Connection, group: tuple[int, Path, bytes], sizes: tuple[int, ...], turns: int
) -> None:
    try:
        pipe.send(_measure_all(rank, group, sizes, turns))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _measure_all(
    rank: int, group: tuple[int, Path, bytes], sizes: tuple[int, ...], turns: int
) -> dict[tuple[str, int], list[float]]:
    import torch.distributed as dist

    workers, folder, unique_id = group
    os.environ["MS_CLIENT_PASSWORD_FILE"] = str(folder / "password")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    members = tuple(assignment.HeldPlace(str(each), "here", "here") for each in range(workers))
    handover = assignment.Handover(
        "bench", 1, rank, members, "127.0.0.1", str(folder / "config.json"), False, (unique_id,)
    )
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent.set(assignment.KEY, handover.encode())
    os.environ["MUSTER_STORE"] = f"127.0.0.1:{agent.port}"
    registration.register("")
    store = dist.FileStore(str(folder / "meeting"), workers)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timeout)
    groups = {name: dist.new_group(backend=name, timeout=timeout) for name in BACKENDS}
    samples: dict[tuple[str, int], list[float]] = {(name, size): [] for name in BACKENDS for size in sizes}
    for _ in range(turns):
        for size in sizes:
            for name, group in groups.items():
                samples[name, size] += _measure(group, size)
    dist.destroy_process_group()
    return samples


def _measure(group: Any, size: int) -> list[float]:
    import torch
    import torch.distributed as dist

    wanted = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    tensor = torch.empty(size // 4)
    samples = []
    for _ in range(rounds_of(size) + _WARMUPS):
        tensor.fill_(dist.get_rank() + 1)
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        samples.append(time.perf_counter() - start)
        if not bool((tensor == wanted).all()):
            raise RuntimeError(f"the sum of {size} bytes is wrong")
    return samples[_WARMUPS:]
