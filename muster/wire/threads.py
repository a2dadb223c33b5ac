"""Starts threads, and ends the process if a thread cannot be started."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NO_THREAD = os.EX_OSERR
"""Exit code of a process that could not start or run a thread, for example for lack of memory."""


def start_thread(body: Callable[[], object], *, name: str) -> threading.Thread:
    """Starts a daemon thread; if that fails, ends the process with a sentence.

    Without the thread, the process might wait forever: for example a worker that is no longer in its job,
    but never learns of it.
    """

    def run() -> None:
        try:
            body()
        except MemoryError as error:
            _end(name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (MemoryError, RuntimeError) as error:
        _end_unless_late(name, error)
        raise
    return thread


class Pool(ThreadPoolExecutor):
    """Threads for calls that block. Ends the process if a thread cannot be started.

    Args:
        most: the largest number of threads.
        name: the prefix of the threads' names.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        try:
            return super().submit(fn, *args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            _end_unless_late(self._name, error)
            raise


def _end_unless_late(name: str, error: MemoryError | RuntimeError) -> None:
    """Ends the process, unless it is already ending: then threads can neither start nor matter."""
    if isinstance(error, MemoryError) or not (sys.is_finalizing() or "shutdown" in str(error)):
        _end(name, error)


def _end(name: str, error: BaseException) -> NoReturn:
    reason = str(error) or type(error).__name__
    sentence = (
        f"muster: process {os.getpid()} ends: its thread {name!r} could not run ({reason})."
        " Look at the limits of threads and memory: ulimit -u, a container's pids.max and memory.max.\n"
    )
    try:
        # Not to descriptor 2: a thread may read that end (see grpc_stderr), and would end before it has shown
        # the sentence.
        shown = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        shown = 2
    os.write(shown, sentence.encode())  # Logging or flushing might itself need a thread or memory.
    os._exit(NO_THREAD)
