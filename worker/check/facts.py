"""What must or should agree across the ranks of a job: versions, NCCL's settings, machines.

:func:`join_facts` is on every worker's way into a job and costs next to nothing; :func:`all_facts` is for
``muster check`` and looks everything up. Neither imports torch, CuPy or NumPy.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.version import __version__
from muster.worker.control.compatibility import MUST_AGREE_LIBRARIES, MUST_AGREE_NCCL, SOFT

PROJECTS = {
    **{name: (name,) for name in ("numpy", "grpcio", "protobuf", "cryptography", "torch", "nccl4py")},
    "cupy": ("cupy_cuda13x", "cupy_cuda12x", "cupy"),
    "nccl": ("nvidia_nccl_cu13", "nvidia_nccl_cu12"),
    "cuda": ("nvidia_cuda_runtime", "nvidia_cuda_runtime_cu13", "nvidia_cuda_runtime_cu12"),
}
"""Of each package that is compared, the projects that may install it; the first one found counts."""
_INSTALLED = re.compile(r"([\w.]+)-([\w.+!]{1,64})(?:-.*)?\.(?:dist|egg)-info", re.ASCII)
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.\d[\d.]*)\s", re.M)


def join_facts(
    backend: str,
    plane: Any,
    env: Mapping[str, str],
    root: Path = Path("/"),
    path: Iterable[str] | None = None,
) -> dict[str, str]:
    """The facts that a worker sends when it joins.

    The scheduler refuses a worker in which one of them differs from the others', and warns only about
    those whose name begins with ``~``.

    Args:
        backend: the data plane's name.
        plane: the data plane; may have ``facts`` of its own.
        env: the process's environment.
        root: where ``proc`` lies.
        path: folders in which packages are installed; None: those of this process.
    """
    facts = {"muster": __version__, **getattr(plane, "facts", {})}
    if backend == "nccl":
        told = {name: env.get(name, "") for name in MUST_AGREE_NCCL}
        facts |= {name: value[:256] for name, value in told.items() if value and value.isprintable()}
        facts |= package_versions(MUST_AGREE_LIBRARIES, path)
        driver = driver_version(root)
        if driver:
            facts[f"{SOFT}driver"] = driver
    return facts


def all_facts(env: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Everything that ``muster check`` compares; what is not there is left out.

    Args:
        env: the process's environment.
        root: where ``proc`` and ``dev`` lie.
    """
    import platform

    facts = {
        "muster": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "driver": driver_version(root),
        **package_versions(PROJECTS),
        **{name: env[name] for name in sorted(env) if name.startswith("NCCL_")},
    }
    gpus = gpu_models(root)
    facts["gpus"] = str(len(gpus))
    facts["gpu model"] = ", ".join(sorted(set(gpus)))
    return {name: value[:200] for name, value in facts.items() if value}


def driver_version(root: Path = Path("/")) -> str:
    """The NVIDIA driver's version, from /proc; empty where there is none."""
    try:
        found = _DRIVER.search((root / "proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1] if found else ""


def gpu_models(root: Path = Path("/")) -> list[str]:
    """The model of each GPU of this host, from /proc."""
    models = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        lines = (
            line.partition(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        )
        models.append(next((value.strip() for key, _, value in lines if key.strip() == "Model"), "unknown"))
    return models or ["unknown" for path in root.glob("dev/nvidia[0-9]*") if path.name[6:].isdigit()]


def package_versions(names: Iterable[str], path: Iterable[str] | None = None) -> dict[str, str]:
    """The versions of installed packages, from the names of their metadata folders.

    ``importlib.metadata`` would take longer to import than all of this takes.

    Args:
        names: of :data:`PROJECTS`.
        path: folders to look in; None: ``sys.path``.

    Returns:
        Those that are installed, by name.
    """
    installed: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        try:
            listed = os.listdir(folder or ".")  # noqa: PTH208 - iterdir() makes a Path of each
        except OSError:  # not there, or an archive
            continue
        metadata = sorted(entry for entry in listed if entry.endswith("-info"))
        for found in filter(None, map(_INSTALLED.fullmatch, metadata)):
            installed.setdefault(found[1].replace(".", "_").lower(), found[2])
    first = {name: next(filter(None, map(installed.get, PROJECTS[name])), "") for name in names}
    return {name: version for name, version in first.items() if version}


def bind_libraries(interface: str) -> None:
    """Makes NCCL and Gloo use the interface of MS_INTERFACE, unless they were told another.

    Both read the variables when they first open a socket, in this process.
    """
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": this one, not all that begin so
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
