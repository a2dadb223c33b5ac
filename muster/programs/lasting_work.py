"""Runs a process group's operation on copies of the caller's tensors, so that the caller can give it up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from muster.programs.callbacks import PROGRAM, Callbacks
from muster.programs.work import GroupWork
from muster.wire.threads import start_thread

Tensor = Any

IN_PLACE = frozenset(("allreduce", "allreduce_coalesced", "broadcast", "reduce"))
"""Operations that read the tensors which they write."""

READS_ONLY = frozenset(("send", "barrier"))
"""Operations that write no tensor."""


MESSAGES = frozenset(("send", "recv", "recv_anysource"))
_PIECE = timedelta(seconds=0.1)


def written(name: str, args: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors that an operation writes, which are those of its first argument."""
    return [] if name in READS_ONLY or not args else list(_flat(args[0]))


def is_on_host(args: Sequence[Any]) -> bool:
    """Whether all tensors of an operation are in the host's memory."""
    return all(each.device.type == "cpu" for each in _flat(args))


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)


class ApartWork(GroupWork):
    """An operation whose results are in separate memory until it is over, and then in the caller's tensors.

    A Gloo collective cannot be stopped: if its members are gone it may wait until its timeout, and one of an
    earlier generation may still write. Both happen in the separate memory. So :meth:`give_up` releases the
    caller at once, and later results are dropped.

    Args:
        name: the process group's method.
        args: the caller's arguments; the first one holds the tensors to be written.
        callbacks: the callbacks of the operation's caller.
    """

    def __init__(self, name: str, args: Sequence[Any], callbacks: Callbacks) -> None:
        results = written(name, args)
        super().__init__(results, callbacks, ordered=False)
        self._results = results
        self._state = threading.Lock()
        make = torch.clone if name in IN_PLACE else torch.empty_like
        with torch.no_grad():
            self._apart = {id(each): make(each.detach()) for each in results}
        self._modes = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
        self._is_message = name in MESSAGES
        self._inner: Any = None

    def replaced(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments with the separate memory in the place of the tensors to be written."""
        return [self._exchange(args[0]), *args[1:]] if self._results else list(args)

    def _exchange(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._apart[id(value)]
        return [self._exchange(each) for each in value]

    def follow(self, inner: Any) -> None:
        """Completes with the outcome of torch's own handle, which a new thread waits for."""
        self._inner = inner  # keeps the tensors alive
        start_thread(self._await, name="muster-lasting")

    def _await(self) -> None:
        try:
            self._wait_for_inner()
        except Exception as error:
            self.give_up(error)
            return
        with self._state:
            if self._over.is_set():
                return
            with self._modes():
                for each in self._results:
                    each.copy_(self._apart[id(each)])
            self.finish()

    def _wait_for_inner(self) -> None:
        """Waits for torch's handle in short pieces: a wait in C++ when the interpreter ends would crash it.

        A message is waited for without pieces, because a wait that times out would end its connections. It
        can be aborted instead. If a wait raises before its time is over, the operation has failed, whatever
        the handle says: the handle of Gloo's reduce-scatter is never complete after an error.
        """
        if self._is_message:
            self._inner.wait()
            return
        while not self._over.is_set():
            begun_s = time.monotonic()
            try:
                self._inner.wait(_PIECE)
                return
            except RuntimeError:
                if self._inner.is_completed():
                    self._inner.wait()
                    return
                if time.monotonic() - begun_s < _PIECE.total_seconds() / 2:
                    raise

    def give_up(self, error: Exception) -> None:
        """Fails the operation for its caller, and drops the results that it may still write."""
        with self._state:
            if not self._over.is_set():
                self.finish(error)
        with contextlib.suppress(Exception):  # a message can be aborted, a collective cannot
            self._inner.abort()

    def _source_rank(self) -> int:
        rank: int = self._inner._source_rank()
        return rank


def call_apart(
    call: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], callbacks: Callbacks
) -> ApartWork:
    """Starts an operation of a process group, with its results in separate memory."""
    work = ApartWork(name, args, callbacks)
    work.follow(call(*work.replaced(args), **kwargs))
    return work


def callbacks_of(group: str) -> Callbacks:
    """Makes the callbacks of a group's operations."""
    return Callbacks(group, PROGRAM)
