"""Finds the library that makes arrays on GPUs in this process. Imports little, because warm-up uses it."""

from __future__ import annotations

import importlib
import sys

from muster.errors import CommunicatorError
from muster.version import how_to_install


def loaded_library() -> str:
    """Returns "torch" or "cupy": the one that is loaded, else the one that is installed.

    Raises:
        CommunicatorError: neither is installed.
    """
    for name in ("torch", "cupy"):
        if name in sys.modules:
            return name
    for name in ("cupy", "torch"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    raise CommunicatorError(
        "NCCL needs CuPy or torch for its arrays and streams, and neither is installed",
        remedy=f"{how_to_install('cuda13')}; [cuda12] and [torch] will do, too.",
    )
