"""Where the callbacks of collectives run: in threads beside the group's own, and one after the other.

A callback may wait for other collectives, so it must not hold up the thread that carries them out. And it may
call some: those of two callbacks, or of a callback and the program, would come in another order on each rank.
So callbacks run in the order in which they were attached, which is the program's, and what is called in
them goes another way than what the program calls: see :func:`caller`.
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
"""The caller of all that no callback calls."""

_on_behalf_of = threading.local()


def caller() -> str:
    """On whose behalf this thread calls collectives: the program's, or of which group's callbacks.

    The same on all ranks. Calls of one caller come in the same order on all of them, those of two need not.
    """
    name: str = getattr(_on_behalf_of, "caller", PROGRAM)
    return name


class Callbacks:
    """Runs callbacks of one group's collectives that one caller has called.

    Args:
        group: what names the group on all ranks.
        of: that caller.
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
        """Whether nothing runs or waits to be run."""
        with self._changed:
            return not (self._runs or self._waiting or self._completing)

    def drain(self, timeout_s: float) -> None:
        """Waits until nothing runs or waits to be run, or so long; in a callback not at all."""
        if caller() != self.caller:
            with self._changed:
                self._changed.wait_for(
                    lambda: not (self._runs or self._waiting or self._completing), timeout_s
                )

    def close(self) -> None:
        """Ends the thread when nothing waits to be run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def complete(self, set_outcome: Callable[[], None]) -> None:
        """Completes a future, in a thread of its own: what is attached to it natively runs there."""

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
        """Adds what is to run when a future is done, and all that was added before has run."""
        with self._changed:
            self._waiting.append((future, run))
            if self._thread is None:
                self._thread = start_thread(self._serve, name=self._name)
            self._changed.notify_all()

    def help(self, future: CallbackFuture) -> None:
        """In a callback that waits for a future: runs what is queued behind it, until that is done."""
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
        if future.awaits_callback and not future.done():  # a callback that waits itself has called this
            future.when_completed(lambda: self.put(future, run))
            return
        future.settle()
        run()


class _FailedValue:
    """Takes the place of a value that does not exist.

    Python can give torch's futures no error that C++ knows. DDP looks for tensors in the value, by pickling,
    or takes it for one and says what it is instead: it meets the error in both.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> str:
        raise self._error

    def __str__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"


class CallbackFuture(torch.futures.Future):  # type: ignore[misc]  # torch has no types here
    """A future whose callbacks, and theirs, run in order in the thread of :class:`Callbacks`.

    Args:
        callbacks: of the collective's caller.
        awaits_callback: it is done when a callback has run; else when a collective is over.
        ordered: False: its callbacks run as torch's own do, when it is done.
    """

    def __init__(self, callbacks: Callbacks, *, awaits_callback: bool = False, ordered: bool = True) -> None:
        super().__init__()
        self.awaits_callback = awaits_callback
        self._callbacks = callbacks
        self._ordered = ordered

    def fail(self, error: Exception) -> None:
        """Completes it with what all who ask for its value get, C++ included."""

        def refuse(_: Any) -> None:
            raise error

        self._set_unwrap_func(refuse)
        self.set_result(_FailedValue(error))

    def wait(self) -> Any:
        """See torch."""
        self._callbacks.help(self)
        return super().wait()

    def settle(self) -> None:
        """Waits until it is done, well or not."""
        if self.done():
            return
        done = threading.Event()
        self.when_completed(done.set)
        done.wait()

    def when_completed(self, call: Callable[[], None]) -> None:
        """Calls something quick when it is done, in whatever thread."""
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
        """See torch: what it raises is logged."""
        if not self._ordered:
            super().add_done_callback(callback)
            return

        def run() -> None:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a collective failed")

        self._callbacks.put(self, run)
