"""Measures the time of an AllReduce by size, between processes of this machine, on the CPU or on its GPUs.

A round begins with a barrier, and its time is that of the slowest rank; the result is the median. Sums are
checked. The backend tcp runs with mutual TLS unless --plain is given.

  muster bench allreduce --workers 2 --json allreduce.json
  muster bench allreduce --peer gloo --peer-python /path/to/python-with-torch
  muster bench allreduce --backend nccl --workers 4 --nccl-tests build/all_reduce_perf --json nccl.json

With --backend nccl there is one worker per GPU. The same run measures torch.distributed, and with
--nccl-tests NVIDIA's nccl-tests. Bus bandwidth is then given as nccl-tests defines it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muster.bench.ranks import run_ranks
from muster.bench.report import summary
from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.wire.variables import TABLE

SIZES = (4096, 1 << 20, 64 << 20)
_WARMUPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--backend", type=_backend, choices=("tcp", "nccl"), default="tcp", help="what to measure (tcp)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (2; nccl: 4)")
    parser.add_argument(
        "--sizes",
        type=size_in_bytes,
        nargs="+",
        metavar="BYTES",
        help="buffer sizes, such as 4096, 4K or 64M (4K 1M 64M; nccl: 4 bytes to 4 GiB)",
    )
    parser.add_argument("--plain", action="store_true", help="tcp without TLS, to see what TLS costs")
    parser.add_argument("--tls-only", action="store_true", help="tcp with data in TLS's own records")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="number of turns (3)")
    parser.add_argument("--peer", choices=("gloo",), help="also measure torch's gloo, in turns")
    parser.add_argument(
        "--peer-python", default=sys.executable, metavar="PROGRAM", help="a Python that has torch"
    )
    parser.add_argument(
        "--nccl-tests", type=Path, metavar="PROGRAM", help="also run NVIDIA's all_reduce_perf"
    )


def run(options: argparse.Namespace) -> int | dict[str, Any]:
    """Measures and returns the results; on GPUs it prints and writes them, and returns the exit code."""
    if options.backend == "nccl":
        return _on_gpus(options)
    options.workers, options.sizes = options.workers or 2, options.sizes or SIZES
    name = options.backend + ("-plain" if options.plain else "-tls-only" if options.tls_only else "")
    runs: dict[str, Callable[[], dict[int, list[float]]]] = {name: lambda: measure_ours(options)}
    if options.peer:
        runs["torch-gloo"] = lambda: measure_peer(options)
    samples: dict[str, dict[int, list[float]]] = {who: {size: [] for size in options.sizes} for who in runs}
    for turn in range(options.turns):
        for who, measure in runs.items():
            print(f"turn {turn + 1} of {options.turns}: {who}", file=sys.stderr, flush=True)
            for size, seconds in measure().items():
                samples[who][size] += seconds
    rows = [
        _row(who, size, seconds, options.workers) for who in runs for size, seconds in samples[who].items()
    ]
    conditions = {"workers": options.workers, "turns": options.turns, "dtype": "float32", "op": "sum"}
    return {**conditions, "rows": rows}


def _on_gpus(options: argparse.Namespace) -> int:
    from muster.bench.allreduce import nccl as nccl_allreduce

    if options.peer or options.plain or options.tls_only:
        raise RuntimeError("--peer, --plain and --tls-only are for the CPU; leave them out with nccl.")
    return nccl_allreduce.run(
        gpus=options.workers or 4,
        sizes=tuple(options.sizes or nccl_allreduce.SIZES),
        nccl_tests=options.nccl_tests,
        json_path=options.json,
    )


def rounds_of(size: int) -> int:
    """Returns the number of rounds of a size, from 8 for large sizes to 300 for small ones."""
    return max(8, min(300, (256 << 20) // max(1, size)))


def _backend(text: str) -> str:
    removed = TABLE["MS_BACKEND"].removed.get(text)
    if removed:
        raise argparse.ArgumentTypeError(removed)
    return text


def size_in_bytes(text: str) -> int:
    """Parses a number of bytes of a command line, such as ``64M``; an argument type for argparse.

    Raises:
        argparse.ArgumentTypeError: the text is not a size divisible by 4 and up to 4G.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.isdigit() or int(number) * unit % 4 or not 0 < int(number) * unit <= 4 << 30:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: bytes divisible by 4, up to 4G, as 4096 or 64M"
        )
    return int(number) * unit


def _row(who: str, size: int, seconds: Sequence[float], workers: int) -> dict[str, Any]:
    row: dict[str, Any] = {"backend": who, "bytes": size}
    row.update({f"{key}_ms": value * 1e3 for key, value in summary(seconds).items() if key != "samples"})
    row["bus_gb_per_s"] = 2 * (workers - 1) / workers * size / (row["median_ms"] * 1e6)
    row["samples"] = len(seconds)
    return row


def report(results: dict[str, Any]) -> None:
    """Prints the times."""
    print(f"{'backend':12} {'bytes':>10} {'median ms':>10} {'min ms':>9} {'p90 ms':>9} {'bus GB/s':>9}")
    for row in results["rows"]:
        times = f"{row['median_ms']:10.3f} {row['min_ms']:9.3f} {row['p90_ms']:9.3f}"
        print(f"{row['backend']:12} {row['bytes']:10} {times} {row['bus_gb_per_s']:9.2f}")


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the time of each round, which is that of its slowest rank."""
    return [max(times) for times in zip(*per_rank, strict=True)]


# ---------------------------------------------------------------- ours


def measure_ours(options: argparse.Namespace) -> dict[int, list[float]]:
    """Runs Muster's workers once; returns the seconds of each round, by size.

    Raises:
        RuntimeError: a worker failed.
    """
    results = run_ranks(
        options.workers,
        _measure_all,
        tuple(options.sizes),
        tls=not options.plain,
        seal=not options.tls_only,
    )
    return {size: slowest([result[size] for result in results]) for size in options.sizes}


def _measure_all(communicator: Communicator, sizes: Sequence[int]) -> dict[int, list[float]]:
    return {size: _measure(communicator, size) for size in sizes}


def _measure(communicator: Communicator, size: int) -> list[float]:
    import numpy as np

    array = np.empty(size // 4, np.float32)
    wanted = communicator.world_size * (communicator.world_size + 1) / 2
    samples = []
    for _ in range(rounds_of(size) + _WARMUPS):
        array.fill(communicator.rank + 1)
        communicator.barrier()
        start = time.perf_counter()
        communicator.all_reduce(array, array, ReduceOp.SUM)
        samples.append(time.perf_counter() - start)
        if not bool((array == wanted).all()):
            raise RuntimeError(f"the sum of {size} bytes is wrong")
    return samples[_WARMUPS:]


# ---------------------------------------------------------------- the peer


def measure_peer(options: argparse.Namespace) -> dict[int, list[float]]:
    """Runs torch's gloo once, with the same processes, rounds and sizes; returns the seconds of each round.

    Raises:
        RuntimeError: it failed, or the peer's Python has no torch.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("peer.py"))
    plans = [f"{size}:{rounds_of(size)}" for size in options.sizes]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [options.peer_python, script, str(rank), str(options.workers), str(port), *plans],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(options.workers)
    ]
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            words = errors.strip().splitlines()
            raise RuntimeError(f"torch's gloo failed: {words[-1] if words else 'it wrote nothing'}")
    results = [json.loads(out.splitlines()[-1])["samples"] for out, _ in outputs]
    return {size: slowest([result[str(size)] for result in results]) for size in options.sizes}
