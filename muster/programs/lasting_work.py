"""What a collective leaves in the caller's tensors, apart from the process group that carries it out."""

from __future__ import annotations

import contextlib
import threading
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
    """The tensors that an operation writes: those of its first argument, whatever it is called."""
    return [] if name in READS_ONLY or not args else list(_flat(args[0]))


def is_on_host(args: Sequence[Any]) -> bool:
    """Whether an operation takes tensors in the host's memory, or none."""
    return all(each.device.type == "cpu" for each in _flat(args))


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)


class ApartWork(GroupWork):
    """An operation whose results lie in memory of its own until it is over.

    Then they go to the tensors of who has called it.

    Gloo cannot be stopped: a collective whose members are gone may wait until its timeout, and one of an
    earlier generation may yet write. Both happen in memory that nobody else sees, so a caller is
    released at once, by :meth:`give_up`, and what is written later is lost.

    Args:
        name: the process group's method.
        args: what the caller gave; the first holds the tensors to be written.
        callbacks: of who has called it.
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
        """The arguments with the memory of its own in the place of the tensors to be written."""
        return [self._exchange(args[0]), *args[1:]] if self._results else list(args)

    def _exchange(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._apart[id(value)]
        return [self._exchange(each) for each in value]

    def follow(self, inner: Any) -> None:
        """Takes over the outcome of torch's own handle when that is over."""
        self._inner = inner  # with it go the tensors
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
        """Waits in short pieces: a thread that waits in C++ when the interpreter ends takes the process down.

        A message cannot be waited for in pieces, as its connections would end. It can be aborted instead.
        """
        if self._is_message:
            self._inner.wait()
            return
        while not self._over.is_set():
            try:
                self._inner.wait(_PIECE)
                return
            except RuntimeError:
                if self._inner.is_completed():
                    self._inner.wait()
                    return

    def give_up(self, error: Exception) -> None:
        """Lets all who wait fail, and keeps what the operation may still write from the caller's tensors."""
        with self._state:
            if not self._over.is_set():
                self.finish(error)
        with contextlib.suppress(Exception):  # a message can be stopped, a collective cannot
            self._inner.abort()

    def _source_rank(self) -> int:
        rank: int = self._inner._source_rank()
        return rank


def call_apart(
    call: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], callbacks: Callbacks
) -> ApartWork:
    """Begins an operation of a process group, with results in memory of its own."""
    work = ApartWork(name, args, callbacks)
    work.follow(call(*work.replaced(args), **kwargs))
    return work


def callbacks_of(group: str) -> Callbacks:
    """The callbacks of a group's operations."""
    return Callbacks(group, PROGRAM)
