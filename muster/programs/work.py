"""Handles of a process group's operations: torch waits for them, and gets futures from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from muster.errors import CollectiveTimeoutError
from muster.programs.callbacks import CallbackFuture, Callbacks
from muster.programs.step_times import WAITS

if TYPE_CHECKING:
    from muster.communicators.tcp.messages import Message

Tensor = Any
_SIGNALS_S = 0.1
"""The longest single wait, in seconds: signals that another thread received are handled between waits."""


class GroupWork(Work):  # type: ignore[misc]  # torch has no types here
    """The handle of an operation.

    Args:
        tensors: the operation's results.
        callbacks: the callbacks of the operation's caller.
        ordered: whether callbacks run in the order in which they are attached, rather than at completion.
    """

    def __init__(self, tensors: Sequence[Tensor], callbacks: Callbacks, *, ordered: bool = True) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._callbacks = callbacks
        self._ordered = ordered
        self._over = threading.Event()
        self._error: Exception | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    def finish(self, error: Exception | None = None) -> None:
        """Marks the operation as completed, or as failed with an error."""
        with self._lock:
            self._error = error
            self._over.set()
            future = self._future
        if future is not None:
            self._callbacks.complete(lambda: self._complete(future))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the operation has completed.

        Args:
            timeout: how long to wait; 0 for no limit.

        Raises:
            CollectiveTimeoutError: the operation has not completed within ``timeout``; it continues to run.
            CommunicatorError: the operation failed.
        """
        with WAITS.waiting():
            self._wait(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)  # each wait would add to its traceback
        return True

    def _wait(self, timeout: timedelta) -> None:
        left_s = timeout.total_seconds()
        while not self._over.is_set():
            if timeout > timedelta(0) and left_s <= 0:
                raise CollectiveTimeoutError(f"It was not done in {timeout.total_seconds():g} s.")
            pause_s = min(_SIGNALS_S, left_s) if timeout > timedelta(0) else _SIGNALS_S
            self._over.wait(pause_s)
            left_s -= pause_s

    def synchronize(self) -> None:
        """See torch; on a CPU it is the same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has completed or failed."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it has completed without an error."""
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """The error with which it failed; None if it has not."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors with the results."""
        return self._tensors

    def get_future(self) -> Any:
        """Returns a future of the tensors, which raises the operation's error if it failed."""
        with self._lock:
            if self._future is None:
                self._future = CallbackFuture(self._callbacks, ordered=self._ordered)
                if self._over.is_set():
                    self._complete(self._future)
        return self._future

    def _complete(self, future: Any) -> None:
        if self._error is not None:
            future.fail(self._error)
        else:
            future.set_result(self._tensors)


class MessageWork(GroupWork):
    """The handle of one or more messages to or from one rank.

    Args:
        messages: the messages, all of which must be over.
        tensors: the tensors that are sent or filled.
        callbacks: the callbacks of the operation's caller.
        filled: called when all messages have arrived, before callers that wait go on.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tensors: Sequence[Tensor],
        callbacks: Callbacks,
        filled: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(tensors, callbacks, ordered=False)
        self._messages = messages
        self._left = len(messages)
        self._filled = filled
        self._count_lock = threading.Lock()
        for message in messages:
            message.when_done(self._ended)
        if not messages:
            self.finish()

    def _ended(self, error: Exception | None) -> None:
        with self._count_lock:
            self._left -= 1
            last = self._left == 0
        if error is None and last and self._filled is not None:
            try:
                self._filled()
            except Exception as failure:  # if raised here, it would end a thread that others need
                error = failure
        if (error is not None or last) and not self.is_completed():
            self.finish(error)

    def _source_rank(self) -> int:
        """The rank that sent the message, for receives from any rank."""
        return self._messages[0].peer
