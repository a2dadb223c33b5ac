"""Measures what encryption costs NCCL's network plug-in, between two processes of this host.

It compares three variants over loopback: Muster's plug-in with encryption ("sealed"), the same plug-in
without ciphers ("plain", built for this benchmark alone), and bare TCP ("bare"). Each turn measures all
variants one after the other; medians are compared. The plug-in is compiled first, by a C compiler with
OpenSSL's headers.

  muster bench nccl-plugin --json FILE
  muster bench nccl-plugin --json FILE --check plain/bare=0.9 sealed/plain=0.8 sealed=10 latency=5

--check takes bounds: A/B=R, the least ratio of two bandwidths with the most connections up to 4; sealed=N,
the least bandwidth in GB/s with the most connections; and latency=N, the most microseconds that encryption
may add to a small message.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import muster.communicators.nccl
from muster.bench.allreduce.command import size_in_bytes

SOURCES = Path(muster.communicators.nccl.__file__).parent / "sealed"
PROGRAM = Path(__file__).with_name("loopback.c")
VARIANTS = ("bare", "plain", "sealed")
RATIO_CONNECTIONS = 4
_FLAGS = ("-std=c11", "-O2", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")
_LIBRARY = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now")
_BUILD_TIMEOUT_S = 120.0
_EXTRA_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--connections",
        type=int,
        nargs="+",
        default=(1, 2, 4, 8),
        metavar="N",
        help="connections of a communicator (1 2 4 8)",
    )
    parser.add_argument(
        "--bytes", type=size_in_bytes, default=4 << 20, metavar="BYTES", help="size of a large message (4M)"
    )
    parser.add_argument(
        "--small", type=size_in_bytes, default=1024, metavar="BYTES", help="size of a small message (1K)"
    )
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="number of turns (5)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="time per measurement (1)")
    parser.add_argument(
        "--check", nargs="+", default=[], metavar="BOUND", help="exit with 1 if a bound is missed"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results; GB/s in one direction, and microseconds one way."""
    with tempfile.TemporaryDirectory(prefix="muster-nccl-plugin-") as folder:
        programs = _build(Path(folder))
        bandwidths: dict[tuple[int, str], list[dict[str, Any]]] = {}
        latencies: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.turns):
            for variant in VARIANTS:
                found = _measure(
                    programs, "latency", variant, RATIO_CONNECTIONS, options.small, options.seconds / 2
                )
                latencies.setdefault(variant, []).append(found)
            for count in options.connections:
                for variant in VARIANTS:
                    found = _measure(programs, "bandwidth", variant, count, options.bytes, options.seconds)
                    bandwidths.setdefault((count, variant), []).append(found)
    conditions = {
        "bytes": options.bytes,
        "small": options.small,
        "turns": options.turns,
        "seconds": options.seconds,
    }
    return {
        **conditions,
        "plugin": bandwidths[options.connections[0], "sealed"][0]["plugin"],
        "bandwidth": [_bandwidth_row(*key, turns) for key, turns in bandwidths.items()],
        "latency": [_latency_row(variant, turns) for variant, turns in latencies.items()],
        "ratios": {
            str(count): {
                "plain/bare": _ratio(bandwidths, count, "plain", "bare"),
                "sealed/plain": _ratio(bandwidths, count, "sealed", "plain"),
            }
            for count in options.connections
        },
    }


def report(result: dict[str, Any]) -> None:
    """Prints the figures."""
    print(f"sealed by {result['plugin']}")
    print(f"messages of {result['bytes']:,} bytes, one way, GB/s (processor seconds a GB: sender, receiver)")
    for row in result["bandwidth"]:
        print(
            f"  {row['connections']:2} connections  {row['variant']:6}  {row['gb_per_s']:6.2f}"
            f"  ({row['sender_cpu_s_per_gb']:.3f}, {row['receiver_cpu_s_per_gb']:.3f})"
        )
    for count, ratios in result["ratios"].items():
        print(
            f"  {count:>2} connections  " + "  ".join(f"{name} {value:.2f}" for name, value in ratios.items())
        )
    for row in result["latency"]:
        print(
            f"  {result['small']:,} bytes  {row['variant']:6}  {row['us']:6.1f} us, p90 {row['p90_us']:.1f}"
        )


def check(result: dict[str, Any], bounds: Sequence[str]) -> bool:
    """Whether a bound is missed; prints which."""
    rows = {(row["connections"], row["variant"]): row["gb_per_s"] for row in result["bandwidth"]}
    latency = {row["variant"]: row["us"] for row in result["latency"]}
    compared = max((count for count, _ in rows if count <= RATIO_CONNECTIONS), default=0)
    missed = False
    for bound in bounds:
        name, _, text = bound.partition("=")
        if name == "latency":
            got, good = (
                latency["sealed"] - latency["plain"],
                latency["sealed"] - latency["plain"] <= float(text),
            )
        elif "/" in name:
            got = result["ratios"][str(compared)][name]
            good = got >= float(text)
        else:
            got = rows[max(count for count, _ in rows), name]
            good = got >= float(text)
        print(f"  {bound}: {got:.2f}, {'good' if good else 'MISSED'}")
        missed |= not good
    return missed


def _build(folder: Path) -> dict[str, Path]:
    """Compiles program and libraries.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler (cc, gcc or clang) is here; install one, and OpenSSL's headers")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    built = {"program": folder / "loopback", "plain": folder / "plain.so", "sealed": folder / "sealed.so"}
    libraries = ("-lcrypto", "-lpthread")
    _compile(compiler, built["program"], *_FLAGS, f"-I{SOURCES}", str(PROGRAM), "-ldl", "-lpthread")
    _compile(compiler, built["plain"], *_FLAGS, *_LIBRARY, "-DMUSTER_PLAIN_FOR_BENCH", *sources, *libraries)
    _compile(compiler, built["sealed"], *_FLAGS, *_LIBRARY, *sources, *libraries)
    return built


def _compile(compiler: str, output: Path, *arguments: str) -> None:
    command = [compiler, "-o", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the compiler ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _measure(
    programs: dict[str, Path], what: str, variant: str, connections: int, size: int, seconds: float
) -> dict[str, Any]:
    """Measures one figure of one variant.

    Raises:
        RuntimeError: the program failed.
    """
    library = variant if variant == "bare" else str(programs[variant])
    command = [str(programs["program"]), what, library, str(connections), str(size), str(seconds)]
    limit = seconds + _EXTRA_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} of {variant} failed with {done.returncode}: {done.stderr[-1000:]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _median(turns: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(turn[name] for turn in turns)


def _bandwidth_row(connections: int, variant: str, turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns a variant's median bandwidth, that of each turn, and the processor time per GB."""
    return {
        "connections": connections,
        "variant": variant,
        "gb_per_s": _median(turns, "gb_per_s"),
        "turns": [round(turn["gb_per_s"], 3) for turn in turns],
        **{
            f"{side}_cpu_s_per_gb": statistics.median(
                turn[f"{side}_cpu_s"] / turn["bytes"] * 1e9 for turn in turns
            )
            for side in ("sender", "receiver")
        },
    }


def _latency_row(variant: str, turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {
        "variant": variant,
        "us": _median(turns, "us"),
        "p90_us": _median(turns, "p90_us"),
        "turns": [round(turn["us"], 2) for turn in turns],
    }


def _ratio(
    measured: dict[tuple[int, str], list[dict[str, Any]]], connections: int, one: str, other: str
) -> float:
    """Returns the ratio of two variants' medians, since the two figures of a turn are not simultaneous."""
    return _median(measured[connections, one], "gb_per_s") / _median(measured[connections, other], "gb_per_s")
