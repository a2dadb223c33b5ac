"""The communicators that are aborted at the end of a generation."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from muster.communicators.base import Communicator
from muster.errors import CommunicatorError, NotInitializedError

log = logging.getLogger("muster.worker")


class LiveCommunicators:
    """The open communicators of the present generation.

    Args:
        lock: the lock under which generations end.
        start: starts a thread, given its name and function.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        start: Callable[[str, Callable[[], None]], threading.Thread],
    ) -> None:
        self._lock = lock
        self._start = start
        self._generation = 0
        self._communicators: list[Communicator] = []
        self._aborting: threading.Thread | None = None

    def add(self, generation: int, communicator: Communicator) -> None:
        """Adds a communicator; those of other generations are forgotten."""
        with self._lock:
            if self._generation != generation:
                self._generation, self._communicators = generation, []
            self._communicators.append(communicator)

    def forget(self, communicator: Communicator) -> None:
        """Forgets a communicator that no longer needs an abort; idempotent."""
        with self._lock, contextlib.suppress(ValueError):
            self._communicators.remove(communicator)

    def abort(self, error: Exception) -> None:
        """Starts to abort all of them; call it under the lock.

        This runs on a separate thread, because an abort may take a while, and the next generation's ids
        arrive before its end. The thread is started under the lock, so that any thread that sees the change
        can wait for it.
        """
        communicators = list(self._communicators)
        if not communicators:
            return

        def run() -> None:
            for communicator in communicators:
                communicator.abort(error)

        self._aborting = self._start("muster-abort", run)

    def end(self, end: Callable[[Communicator], None]) -> None:
        """Calls ``end`` with each open communicator, the newest first.

        ``end`` may block on a peer that dies, so each communicator is still aborted if the generation ends.
        """
        self.settle_aborts()
        while youngest := self._communicators[-1:]:
            try:
                end(youngest[0])
            finally:
                self.forget(youngest[0])
        self.settle_aborts()

    def settle_aborts(self) -> None:
        """Waits until no thread is aborting a communicator."""
        with self._lock:  # A thread that cannot be joined yet is not in the list.
            aborting = self._aborting
        if aborting is not None:
            aborting.join()


def abandon(communicator: Communicator) -> None:
    """Ends a communicator that others may still use; they notice it as an error."""
    communicator.abort(NotInitializedError("The session was released."))
    close_quietly(communicator)


def finish(communicator: Communicator) -> None:
    """Ends a communicator that is not used any more."""
    communicator.finished = True
    close_quietly(communicator)


def close_quietly(communicator: Communicator) -> None:
    """Closes a communicator; an error is only written to the debug log."""
    try:
        communicator.close()
    except CommunicatorError as error:
        log.debug("closing a communicator: %s", error)
