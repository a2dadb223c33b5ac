"""Simulated time: a queue of what happens next, and processes whose asyncio runs on it."""

from __future__ import annotations

import asyncio
import heapq
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

Action = Callable[..., object]


class Loop:
    """Runs actions in order of their time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, when: float, action: Action, *arguments: Any) -> None:
        """Calls ``action`` at a time (now, if that has passed)."""
        self._number += 1
        heapq.heappush(self._queue, (max(when, self.now), self._number, action, arguments))

    def after(self, delay: float, action: Action, *arguments: Any) -> None:
        """Calls ``action`` in ``delay`` seconds."""
        self.at(self.now + delay, action, *arguments)

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Runs until it is over, nothing is left to do, or the time has come."""
        queue = self._queue
        while queue and queue[0][0] <= until and not over():
            self.now, _, action, arguments = heapq.heappop(queue)
            action(*arguments)


class Callback:
    """Something that a process is to do."""

    __slots__ = ("action", "arguments", "process")

    def __init__(self, process: Process, action: Action | None, arguments: tuple[Any, ...]) -> None:
        self.process, self.action, self.arguments = process, action, arguments

    def cancel(self) -> None:
        """It is not done."""
        self.action = None

    def run(self) -> None:
        """Does it, unless the process is dead; later, if it is stopped."""
        process, action = self.process, self.action
        if action is None or not process.alive:
            return
        if process.loop.now < process.stopped_until:
            process.loop.at(process.stopped_until, self.run)
            return
        asyncio._set_running_loop(process.asyncio)
        try:
            action(*self.arguments)
        finally:
            asyncio._set_running_loop(None)
        if process.error is not None:
            raise process.error


class Process:
    """The asyncio event loop of one simulated process: enough for tasks, futures, sleeps and timers.

    Attributes:
        alive: what a dead one was to do is never done.
        stopped_until: until then it stands still.
        error: what broke, to be raised where the simulation runs.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.asyncio = cast(asyncio.AbstractEventLoop, self)
        self.alive = True
        self.stopped_until = 0.0
        self.error: BaseException | None = None

    def kill(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Ends it. Its tasks stay undone; Python would warn of those that had not begun: they are closed."""
        self.alive = False
        for task in tasks:
            work = task.get_coro()
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()

    def time(self) -> float:
        return self.loop.now

    def call_soon(self, callback: Action, *args: Any, context: Any = None) -> Callback:
        return self.call_at(self.loop.now, callback, *args)

    def call_later(self, delay: float, callback: Action, *args: Any, context: Any = None) -> Callback:
        return self.call_at(self.loop.now + delay, callback, *args)

    def call_at(self, when: float, callback: Action, *args: Any, context: Any = None) -> Callback:
        planned = Callback(self, callback, args)
        if self.alive:  # the collector of garbage may come across what is left of a dead one at any time
            self.loop.at(when, planned.run)
        return planned

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.asyncio)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A process that was killed leaves its tasks undone."""
