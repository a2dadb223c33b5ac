"""Describes the machine of a figure, computes medians, and writes results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import ssl
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("muster-rendezvous", "numpy", "grpcio", "cryptography", "torch", "mpi4py")


def describe_machine() -> dict[str, Any]:
    """Returns facts of this host and of the libraries, by which a figure can be understood later."""
    versions = {name: version for name in _PACKAGES if (version := package_version(name))}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "packages": versions,
    }


def cpu_model() -> str:
    """Returns the processor's name, or the architecture if the system does not name the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def package_version(package: str) -> str:
    """Returns the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def summary(samples: Sequence[float]) -> dict[str, float | int]:
    """Returns median, minimum, 90th percentile and number of samples, in the samples' unit."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "samples": len(ordered),
    }


def bounds_of(variants: Collection[str], example: str) -> Callable[[str], tuple[str, str, float]]:
    """Returns a parser of ``--check`` bounds, ``A/B=R``: two variants, and the least ratio of their speeds.

    Args:
        variants: the names of the variants.
        example: a valid bound, for the error message.
    """

    def bound(text: str) -> tuple[str, str, float]:
        names, _, least = text.partition("=")
        one, _, other = names.partition("/")
        with contextlib.suppress(ValueError):
            if {one, other} <= set(variants):
                return one, other, float(least)
        raise argparse.ArgumentTypeError(f"{text!r} is no bound, as {example} is")

    return bound


def write(path: Path, name: str, results: Mapping[str, Any]) -> None:
    """Writes results as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps({"benchmark": name, **results}, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
