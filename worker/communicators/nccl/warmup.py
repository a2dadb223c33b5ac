"""Making a GPU's context before anything that needs it is loaded.

The driver needs up to a second for it (measured: 1.2 s on a host with four GPUs where no process held them),
as long as all imports and the joining together. It is C code that needs no Python meanwhile, so it runs
beside them when it starts first.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"
_EXIT_WAIT_S = 10.0


def begin_context(ordinal: int, load: Callable[[str], Any] = ctypes.CDLL) -> threading.Thread:
    """Retains a GPU's primary context, the one that CuPy, torch and NCCL use, in a thread that it starts.

    It never raises: what fails here fails again where the GPU is used, which tells.

    Args:
        ordinal: the GPU as CUDA counts in this process; -1: not known yet, so that only the driver starts.
        load: gives the driver's library.
    """
    # A daemon, because a driver that hangs must not keep a process that was refused.
    thread = threading.Thread(target=_retain, args=(ordinal, load), name="muster-cuda-context", daemon=True)
    thread.start()
    atexit.register(thread.join, _EXIT_WAIT_S)  # a process that ends inside the driver could crash
    return thread


def _retain(ordinal: int, load: Callable[[str], Any]) -> None:
    try:
        driver = load(LIBRARY)
    except OSError:
        return
    if driver.cuInit(0) == 0 and ordinal >= 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), ordinal)
