"""Threads without which a process cannot go on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

NO_THREAD = os.EX_OSERR
"""Exit code of a process that got no thread, or no memory for what one does."""


def start_thread(body: Callable[[], object], *, name: str) -> threading.Thread:
    """Starts a thread that does not keep the process alive; ends the process in a sentence where that fails.

    A process that went on without it would stay for ever: a worker out of its job, which nobody tells.
    """

    def run() -> None:
        try:
            body()
        except MemoryError as error:
            _end(name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except MemoryError as error:
        _end(name, error)
    except RuntimeError as error:
        if sys.is_finalizing() or "shutdown" in str(error):
            raise
        _end(name, error)
    return thread


def _end(name: str, error: BaseException) -> NoReturn:
    reason = str(error) or type(error).__name__
    sentence = (
        f"muster: process {os.getpid()} ends: its thread {name!r} could not run ({reason})."
        " Look at the limits of threads and memory: ulimit -u, a container's pids.max and memory.max.\n"
    )
    os.write(2, sentence.encode())  # what logs and flushes may need a thread, or memory, itself
    os._exit(NO_THREAD)
