"""An in-process communicator and session: ranks are threads, nothing touches a network or a clock."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from muster.communicators.arrays import Array
from muster.communicators.base import Communicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import CommunicatorAbortedError, LeaveGranted, MembershipChanged

T = TypeVar("T")
_LAUNCHES = itertools.count(1)

_REDUCE: dict[ReduceOp, Callable[[Any], Any]] = {
    ReduceOp.SUM: lambda parts: np.sum(parts, axis=0),
    ReduceOp.MEAN: lambda parts: np.mean(parts, axis=0),
    ReduceOp.MIN: lambda parts: np.min(parts, axis=0),
    ReduceOp.MAX: lambda parts: np.max(parts, axis=0),
    ReduceOp.PROD: lambda parts: np.prod(parts, axis=0),
}


class Meeting:
    """Where the ranks of one fake world exchange what they bring: the n-th call meets the n-th calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: Exception | None = None
        self._calls: dict[int, dict[int, Any]] = {}
        self._changed = threading.Condition()

    def exchange(self, call: int, rank: int, brought: Any) -> list[Any]:
        with self._changed:
            if self.error is not None:
                raise self.error
            parts = self._calls.setdefault(call, {})
            parts[rank] = brought
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(parts) == self.size or self.error is not None, timeout=60)
            if len(parts) < self.size:
                raise self.error or AssertionError(f"call {call}: only ranks {sorted(parts)} came")
            return [parts[r] for r in range(self.size)]

    def abort(self, error: Exception) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


class FakeWork:
    """A collective that a thread of the communicator does."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result(timeout=60)


class FakeCommunicator(Communicator):
    """Collectives among threads. ``log`` keeps (name, elements) of what was called, in order."""

    name = "fake"
    timeout_s = 60.0

    def __init__(self, membership: Membership, meeting: Meeting) -> None:
        self.membership = membership
        self.log: list[tuple[str, int]] = []
        self._meeting = meeting
        self._calls = 0
        self._thread = ThreadPoolExecutor(1)

    def _issue(
        self, name: str, brought: Array, size: int, finish: Callable[[list[Any]], None], async_op: bool
    ) -> FakeWork:
        self.log.append((name, size))
        call, self._calls = self._calls, self._calls + 1

        def work() -> None:
            copy = None if brought is None else np.array(brought)
            parts = self._meeting.exchange(call, self.rank, (name, copy))
            assert {part[0] for part in parts} == {name}, "the ranks called different collectives"
            finish([part[1] for part in parts])

        future = self._thread.submit(work)
        issued = FakeWork(future)
        if not async_op:
            issued.wait()
        return issued

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> FakeWork:
        def finish(parts: list[Any]) -> None:
            recv[...] = _REDUCE[op](np.stack(parts)).astype(recv.dtype)

        return self._issue("all_reduce", send, send.size, finish, async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> FakeWork:
        def finish(parts: list[Any]) -> None:
            buffer[...] = parts[root]

        return self._issue("broadcast", buffer, buffer.size, finish, async_op)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> FakeWork:
        def finish(parts: list[Any]) -> None:
            recv.reshape(-1)[...] = np.concatenate([part.reshape(-1) for part in parts])

        return self._issue("all_gather", send, send.size, finish, async_op)

    def barrier(self) -> None:
        self._issue("barrier", None, 0, lambda parts: None, False)

    @property
    def is_aborted(self) -> bool:
        return self._meeting.error is not None

    def abort(self, error: Exception) -> None:
        self._meeting.abort(error)

    def close(self) -> None:
        self._meeting.abort(CommunicatorAbortedError("The communicator is closed."))
        self._thread.shutdown()

    def _unused(self, *args: Any, **options: Any) -> Any:
        """What no test asks of it."""
        raise NotImplementedError

    reduce = reduce_scatter = gather = scatter = all_to_all = send = recv = split = _unused


def fake_communicators(size: int, *, generation: int = 1) -> list[FakeCommunicator]:
    """Makes the communicators of all ranks of one generation."""
    peers = tuple(Peer(r, f"node{r}", r, "host", "host", "") for r in range(size))
    membership = Membership("job", generation, "world", 0, peers)
    meeting = Meeting(size)
    return [FakeCommunicator(replace(membership, rank=r), meeting) for r in range(size)]


def run_ranks(size: int, body: Callable[[int], T]) -> list[T]:
    """Runs ``body(rank)`` in one thread per rank; returns the results, or raises the lowest rank's error."""
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(body, rank) for rank in range(size)]
        return [future.result(timeout=60) for future in futures]


