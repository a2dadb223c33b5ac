"""Handles of issued collectives, and the queue whose thread runs them in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from muster.wire.threads import start_thread

_SIGNALS_S = 0.1
"""Longest single wait, in seconds: signals are handled between two waits."""


class Work(Protocol):
    """One issued collective."""

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""

    def wait(self) -> None:
        """Waits until the result may be used; on CUDA, until the current stream may use it.

        Raises:
            CommunicatorError: the collective failed.
            MembershipChanged: the communicator was aborted by a change of members.
        """


class FinishedWork:
    """The handle of a collective that was done before its call returned."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


FINISHED = FinishedWork()


class QueuedWork:
    """The handle of a collective that the queue's thread runs."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._event = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether it has completed, well or not."""
        return self._event.is_set()

    def wait(self) -> None:
        """Waits until it has completed, and raises its error if it failed."""
        while not self._event.wait(_SIGNALS_S):
            pass
        if self._error is not None:
            raise self._error.with_traceback(None)  # each wait would add to its traceback

    def run(self) -> None:
        """Runs it in the queue's thread, and wakes all threads that wait for it."""
        try:
            self._action()
        except Exception as error:
            self._error = error
        self._event.set()


class WorkQueue:
    """Runs work in order, in one thread that is started by the first piece of work.

    Attributes:
        idle: whether all work that was added has run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending = 0
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.idle = True

    def put(self, action: Callable[[], None]) -> QueuedWork:
        """Adds work at the end."""
        work = QueuedWork(action)
        with self._lock:
            self._pending += 1
            self.idle = False
            if self._thread is None:
                self._thread = start_thread(self._serve, name=self._name)
            self._queue.put(work)
        return work

    def close(self) -> None:
        """Waits until all work has run, and ends the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        while True:
            work = self._queue.get()
            if work is None:
                return
            work.run()
            with self._lock:
                self._pending -= 1
                self.idle = not self._pending
