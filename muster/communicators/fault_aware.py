"""Wraps a backend's communicator: records collectives, and turns failures into changes of members.

It turns "a connection broke" into "the membership changed" if that is the cause, and remembers the
last collectives for hang reports: which were issued, and which are over. On success it costs about a
microsecond per call.

The flight recorder numbers its entries within their group and generation. All ranks of the group count them
in the same way, so that the scheduler can compare the entries of two ranks. Heartbeats read them from another
thread, which must never call into CUDA: it would hang with a hanging GPU.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from muster.communicators.arrays import HOST, Array, Description, describe
from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import FINISHED, Work
from muster.errors import (
    ArrayError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    PeerFinishedError,
    PeerLostError,
)
from muster.wire.messages import Collective

KEPT_COLLECTIVES = 32

Verdict = Callable[[int, Exception], Exception]
"""Takes the world rank at fault (-1: unknown) and the error; returns the error to raise."""


# ---------------------------------------------------------------- what was issued


class Entry:
    """One collective in the flight recorder; computes expensive facts only when they are read."""

    __slots__ = (
        "_buffer_bytes",
        "_dtype",
        "begun",
        "group",
        "name",
        "on_device",
        "over",
        "place",
        "sequence",
        "work",
    )

    def __init__(
        self, sequence: int, name: str, group: str, buffer: Description | None, begun: float
    ) -> None:
        self.begun = begun
        self.sequence = sequence
        self.name = name
        self.group = group
        self._dtype, self._buffer_bytes = (
            ("", 0) if buffer is None else (buffer.dtype, buffer.size * buffer.itemsize)
        )
        self.work: Work | None = None
        """The issued collective; None while it is being issued."""
        self.on_device = False
        """Only the device knows whether it is over."""
        self.place = ""
        """Where its array is, in words; empty if it can be in only one place."""
        self.over = False

    @property
    def done(self) -> bool:
        """Whether the collective is known to be over."""
        return self.over or (not self.on_device and self.work is not None and self.work.done())

    def value(self) -> Collective:
        """The entry in the form of messages to the scheduler."""
        group, dtype = _printable(self.group)[:128], _printable(self._dtype + self.place)[:32]
        return Collective(self.sequence, self.name, group, dtype, self._buffer_bytes, self.done)


class FlightRecorder:
    """The last collectives of this worker in this generation, over all groups.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting_since: float | None = None
        self.awaited = 0  # async collectives that the training thread waits for
        self.waited_s = 0.0  # total, for others or for a device
        self._measures: list[weakref.WeakMethod[Callable[[], float | None]]] = []
        self._entries: deque[Entry] = deque(maxlen=KEPT_COLLECTIVES)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def begin(self, name: str, group: str, buffer: Description | None) -> Entry:
        """Begins an entry: a collective is issued."""
        self._counts[group] += 1
        entry = Entry(self._counts[group], name, group, buffer, self._clock())
        self._entries.append(entry)
        return entry

    def issued(self) -> tuple[Entry, ...]:
        """The collectives that are known to have been issued, for :meth:`settle`."""
        return tuple(self._entries)

    def await_device(self) -> None:
        """Notes that the host begins to wait for the device; :meth:`settle` ends that."""
        self._waiting_since = self._clock()

    def settle(self, issued: Iterable[Entry] | None = None) -> None:
        """Notes that the host has waited for the device: these collectives (None: all) have completed."""
        if self._waiting_since is not None:
            self.waited_s += self._clock() - self._waiting_since
        self._waiting_since = None
        for entry in self._entries if issued is None else issued:
            entry.over = entry.over or entry.on_device

    def waited_since(self, begun: float) -> None:
        """Notes that this worker's thread has waited for others since then."""
        self.waited_s += self._clock() - begun

    def measure_waits(self, take: Callable[[], float | None]) -> None:
        """See :meth:`Communicator.measure_waits`."""
        self._measures.append(weakref.WeakMethod(take))

    def take_device_wait(self) -> float | None:
        """Seconds for which the device waited for others in the last step; None: not measured."""
        self._measures = [each for each in self._measures if each() is not None]
        taken = [take() for each in self._measures if (take := each()) is not None]
        measured = [seconds for seconds in taken if seconds is not None]
        return sum(measured) if measured else None

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def clear(self) -> None:
        """Begins a new generation, in which all ranks count from 1."""
        self._entries.clear()
        self._counts.clear()
        self._waiting_since = None

    def hanging_s(self) -> float:
        """Seconds since the oldest unfinished collective was issued; 0: none is unfinished."""
        open_since = [entry.begun for entry in tuple(self._entries) if not (entry.on_device or entry.done)]
        waiting = self._waiting_since
        if waiting is not None:
            open_since.append(waiting)
        return self._clock() - min(open_since) if open_since else 0.0

    def late_s(self) -> float:
        """Seconds for which this worker's thread has waited in a collective; 0: it does not wait.

        If only a device knows what has completed: seconds since the last collective was issued.
        """
        newest = max((entry.begun for entry in tuple(self._entries) if entry.on_device), default=None)
        unsettled = any(entry.on_device and not entry.over for entry in tuple(self._entries))
        on_device_s = self._clock() - newest if newest is not None and unsettled else 0.0
        return max(self.hanging_s() if self.waits() else 0.0, on_device_s)

    def waits(self) -> bool:
        """Whether this worker's thread is blocked until others have come to a collective."""
        if self._waiting_since is not None or self.awaited > 0:
            return True
        newest = self._entries[-1] if self._entries else None
        return newest is not None and newest.work is None and not newest.over

    def recent(self, *, last_only: bool = False) -> tuple[Collective, ...]:
        """The last collectives, oldest first; with ``last_only``, only the very last."""
        entries = tuple(self._entries)
        return tuple(entry.value() for entry in (entries[-1:] if last_only else entries))


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