def results_or_errors(size: int, body: Callable[[int], T]) -> list[T | Exception]:
    """Like :func:`run_ranks`, with a rank's exception in place of its result."""

    def guarded(rank: int) -> T | Exception:
        try:
            return body(rank)
        except Exception as error:
            return error

    return run_ranks(size, guarded)


class FakeSession:
    """What the training helpers use of a session, in one fixed generation."""

    def __init__(self, communicator: FakeCommunicator) -> None:
        self.communicator = communicator

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def generation(self) -> int:
        return self.communicator.membership.generation


def fake_sessions(size: int) -> list[FakeSession]:
    """Sessions of all ranks of one world."""
    return [FakeSession(communicator) for communicator in fake_communicators(size)]


def membership_changed(generation: int) -> MembershipChanged:
    """The error that ends a generation."""
    return MembershipChanged(f"Generation {generation} is over.", generation=generation)


class ElasticWorld:
    """Plays the scheduler for threads: members die, come and leave, generations follow each other.

    Args:
        size: how many members there are at first.
        least: MS_WORKER_MIN: a planned change that would leave fewer suspends the job.
    """

    def __init__(self, size: int, *, least: int = 1) -> None:
        self.changed = threading.Condition()
        self.launch = next(_LAUNCHES)
        self.least = least
        self.dismissed: list[ElasticFakeSession] = []
        self.generation = 0
        self.members: list[ElasticFakeSession] = []
        self.switch_after: int | None = None
        self.final_error: Exception | None = None
        self._planned: list[ElasticFakeSession] = []
        self._planned_newcomers: list[ElasticFakeSession] = []
        self._numbers = iter(range(1000))
        with self.changed:
            self.form([self._member() for _ in range(size)], newcomers=[])

    def kill(self, dead: ElasticFakeSession, *, replace: bool = False) -> ElasticFakeSession | None:
        """A member is gone without a word; its place may be taken by a new one, which is returned."""
        with self.changed:
            survivors = [member for member in self.members if member is not dead]
            newcomer = self._member() if replace else None
            newcomers = [newcomer] if newcomer else []
            self.form(survivors + newcomers, newcomers)
            return newcomer

    def plan(self, *, leaver: ElasticFakeSession | None = None) -> ElasticFakeSession | None:
        """A member asked to leave, or (without ``leaver``) one comes: the change happens between steps."""
        with self.changed:
            assert self.switch_after is None, "one planned change at a time"
            self.switch_after = max(member.started for member in self.members)
            newcomer = None if leaver else self._member()
            self._planned = [member for member in self.members if member is not leaver]
            self._planned_newcomers = [newcomer] if newcomer else []
            return newcomer

    def come(self) -> ElasticFakeSession:
        """One comes while the job is suspended, which goes on with it."""
        with self.changed:
            newcomer = self._member()
            self.form([*self.members, newcomer], [newcomer])
            return newcomer

    def end(self, error: Exception) -> None:
        """The job cannot go on: every rejoin raises ``error``."""
        with self.changed:
            self.final_error = error
            self.members[0].communicator.abort(membership_changed(self.generation))
            self.changed.notify_all()

    def _member(self) -> ElasticFakeSession:
        return ElasticFakeSession(self, next(self._numbers))

    def form(self, members: list[ElasticFakeSession], newcomers: list[ElasticFakeSession]) -> None:
        if self.members:
            self.members[0].offered[0].abort(membership_changed(self.generation))
        self.generation += 1
        self.switch_after = None
        self.members = members
        ranks = tuple(rank for rank, member in enumerate(members) if member in newcomers)
        holders = [rank for rank in range(len(members)) if rank not in ranks]
        source = holders[0] if holders and self.generation > 1 else -1
        communicators = fake_communicators(len(members), generation=self.generation)
        for member, communicator in zip(members, communicators, strict=True):
            member.offered = (communicator, source, ranks)
        self.changed.notify_all()

    def switch(self) -> None:
        """The planned change happens, once."""
        if self.switch_after is None:
            return
        staying = self._planned + self._planned_newcomers
        if len(staying) >= self.least:
            self.form(staying, self._planned_newcomers)
            return
        # Those who stay wait in rejoin() for others, with the step under way given up.
        self.dismissed += [member for member in self.members if member not in staying]
        self.members[0].offered[0].abort(membership_changed(self.generation))
        self.members, self.switch_after = staying, None
        self.changed.notify_all()


