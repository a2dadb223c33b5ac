"""Starts threads, and ends the process where one cannot be started."""

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
"""Exit code of a process for which a thread, or the memory for one, was refused."""


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
    except (MemoryError, RuntimeError) as error:
        _end_unless_late(name, error)
        raise
    return thread


class Pool(ThreadPoolExecutor):
    """Threads for what blocks; as :func:`start_thread` it ends the process where one cannot be started.

    Args:
        most: how many threads it has at most.
        name: what their names begin with.
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
    """Ends the process, unless it is at its end already: then no thread starts, and none is missed."""
    if isinstance(error, MemoryError) or not (sys.is_finalizing() or "shutdown" in str(error)):
        _end(name, error)


def _end(name: str, error: BaseException) -> NoReturn:
    reason = str(error) or type(error).__name__
    sentence = (
        f"muster: process {os.getpid()} ends: its thread {name!r} could not run ({reason})."
        " Look at the limits of threads and memory: ulimit -u, a container's pids.max and memory.max.\n"
    )
    try:
        # Not to 2, which a thread reads where gRPC writes there: its end would come before the sentence.
        shown = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        shown = 2
    os.write(shown, sentence.encode())  # what logs and flushes may need a thread, or memory, itself
    os._exit(NO_THREAD)
