"""A worker's own threads, and their conditions, queues and clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from muster.wire.threads import start_thread

JOIN_TIMEOUT_S = 1.0

LOOK_S = 1.0
"""How often a thread checks whether a leave waits too long, a collective hangs or a signal came, in
seconds.
"""


class Loop:
    """A thread that calls a function whenever something is due or was put into its queue.

    Args:
        threads: starts the thread.
        name: the thread's name.
        turn: does what is due; returns after how many seconds it must be called again at the latest, or None
            to be called only after something is put. Never blocks.
        take: handles an item that was put; may block.
    """

    def __init__(
        self,
        threads: Threads,
        name: str,
        turn: Callable[[], float | None],
        take: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._turn = turn
        self._take = take
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._closed = False
        self._thread = threads.start(name, self._run)

    def put(self, item: Any = None) -> None:
        """Puts an item into the queue; can be called from any thread, and from a signal handler."""
        self._queue.put(item)

    def close(self) -> None:
        """Ends the thread after its present call, for which it waits a while."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                item = self._queue.get(timeout=self._turn())
            except Empty:
                continue
            if item is not None and not self._closed:
                self._take(item)


class Threads:
    """Threads, conditions, queues and their clock; a simulation provides its own."""

    def now(self) -> float:
        """Returns the time, in monotonic seconds."""
        return time.monotonic()

    def start(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Starts a thread that does not keep the process alive."""
        return start_thread(body, name=name)

    def loop(
        self, name: str, turn: Callable[[], float | None], take: Callable[[Any], None] = lambda _: None
    ) -> Loop:
        """Starts a :class:`Loop`."""
        return Loop(self, name, turn, take)

    def condition(self) -> threading.Condition:
        """Returns a condition with a reentrant lock."""
        return threading.Condition(threading.RLock())

    def queue(self) -> SimpleQueue[Any]:
        """Returns a queue."""
        return SimpleQueue()
