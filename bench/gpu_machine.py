"""What a GPU figure was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "nccl4py", "triton", "numpy")


def describe_machine(communicator: Any = None) -> dict[str, Any]:
    """Facts of this host, its GPUs and the libraries at work. Runs in a process of a fleet or alone."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(),
        "nccl_nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    return facts if communicator is None else facts | describe_nccl()


def describe_nccl() -> dict[str, Any]:
    """NCCL's version, as a number, and the file it is in."""
    from nccl.bindings import nccl

    library = str(nccl.get_library_path()).rpartition("/")[2]
    return {"nccl": nccl.get_version(), "nccl_library": library}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_version() -> str:
    """The NVIDIA driver's version; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError:
        return ""
    return output.splitlines()[0].strip() if output else ""
