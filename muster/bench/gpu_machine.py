"""Describes the machine on which a GPU figure was measured."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

from muster.bench.report import package_version
from muster.worker.host import driver_version

_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "nccl4py", "triton", "numpy")


def describe_machine(communicator: Any = None) -> dict[str, Any]:
    """Returns facts of this host, its GPUs and the libraries; runs in a process of a fleet or alone."""
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
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
    }
    return facts if communicator is None else facts | describe_nccl()


def describe_nccl() -> dict[str, Any]:
    """Returns NCCL's version as a number, and the name of its library's file."""
    from nccl.bindings import nccl

    library = str(nccl.get_library_path()).rpartition("/")[2]
    return {"nccl": nccl.get_version(), "nccl_library": library}
