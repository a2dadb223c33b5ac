"""Creates a GPU's context and loads its libraries in a thread, while the worker joins.

The driver needs up to a second for a context (measured: 1.2 s on a host with four GPUs that no process used).
That is as long as all imports and the Join together take. It is C code that does not need the interpreter, so
it starts first. The array library is Python code and would slow other imports down, so it is loaded while
this worker waits for the others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import threading
from collections.abc import Callable
from typing import Any

from muster.communicators.array_library import loaded_library
from muster.communicators.nccl.streams import use_device
from muster.wire.threads import start_thread

LIBRARY = "libcuda.so.1"
_EXIT_WAIT_S = 10.0


class WarmUp:
    """A thread that makes a GPU's primary context now, and loads the array library later.

    CuPy, torch and NCCL all use that context. The thread never raises: a failure here repeats, with an error,
    when the GPU is used.

    Args:
        ordinal: the GPU as CUDA counts in this process; -1: not known yet, so that only the driver starts.
        load_driver: returns the driver's library.
    """

    def __init__(self, ordinal: int, load_driver: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._ordinal = ordinal
        self._load_driver = load_driver
        self._wanted = threading.Event()
        self._loads = False
        # A daemon thread, because a hanging driver must not keep a refused process from ending.
        self._thread = start_thread(self._run, name="muster-nccl-warm-up")
        atexit.register(self.end, _EXIT_WAIT_S)  # a process that ends inside the driver could crash

    def load(self) -> None:
        """Starts loading the array library, which uses the GPU if that is known; returns at once."""
        self._loads = True
        self._wanted.set()

    def end(self, timeout_s: float | None = None) -> None:
        """Waits up to ``timeout_s`` seconds for the warm-up's end, whether it succeeds or not; idempotent."""
        self._wanted.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            driver = self._load_driver(LIBRARY)
            if driver.cuInit(0) == 0 and self._ordinal >= 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), self._ordinal)
        self._wanted.wait()
        with contextlib.suppress(Exception):
            if self._loads and self._ordinal >= 0:
                use_device(self._ordinal)
            elif self._loads:
                importlib.import_module(loaded_library())
