"""Runs one job's state machine: one task takes its events and carries out its decisions, in order.

Records are made durable before any message is sent. Events that wait together are stepped together, so
that a thousand workers who join at once cost a few commits and not a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import messages as v
from muster.scheduler.core import records as r
from muster.scheduler.core.events import Decision
from muster.scheduler.core.members import JobView
from muster.scheduler.errors import RequestError, SchedulerError, StoppingError
from muster.scheduler.jobs.unread import unread_peers
from muster.scheduler.serve.stream import Session
from muster.scheduler.wire import AssignmentEncoder

MAX_BATCH = 1024
LOSS_SETTLE_S = 0.01
"""Whoever dies with others, as all workers of a host do, is lost within this time of the one before."""

PULSE_S = 0.5
"""The machine gets an event at least so often, so that it can be told when this process stood still."""

LATE_S = 0.1
"""By so much a pulse may be late on a machine that is merely busy."""

DOUBT_S = 0.25
"""Who counts as silent is looked at again after this time, and lost if nothing has come meanwhile."""

LOSS_SETTLE_TIMES = 4
"""So often at most is it waited for more losses: survivors are to be told within 100 ms."""


class Machine(Protocol):
    """What the driver needs of :class:`muster.scheduler.core.job.Job`."""

    def step(self, event: e.Event, now: float, *, more: bool = False) -> Decision:
        """Takes one event and says what follows; ``more``: together with the next one."""

    def deadline(self) -> float | None:
        """When the machine wants a Tick, on the clock of ``now``."""

    def overdue(self, now: float) -> Sequence[v.SessionId]:
        """The streams whose workers the next Tick would declare lost for their silence."""

    def view(self, now: float) -> JobView:
        """The job as status shows it."""


class Timer(Protocol):
    """A callback to come."""

    def cancel(self) -> None:
        """Makes it not come."""


class Clock(Protocol):
    """Time, and callbacks at a time; an asyncio event loop is one."""

    def time(self) -> float:
        """Seconds on a monotonic clock."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls back at ``when``."""


@dataclass(frozen=True)
class Note:
    """Something worth a line in the log: ``kind`` is one word, ``text`` the sentence."""

    kind: str
    job_id: str
    text: str
    session: Session | None = None
    code: str = ""


class RefusedByRulesError(RequestError):
    """The job's rules leave this worker no place; the Refused message has told it why."""

    grpc_code = "FAILED_PRECONDITION"


@dataclass
class Counters:
    """What the job did so far, for the metrics."""

    heartbeats: int = 0
    events: int = 0
    first_join_s: float | None = None
    formed_s: float | None = None
    formation_s: float | None = None
    build_s: float | None = None


@dataclass
class _Item:
    event: e.Event
    done: asyncio.Future[str] | None = None


