"""What every figure carries: the machine, the versions, the date; and the arithmetic of medians."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import ssl
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("muster", "numpy", "grpcio", "cryptography", "torch", "mpi4py")


def describe_machine() -> dict[str, Any]:
    """Facts of this host and of the libraries at work, so that a figure can be understood later."""
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
    """The processor's name, or the architecture where it tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def package_version(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def summary(samples: Sequence[float]) -> dict[str, float | int]:
    """Median, least, 90th percentile and count of samples; in the samples' unit."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "samples": len(ordered),
    }


def write(path: Path, name: str, results: Mapping[str, Any]) -> None:
    """Writes results as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps({"benchmark": name, **results}, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
