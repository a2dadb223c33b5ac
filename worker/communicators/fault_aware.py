"""Stands between the training loop and a backend's communicator.

It turns "a connection broke" into "the membership changed" where that is what happened, and remembers the
last collectives for hang reports. On success it costs under a microsecond a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from muster.worker.communicators.base import Array, Communicator, ReduceOp, Work
from muster.worker.communicators.flight_recorder import CollectiveLog
from muster.worker.errors import (
    ArrayError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    PeerFinishedError,
    PeerLostError,
)

Verdict = Callable[[int, Exception], Exception]
"""Takes the world rank at fault (-1: unknown) and the error; returns what to raise."""


class GuardedWork:
    """Work whose failure is explained."""

    __slots__ = ("_guard", "_work")

    def __init__(self, work: Work, guard: GuardedCommunicator) -> None:
        self._work = work
        self._guard = guard

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""
        return self._work.done()

    def wait(self) -> None:
        """Waits until the result may be used.

        Raises:
            CommunicatorError: what the collective failed with.
            MembershipChanged: the generation is over.
        """
        recorder = self._guard.recorder
        recorder.awaited += 1
        try:
            self._work.wait()
        except CommunicatorError as error:
            raise self._guard.explained(error) from error
        finally:
            recorder.awaited -= 1


class GuardedCommunicator(Communicator):
    """A backend's communicator as the session hands it out.

    Args:
        inner: the backend's.
        world_ranks: the world rank of each rank of this group.
        verdict: asks whether a failure is a change of members.
        recorder: where collectives are noted.
        adopted: called with each communicator that ``split`` makes.
        closed: called with the backend's communicator when it has been closed.
    """

    def __init__(
        self,
        inner: Communicator,
        *,
        world_ranks: Sequence[int],
        verdict: Verdict,
        recorder: CollectiveLog,
        adopted: Callable[[Communicator], None],
        closed: Callable[[Communicator], None],
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.membership = inner.membership
        self.world_ranks = tuple(world_ranks)
        self._verdict = verdict
        self.recorder = self._recorder = recorder
        self._adopted = adopted
        self._closed = closed
        self._group = inner.membership.group
        # What a device still has to do is known only by waiting for it.
        self._on_device = inner.name == "nccl"

    @property
    def timeout_s(self) -> float:
        """Deadline of each collective, in seconds."""
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.inner.timeout_s = value

    def __getattr__(self, name: str) -> Any:
        """What only this backend has."""
        value = getattr(self.inner, name)
        if name == "group":
            return functools.partial(self._together, value)
        return functools.partial(self._wait_for_device, value) if name == "synchronize" else value

    @contextlib.contextmanager
    def _together(self, group: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        try:
            with group():
                yield
        except CommunicatorError as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from error

    def _wait_for_device(self, synchronize: Callable[[], None]) -> None:
        self._recorder.await_device()
        try:
            synchronize()
        except CommunicatorError as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from error
        self._recorder.settle()

    def note(self, name: str) -> None:
        """Notes for hang reports that something with collectives in it starts, "captured_step", say."""
        entry = self._recorder.begin(name, self._group, None)
        entry.on_device, entry.work = self._on_device, _DONE

    def explained(self, error: CommunicatorError) -> Exception:
        """What a failure means: the error itself, or the change of members that caused it."""
        if isinstance(error, ArrayError | CollectiveMismatchError | PeerFinishedError):
            return error
        if not isinstance(error, PeerLostError | CommunicatorAbortedError | CollectiveTimeoutError):
            return self._verdict(-1, error)
        rank = error.rank if isinstance(error, PeerLostError) else -1
        return self._verdict(self.world_ranks[rank] if 0 <= rank < len(self.world_ranks) else -1, error)

    def _run(
        self,
        name: str,
        shown: Array,
        call: Callable[..., Work],
        *args: Any,
        async_op: bool,
        group: str = "",
    ) -> Work:
        entry = self._recorder.begin(name, group or self._group, shown)
        entry.on_device = self._on_device
        try:
            work = call(*args, async_op=async_op)
        except CommunicatorError as error:
            explained = self.explained(error)
            entry.over = True  # only now: until others are heard of, it waits for them
            if explained is error:
                raise
            raise explained from error
        except BaseException:
            entry.over = True
            raise
        entry.work = work
        return GuardedWork(work, self) if async_op else work

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        return self._run("all_reduce", recv, self.inner.all_reduce, send, recv, op, async_op=async_op)

    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        return self._run("reduce", send, self.inner.reduce, send, recv, op, root, async_op=async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        return self._run("broadcast", buffer, self.inner.broadcast, buffer, root, async_op=async_op)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        return self._run("all_gather", recv, self.inner.all_gather, send, recv, async_op=async_op)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`."""
        return self._run("reduce_scatter", send, self.inner.reduce_scatter, send, recv, op, async_op=async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        return self._run("gather", send, self.inner.gather, send, recv, root, async_op=async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        return self._run("scatter", recv, self.inner.scatter, send, recv, root, async_op=async_op)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        return self._run("all_to_all", send, self.inner.all_to_all, send, recv, async_op=async_op)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`."""
        group = f"{self._group}, {self.rank} to {peer}"
        return self._run("transfer", buffer, self.inner.send, buffer, peer, async_op=async_op, group=group)

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        group = f"{self._group}, {peer} to {self.rank}"
        return self._run("transfer", buffer, self.inner.recv, buffer, peer, async_op=async_op, group=group)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""

        def call(*, async_op: bool) -> Work:
            self.inner.barrier()
            return _DONE

        if self._on_device:
            self._recorder.await_device()
        self._run("barrier", None, call, async_op=False)
        if self._on_device:
            self._recorder.settle()

    def split(self, group: str, ranks: Sequence[int]) -> Communicator | None:
        """See :meth:`Communicator.split`."""
        try:
            inner = self.inner.split(group, ranks)
        except CommunicatorError as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from error
        if inner is None:
            return None
        self._adopted(inner)
        return GuardedCommunicator(
            inner,
            world_ranks=[self.world_ranks[rank] for rank in ranks],
            verdict=self._verdict,
            recorder=self._recorder,
            adopted=self._adopted,
            closed=self._closed,
        )

    def abort(self, error: Exception) -> None:
        """See :meth:`Communicator.abort`."""
        self.inner.abort(error)

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        try:
            self.inner.close()
        finally:
            self._closed(self.inner)


class _Done:
    """Work that is over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


_DONE = _Done()
