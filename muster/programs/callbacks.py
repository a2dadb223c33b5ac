"""Runs the callbacks of collectives, one after the other, in threads beside the group's own.

A callback may wait for other collectives, so it must not block the thread that runs them. It may also call
collectives: if two callbacks, or a callback and the program, called them at the same time, their order would
differ from rank to rank. So callbacks run in the order in which they were attached, which is the same on all
ranks, and their collectives use other connections than the program's: see :func:`caller`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from muster.wire.threads import start_thread

log = logging.getLogger("muster.worker")

PROGRAM = ""
"""The caller of collectives that are not called in a callback."""

_on_behalf_of = threading.local()


def caller() -> str:
    """The caller of this thread's collectives: the program, or the callbacks of one group and caller.

    It has the same value on all ranks. The collectives of one caller are called in the same order on all
    ranks; those of different callers need not be.
    """
    name: str = getattr(_on_behalf_of, "caller", PROGRAM)
    return name


class Callbacks:
    """Runs the callbacks of one caller's collectives in one group.

    Args:
        group: the group's name, the same on all ranks.
        of: the caller of the collectives.

    Attributes:
        caller: the caller of collectives that these callbacks call.
    """

    def __init__(self, group: str, of: str) -> None:
        self.caller = hashlib.sha256(f"{of}/{group}".encode()).hexdigest()[:16]
        self._name = f"muster-callbacks-{self.caller[:4]}"
        self._changed = threading.Condition()
        self._waiting: deque[tuple[CallbackFuture, Callable[[], None]]] = deque()
        self._completing = 0
        self._runs = self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether no callback runs or is queued, and no future is being completed."""
        with self._changed:
            return not (self._runs or self._waiting or self._completing)

    def drain(self, timeout_s: float) -> None:
        """Waits until idle, at most ``timeout_s`` seconds; in one of these callbacks, returns at once."""
        if caller() != self.caller:
            with self._changed:
                self._changed.wait_for(
                    lambda: not (self._runs or self._waiting or self._completing), timeout_s
                )

    def close(self) -> None:
        """Ends the thread once no callback is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def complete(self, set_outcome: Callable[[], None]) -> None:
        """Completes a future in a new thread, in which callbacks that were attached from C++ run."""

        def run() -> None:
            _on_behalf_of.caller = self.caller
            try:
                set_outcome()
            finally:
                with self._changed:
                    self._completing -= 1
                    self._changed.notify_all()

        with self._changed:
            self._completing += 1
        start_thread(run, name=self._name)

    def put(self, future: CallbackFuture, run: Callable[[], None]) -> None:
        """Queues a callback; it runs when the future is done and all callbacks queued before have run."""
        with self._changed:
            self._waiting.append((future, run))
            if self._thread is None:
                self._thread = start_thread(self._serve, name=self._name)
            self._changed.notify_all()

    def help(self, future: CallbackFuture) -> None:
        """Runs queued callbacks until the future is done, if called in a callback; else does nothing.

        The future may depend on them, and they would wait for the present callback.
        """
        while threading.current_thread() is self._thread and not future.done() and self._waiting:
            self._run_next()

    def _serve(self) -> None:
        _on_behalf_of.caller = self.caller
        while True:
            with self._changed:
                self._runs = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    self._thread = None
                    return
                self._runs = True
            self._run_next()

    def _run_next(self) -> None:
        future, run = self._waiting.popleft()
        if future.awaits_callback and not future.done():  # called in a callback, which then waits itself
            future.when_completed(lambda: self.put(future, run))
            return
        future.settle()
        run()


class _FailedValue:
    """The value of a future that failed; raises or names the error when it is used.

    Python cannot give torch's futures an error that C++ knows. DDP either looks for tensors in the value by
    pickling it, which raises the error, or reports that the value is not a tensor, which prints the error.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> str:
        raise self._error

    def __str__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"


class CallbackFuture(torch.futures.Future):  # type: ignore[misc]  # torch has no types here
    """A future whose callbacks, and those of the futures they return, run in order in :class:`Callbacks`.

    Args:
        callbacks: runs the callbacks.
        awaits_callback: whether it completes when a callback has run, rather than when a collective is over.
        ordered: whether callbacks run in the order in which they are attached; False: as torch runs them,
            when the future is done.
    """

    def __init__(self, callbacks: Callbacks, *, awaits_callback: bool = False, ordered: bool = True) -> None:
        super().__init__()
        self.awaits_callback = awaits_callback
        self._callbacks = callbacks
        self._ordered = ordered

    def fail(self, error: Exception) -> None:
        """Completes it with an error, which is raised when its value is read, also in C++."""

        def refuse(_: Any) -> None:
            raise error

        self._set_unwrap_func(refuse)
        self.set_result(_FailedValue(error))

    def wait(self) -> Any:
        """See torch."""
        self._callbacks.help(self)
        return super().wait()

    def settle(self) -> None:
        """Waits until it is done, whether it has succeeded or failed."""
        if self.done():
            return
        done = threading.Event()
        self.when_completed(done.set)
        done.wait()

    def when_completed(self, call: Callable[[], None]) -> None:
        """Calls ``call``, which must be quick, when it is done, in the thread that completes it."""
        super().add_done_callback(lambda _: call())

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """See torch."""
        if not self._ordered:
            return super().then(callback)
        child = CallbackFuture(self._callbacks, awaits_callback=True)

        def run() -> None:
            try:
                result = callback(self)
            except Exception as error:
                child.fail(error)
            else:
                child.set_result(result)

        self._callbacks.put(self, run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See torch; what the callback raises is logged."""
        if not self._ordered:
            super().add_done_callback(callback)
            return

        def run() -> None:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a collective failed")

        self._callbacks.put(self, run)
