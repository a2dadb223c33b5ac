"""Threads of a simulated process: real ones, of which one runs at a time while the loop waits for it.

So the product's own threads run in simulated time, and a seed decides which of them goes on when. A process
that is stopped goes on when it is continued; one that is killed unwinds wherever it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

from muster.worker.session.threads import Threads

if TYPE_CHECKING:
    from tests.simulation.world import World

SWITCH_S = 0.004
"""After so long at most a thread that can go on does."""


class KilledError(BaseException):
    """The process is no more."""


class Fiber:
    """One thread."""

    def __init__(self, threads: Fibers, body: Callable[[], None]) -> None:
        self._threads = threads
        self._body = body
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._error: BaseException | None = None
        self.done = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._threads.killed:
                self._body()
        except KilledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self._back.release()

    def resume(self) -> None:
        """Lets it run until it waits or ends; called by the loop alone."""
        if self.done:
            return
        before, self._threads.current = self._threads.current, self
        self._go.release()
        self._back.acquire()
        self._threads.current = before
        if self.done:
            self.thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def block(self) -> None:
        """Waits until it is resumed; called by itself."""
        if not self._threads.killed:
            self._back.release()
            self._go.acquire()
        if self._threads.killed:
            raise KilledError

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended."""
        while not self.done:
            self._threads.sleep(SWITCH_S)


class Waiting:
    """What fibers wait for: they go on when it is notified, or after a time."""

    def __init__(self, threads: Fibers) -> None:
        self._threads = threads
        self._waiters: list[list[Fiber]] = []

    def wait(self, timeout: float | None = None) -> None:
        fiber = self._threads.current
        assert fiber is not None, "the loop waits for its own next action"
        waiter = [fiber]
        self._waiters.append(waiter)
        if timeout is not None:
            self._threads.after(timeout, self._wake, waiter)
        fiber.block()

    def _wake(self, waiter: list[Fiber]) -> None:
        with contextlib.suppress(ValueError):
            self._waiters.remove(waiter)
        if waiter:
            waiter.pop().resume()

    def notify_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._threads.soon(self._wake, waiter)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Queue:
    """As much of a SimpleQueue as the client uses."""

    def __init__(self, threads: Fibers) -> None:
        self._items: deque[Any] = deque()
        self._filled = Waiting(threads)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._filled.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        if not self._items:
            self._filled.wait(timeout)
        while not self._items and timeout is None:
            self._filled.wait()
        if not self._items:
            raise Empty
        return self._items.popleft()


class Turns:
    """A :class:`~muster.worker.session.threads.Loop` whose turns the loop makes itself."""

    def __init__(
        self, threads: Fibers, turn: Callable[[], float | None], take: Callable[[Any], None]
    ) -> None:
        self._threads = threads
        self._turn = turn
        self._take = take
        self._items: deque[Any] = deque()
        self._newest = 0
        self._is_taking = False
        self._closed = False
        self.put()

    def put(self, item: Any = None) -> None:
        if item is not None:
            self._items.append(item)
        self._due(self._threads.some_time())

    def close(self) -> None:
        self._closed = True

    def _due(self, seconds: float) -> None:
        self._newest += 1
        self._threads.after(seconds, self._make, self._newest)

    def _make(self, number: int) -> None:
        if self._closed or self._is_taking or number != self._newest:
            return
        if self._items:
            self._is_taking = True
            self._threads.start("", self._take_one)
            return
        seconds = self._turn()
        if seconds is not None and number == self._newest:  # else something was put meanwhile
            self._due(seconds)

    def _take_one(self) -> None:
        self._take(self._items.popleft())
        self._is_taking = False
        self.put()


class Fibers(Threads):
    """The threads of one process.

    Args:
        world: has the loop.
        stopped_until: when the process goes on; a time that has passed: it runs.
    """

    def __init__(self, world: World, stopped_until: Callable[[], float]) -> None:
        self._world = world
        self._stopped_until = stopped_until
        self._fibers: list[Fiber] = []
        self.current: Fiber | None = None
        self.killed = False

    def now(self) -> float:
        return self._world.loop.now

    def start(self, name: str, body: Callable[[], None]) -> Any:
        fiber = Fiber(self, body)
        self._fibers.append(fiber)
        self.soon(fiber.resume)
        return fiber

    def loop(
        self, name: str, turn: Callable[[], float | None], take: Callable[[Any], None] = lambda _: None
    ) -> Any:
        return Turns(self, turn, take)

    def condition(self) -> Any:
        return Waiting(self)

    def queue(self) -> Any:
        return Queue(self)

    def sleep(self, seconds: float) -> None:
        """Lets simulated time pass; called by a fiber."""
        Waiting(self).wait(seconds)

    def some_time(self) -> float:
        """How long it takes until a thread that can go on does, in seconds."""
        return self._world.rng.random() * SWITCH_S

    def soon(self, action: Callable[..., None], *arguments: Any) -> None:
        """Has the loop do it when the process is given the processor."""
        self.after(self.some_time(), action, *arguments)

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """The same, after a time."""
        self._world.loop.after(seconds, self._unless_stopped, action, *arguments)

    def _unless_stopped(self, action: Callable[..., None], *arguments: Any) -> None:
        if self.killed:
            return
        until = self._stopped_until()
        if self._world.loop.now < until:
            self._world.loop.at(until, self._unless_stopped, action, *arguments)
        else:
            action(*arguments)

    def kill(self) -> None:
        """Ends all of them, but for the one that calls it: that goes on until it waits, or to its end."""
        self.killed = True
        for fiber in self._fibers:
            if fiber is not self.current:
                fiber.resume()