# ---------------------------------------------------------------- what broke it


class Explained:
    """Context in which an error of a collective is replaced by its cause: one object serves all blocks of a
    group.

    Args:
        verdict: asks whether a failure is a change of members.
        world_ranks: the world rank of each rank of the group.
    """

    def __init__(self, verdict: Verdict, world_ranks: Sequence[int]) -> None:
        self._verdict = verdict
        self._world_ranks = world_ranks

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises the cause in place of the error, unless the error is its own cause."""
        self.raise_other(error)

    def raise_other(self, error: BaseException | None) -> None:
        """Raises the cause of an error, unless the error is its own cause."""
        if isinstance(error, CommunicatorError):
            reason = self.reason(error)
            if reason is not error:
                raise reason from error

    def reason(self, error: CommunicatorError) -> Exception:
        """The cause of a failure: the error itself, or the change of members that caused it."""
        if isinstance(error, ArrayError | CollectiveMismatchError | PeerFinishedError):
            return error
        if not isinstance(error, PeerLostError | CommunicatorAbortedError | CollectiveTimeoutError):
            return self._verdict(-1, error)
        rank = error.rank if isinstance(error, PeerLostError) else -1
        return self._verdict(self._world_ranks[rank] if 0 <= rank < len(self._world_ranks) else -1, error)


class FaultAwareWork:
    """Work whose failure is replaced by its cause."""

    __slots__ = ("_guard", "_work")

    def __init__(self, work: Work, guard: FaultAwareCommunicator) -> None:
        self._work = work
        self._guard = guard

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""
        return self._work.done()

    def wait(self) -> None:
        """Waits until the result may be used.

        Raises:
            CommunicatorError: the collective failed.
            MembershipChanged: the generation is over.
        """
        recorder = self._guard.recorder
        recorder.awaited += 1
        begun = recorder.now()
        try:
            with self._guard.explained:
                self._work.wait()
        finally:
            recorder.awaited -= 1
            recorder.waited_since(begun)


class FaultAwareCommunicator(Communicator):
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
        recorder: FlightRecorder,
        adopted: Callable[[Communicator], None],
        closed: Callable[[Communicator], None],
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.on_device, self.capturable = inner.on_device, inner.capturable
        self.pre_multiplies, self.takes_host = inner.pre_multiplies, inner.takes_host
        self.membership = inner.membership
        self.world_ranks = tuple(world_ranks)
        self.recorder = recorder
        self.explained = Explained(verdict, self.world_ranks)
        self._verdict = verdict
        self._adopted = adopted
        self._closed = closed
        self._group = inner.membership.group

    @property
    def timeout_s(self) -> float:
        """Deadline of each collective, in seconds."""
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.inner.timeout_s = value

    def __getattr__(self, name: str) -> Any:
        """Attributes that only this backend has."""
        return getattr(self.inner, name)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """See :meth:`Communicator.group`."""
        with self.explained, self.inner.group():
            yield

    def mark(self) -> Callable[[], None] | None:
        """See :meth:`Communicator.mark`."""
        wait, issued = self.inner.mark(), self.recorder.issued()
        if wait is None:
            return None

        def wait_explained() -> None:
            self.recorder.await_device()
            with self.explained:
                wait()
            self.recorder.settle(issued)

        return wait_explained

    def measure_waits(self, take: Callable[[], float | None]) -> None:
        """See :meth:`Communicator.measure_waits`."""
        self.recorder.measure_waits(take)

    def note(self, name: str) -> None:
        """See :meth:`Communicator.note`."""
        entry = self.recorder.begin(name, self._group, None)
        entry.on_device, entry.work = self.on_device, FINISHED

    def _run(
        self,
        name: str,
        shown: Description | None,
        call: Callable[..., Work],
        *args: Any,
        async_op: bool,
        group: str = "",
    ) -> Work:
        entry = self.recorder.begin(name, group or self._group, shown)
        entry.on_device = self.on_device
        if self.takes_host and shown is not None:  # nothing else shows which communicator it was
            entry.on_device = shown.device != HOST
            entry.place = " on a GPU" if entry.on_device else " on the CPU"
        try:
            work = call(*args, async_op=async_op)
        except BaseException as error:
            try:
                self.explained.raise_other(error)
            finally:
                entry.over = True  # only now: until the cause is known, this rank waits for the others
            raise
        entry.work = work
        if not (async_op or entry.on_device):
            self.recorder.waited_since(entry.begun)
        return FaultAwareWork(work, self) if async_op else work

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        source = send if type(send) is Description else describe(send, "send")
        target = source if recv is send else recv
        return self._run("all_reduce", source, self.inner.all_reduce, source, target, op, async_op=async_op)

    def reduce(
        self,
        send: Array,
        recv: Array | None,
        op: ReduceOp,
        root: int,
        *,
        async_op: bool = False,
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        source = describe(send, "send")
        target = source if recv is send else recv
        return self._run("reduce", source, self.inner.reduce, source, target, op, root, async_op=async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        given = describe(buffer, "buffer")
        return self._run("broadcast", given, self.inner.broadcast, given, root, async_op=async_op)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        target = describe(recv, "recv")
        return self._run("all_gather", target, self.inner.all_gather, send, target, async_op=async_op)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`."""
        source, call = describe(send, "send"), self.inner.reduce_scatter
        return self._run("reduce_scatter", source, call, source, recv, op, async_op=async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        source = describe(send, "send")
        return self._run("gather", source, self.inner.gather, source, recv, root, async_op=async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        target = describe(recv, "recv")
        return self._run("scatter", target, self.inner.scatter, send, target, root, async_op=async_op)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        source = describe(send, "send")
        return self._run("all_to_all", source, self.inner.all_to_all, source, recv, async_op=async_op)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`."""
        group, given = f"{self._group}, {self.rank} to {peer}", describe(buffer, "buffer")
        return self._run("transfer", given, self.inner.send, given, peer, async_op=async_op, group=group)

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        group, given = f"{self._group}, {peer} to {self.rank}", describe(buffer, "buffer")
        return self._run("transfer", given, self.inner.recv, given, peer, async_op=async_op, group=group)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""

        def call(*, async_op: bool) -> Work:
            self.inner.barrier()
            return FINISHED

        if self.on_device:
            self.recorder.await_device()
        self._run("barrier", None, call, async_op=False)
        if self.on_device:
            self.recorder.settle()

    def split(self, group: str, ranks: Sequence[int]) -> Communicator | None:
        """See :meth:`Communicator.split`."""
        with self.explained:
            inner = self.inner.split(group, ranks)
        if inner is None:
            return None
        self._adopted(inner)
        return FaultAwareCommunicator(
            inner,
            world_ranks=[self.world_ranks[rank] for rank in ranks],
            verdict=self._verdict,
            recorder=self.recorder,
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
