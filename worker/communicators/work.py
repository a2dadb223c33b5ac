"""Handles of issued collectives, and the thread that runs them in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_SIGNALS_S = 0.1
"""How long one wait lasts at most: a signal that another thread takes is handled between two."""


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
        """Waits for it, and raises what it failed with."""
        while not self._event.wait(_SIGNALS_S):
            pass
        if self._error is not None:
            raise self._error.with_traceback(None)  # another wait adds to it

    def run(self) -> Exception | None:
        """Runs it, in the thread of the queue; returns what it failed with."""
        try:
            self._action()
        except Exception as error:
            return error
        return None

    def end(self, error: Exception | None) -> None:
        """Wakes all that wait for it, with an error; its later result is dropped."""
        if not self._event.is_set():
            self._error = error
            self._event.set()


class WorkQueue:
    """Runs work in order, in one thread that starts with the first of it.

    Attributes:
        idle: whether all that was put has run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending: list[QueuedWork] = []
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.idle = True

    def put(self, action: Callable[[], None]) -> QueuedWork:
        """Adds work at the end."""
        work = QueuedWork(action)
        with self._lock:
            if self._error is not None:
                work.end(self._error)
                return work
            self._pending.append(work)
            self.idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(work)
        return work

    def end_all(self, error: Exception) -> None:
        """Ends all waits, now and later, with an error; the result of what runs meanwhile is dropped."""
        with self._lock:
            self._error = error
            for work in self._pending:
                work.end(error)

    def close(self) -> None:
        """Waits until all that was put has run, and ends the thread."""
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
            error = work.run()
            with self._lock:
                work.end(error)
                self._pending.remove(work)
                self.idle = not self._pending