@dataclass
class JobDriver:
    """Owns one job: its machine, its sessions and its timer.

    Args:
        job_id: the job.
        job: its machine.
        clock: the event loop, or a test's clock.
        make_durable: writes records down; returns once they would survive a crash.
        note: told about everything worth a line.
        unread: of these addresses of peers, those whose bytes have arrived and are not read yet.
    """

    job_id: str
    job: Machine
    clock: Clock
    make_durable: Callable[[Sequence[r.Record]], Awaitable[None]]
    note: Callable[[Note], None]
    sessions: dict[v.SessionId, Session] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    ended: r.JobEnded | None = None
    on_ended: Callable[[JobDriver], None] = lambda driver: None
    unread: Callable[[Collection[str]], Collection[str]] = unread_peers
    _queue: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)
    _timer: Timer | None = None
    _encoder: AssignmentEncoder = field(default_factory=AssignmentEncoder)
    _reason: str = ""
    _over: bool = False
    _awake_at: float = 0.0
    _doubted: set[v.SessionId] = field(default_factory=set)
    _doubt_until: float = 0.0

    def post(self, event: e.Event) -> None:
        """Enqueues an event without waiting for it."""
        self._queue.put_nowait(_Item(event))

    async def submit(self, event: e.Event) -> str:
        """Enqueues an event, waits until it is carried out and returns the decision's reason.

        A stream that waits for each of its events before it reads the next can never flood the job.

        Raises:
            StoppingError: the job is carried on no longer.
        """
        if self._over:
            raise StoppingError("The scheduler is stopping.")
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Item(event, done))
        return await done

    async def run(self) -> None:
        """Works until cancelled; an error that leaves (disk full, a fault of the machine) ends the job."""
        self._awake_at = self.clock.time()
        self._arm()
        batch: list[_Item] = []
        try:
            while True:
                batch = [await self._queue.get()]
                self._gather(batch)
                await self._settle(batch)
                await self._handle(batch)
        finally:
            self._stop(batch)

    def view(self) -> JobView:
        """The job as it is now."""
        return self.job.view(self.clock.time())

    # ------------------------------------------------------------ inside

    def _gather(self, batch: list[_Item]) -> None:
        while len(batch) < MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())

    async def _settle(self, batch: list[_Item]) -> None:
        """Waits while losses keep coming, so that those of one cause make one generation."""
        seen = 0
        for _ in range(LOSS_SETTLE_TIMES):
            losses = sum(isinstance(item.event, e.SessionLost) for item in batch)
            if losses == seen:
                return
            seen = losses
            await asyncio.sleep(LOSS_SETTLE_S)
            self._gather(batch)

    async def _handle(self, batch: list[_Item]) -> None:
        now = self.clock.time()
        late_s, self._awake_at = now - self._awake_at - PULSE_S, now
        if late_s > LATE_S:  # told first: what waits here may be the consequence
            batch.insert(0, _Item(e.StoodStill(late_s)))
        stepped: list[tuple[_Item, Decision]] = []
        for item, more in zip(batch, _losses_to_come(batch), strict=True):
            if isinstance(item.event, e.Tick):
                behind, doubtful = self._look(now)
                if behind is not None:
                    stepped.append((_Item(behind), self.job.step(behind, now)))
                elif doubtful:
                    stepped.append((item, Decision()))
                    continue
            stepped.append((item, self.job.step(item.event, now, more=more)))
            self._count(item.event, now)
        records = [record for _, decision in stepped for record in decision.records]
        if records:
            await self.make_durable(records)
        for item, decision in stepped:
            self._carry_out(item.event, decision, now)
            if item.done is not None and not item.done.done():
                item.done.set_result(decision.reason)
        self._arm()

    def _look(self, now: float) -> tuple[e.FellBehind | None, bool]:
        """Looks, before a Tick has anybody lost for silence, whether it is we who have not listened.

        Returns:
            That we are behind, if so; and whether the Tick has to wait until that is clear.
        """
        overdue = {
            session.caller.address: session_id
            for session_id in self.job.overdue(now)
            if (session := self.sessions.get(session_id)) is not None
        }
        if not overdue:
            self._doubted.clear()
            return None, False
        if now < self._doubt_until:
            return None, True
        unread = self.unread(overdue)
        if unread:
            return e.FellBehind(tuple(overdue[peer] for peer in unread)), False
        known, self._doubted = self._doubted, set(overdue.values())
        if self._doubted <= known:
            return None, False
        # What was read just now is on its way through gRPC's threads. How busy they are, the look has shown.
        looked_at = self.clock.time()
        self._doubt_until = looked_at + max(DOUBT_S, 2 * (looked_at - now))
        return None, True

    def _carry_out(self, event: e.Event, decision: Decision, now: float) -> None:
        if isinstance(event, e.SessionLost):
            self._lost(event)
        for record in decision.records:
            self._observe(record, now)
        for session_id, message in decision.messages:
            session = self.sessions.get(session_id)
            if session is not None:
                self._deliver(session, message, event)
        # A report that is due (who is missing) is repeated; what peers bring about is said when it changes.
        if decision.reason and (decision.reason != self._reason or isinstance(event, e.Tick)):
            self.note(Note("decided", self.job_id, decision.reason))
        self._reason = decision.reason or self._reason
        if self.ended is not None:
            self.on_ended(self)

    def _deliver(self, session: Session, message: m.Message, cause: e.Event) -> None:
        if isinstance(message, m.Welcome):
            self.note(Note("joined", self.job_id, "as a spare" if message.spare else "", session))
        elif isinstance(message, m.Assignment):
            session.generation, session.rank = message.generation, message.rank
        session.send(
            *self._encoder.encode_parts(message),
            of_generation=isinstance(message, m.Assignment | m.UniqueIds | m.GroupBuilt),
            supersedes=isinstance(message, m.Assignment),
        )
        if isinstance(message, m.Refused):
            kind = "expelled" if message.code is m.RefusalCode.EXPELLED else "refused"
            self.note(Note(kind, self.job_id, message.sentence, session, message.code.name.lower()))
            self._close(session, RefusedByRulesError(message.sentence))
        elif isinstance(message, m.Ended):
            text = message.reason
            if isinstance(cause, e.LeftCleanly) and cause.session == session.id:
                text = "finished" if cause.finished else cause.reason
            self.note(Note("left", self.job_id, text, session))
            self._close(session, None)

    def _close(self, session: Session, error: SchedulerError | None) -> None:
        session.close(error)
        self.sessions.pop(session.id, None)

    def _lost(self, event: e.SessionLost) -> None:
        session = self.sessions.pop(event.session, None)
        if session is not None:
            self.note(Note("lost", self.job_id, event.detail, session))

    def _count(self, event: e.Event, now: float) -> None:
        self.counters.events += 1
        if isinstance(event, e.Heard):
            self.counters.heartbeats += 1
        elif isinstance(event, e.Joined) and self.counters.first_join_s is None:
            self.counters.first_join_s = now

    def _observe(self, record: r.Record, now: float) -> None:
        counters = self.counters
        if isinstance(record, r.GenerationFormed):
            counters.formed_s = now
        elif isinstance(record, r.GroupEstablished):
            if counters.formed_s is not None:
                counters.build_s = now - counters.formed_s
            if counters.formation_s is None and counters.first_join_s is not None:
                counters.formation_s = now - counters.first_join_s
        elif isinstance(record, r.JobEnded):
            self.ended = record

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.job.deadline()
        if deadline is not None:
            when = min(max(deadline, self._doubt_until), self._awake_at + PULSE_S)
            self._timer = self.clock.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(e.Tick())

    def _stop(self, batch: list[_Item]) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        while not self._queue.empty():
            batch.append(self._queue.get_nowait())
        for item in batch:
            if item.done is not None and not item.done.done():
                item.done.set_exception(StoppingError("The scheduler is stopping."))
        for session in list(self.sessions.values()):
            session.close(StoppingError("The scheduler is stopping."))


def _losses_to_come(batch: Sequence[_Item]) -> list[bool]:
    """Of each event, whether it is a loss and another follows it; heartbeats in between do not matter."""
    marks: list[bool] = []
    follows = False
    for item in reversed(batch):
        lost = isinstance(item.event, e.SessionLost)
        marks.append(lost and follows)
        if not isinstance(item.event, e.Heard):
            follows = lost
    return marks[::-1]