class ElasticFakeSession:
    """One member of an :class:`ElasticWorld`; joins its first generation when first used."""

    offered: tuple[FakeCommunicator, int, tuple[int, ...]]
    """The newest generation, whether or not it was entered: communicator, state source, newcomers."""

    def __init__(self, world: ElasticWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.started = 0
        self.reports: list[int] = []
        self.of_all: list[tuple[int, int, int]] = []
        self.leave_reasons: list[str] = []
        self.expected_leave = ""
        self.left = False
        self._entered: tuple[FakeCommunicator, int, tuple[int, ...]] | None = None

    @property
    def entered(self) -> tuple[FakeCommunicator, int, tuple[int, ...]]:
        if self._entered is None:
            self.rejoin()
        assert self._entered is not None
        return self._entered

    @property
    def communicator(self) -> FakeCommunicator:
        return self.entered[0]

    @property
    def state_source_rank(self) -> int:
        return self.entered[1]

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        return self.entered[2]

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def launch(self) -> int:
        return self.world.launch

    @property
    def membership_event(self) -> object | None:
        return self.world.switch_after

    def step_boundary(self, step: int) -> None:
        with self.world.changed:
            switch_after = self.world.switch_after
            if switch_after is not None and step >= switch_after:
                self.world.switch()
            if self not in self.world.members:
                raise LeaveGranted("This worker leaves the job.", alone=self in self.world.dismissed)
            if self.offered is not self.entered or self.communicator.is_aborted:
                raise membership_changed(self.communicator.membership.generation)
            self.started = step + 1

    def report(
        self,
        step: int | None = None,
        samples_per_s: float = 0.0,
        *,
        steps: int = 0,
        epoch: int = 0,
        epochs: int = 0,
        loss: float | None = None,
        learning_rate: float | None = None,
        data_s: float = 0.0,
    ) -> None:
        if step is None:  # a loss alone
            return
        self.reports.append(step)
        self.of_all.append((steps, epoch, epochs))

    def busy(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report_checkpoint(self, step: int, *, size_bytes: int = 0, seconds: float = 0.0) -> None:
        pass

    def expect_leave(self, reason: str) -> None:
        self.expected_leave = reason

    def request_leave(self, reason: str) -> None:
        self.leave_reasons.append(reason)
        self.world.plan(leaver=self)

    def note_left(self) -> None:
        self.left = True

    def rejoin(self) -> None:
        with self.world.changed:
            self.world.changed.wait_for(
                lambda: (
                    self.world.final_error
                    or self in self.world.dismissed
                    or (hasattr(self, "offered") and self.offered is not self._entered)
                ),
                timeout=60,
            )
            if self in self.world.dismissed:
                raise LeaveGranted("This worker leaves the job.", alone=True)
            if self.world.final_error:
                raise self.world.final_error
            self._entered = self.offered
