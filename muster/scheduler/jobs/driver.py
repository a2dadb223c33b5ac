"""Runs a job: one task takes its events and carries out its decisions, in order.

Records are made durable before any message is sent. All events that are waiting form one batch with one
commit, so that a thousand workers that join at the same time cost only a few commits. Messages to a worker
wait in its :class:`~muster.scheduler.jobs.stream.OutgoingStream`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.views import JobView
from muster.scheduler.errors import LimitError, RequestError, SchedulerError, StoppingError
from muster.scheduler.jobs.stream import OutgoingStream
from muster.scheduler.jobs.unread import unread_peers
from muster.wire import messages
from muster.wire.codec import AssignmentEncoder
from muster.wire.time_by_cause import spent_in_words

MAX_BATCH = 1024
LOSS_SETTLE_S = 0.01
"""Workers that die together, such as all workers of a host, are lost within this many seconds of each
other.
"""

PULSE_S = 0.5
"""The machine gets an event at least this often, in seconds, so that it learns when this process was
paused.
"""

LATE_S = 0.1
"""How late the periodic tick may be on a machine that is only busy, in seconds."""

DOUBT_S = 0.25
"""A worker that counts as silent is checked again after this many seconds, and is lost if it has still sent
nothing.
"""

LOSS_SETTLE_TIMES = 4
"""How many times in a row the driver waits for more losses: survivors must be told within 100 ms."""

TIME_SAID_EVERY_S = 600.0
"""How often the log says how a job's time was spent, in seconds. It also says so whenever a group is
established and when the job ends.
"""

STACKS_AT_ONCE = 4
"""The most operators that may wait for stacks of one job at the same time."""

PUT_OFF_S = 1.0
"""How often workers are told that the journal cannot be written at present, in seconds, so that they keep
waiting for the decision.
"""


class JobMachine(Protocol):
    """The part of :class:`muster.scheduler.core.machine.Machine` that the driver uses."""

    def step(self, event: events.Event, now: float, *, more: bool = False) -> Decision:
        """Handles one event; returns the decision. ``more``: the job advances only with the next event."""

    def deadline(self) -> float | None:
        """The time at which the machine needs a Tick, on the clock of ``now``; None if it needs none."""

    def overdue(self, now: float) -> Sequence[events.SessionId]:
        """The sessions of the workers that a Tick at ``now`` would declare lost because of their silence."""

    def view(self, now: float) -> JobView:
        """The job as ``status`` shows it."""

    def weigh_drain(self, node_ids: Collection[str], hosts: Collection[str]) -> str:
        """Returns sentences that say what it would cost to drain these workers."""


class Timer(Protocol):
    """A callback that is due at some time."""

    def cancel(self) -> None:
        """Cancels the callback."""


class Clock(Protocol):
    """Time, and callbacks at given times; an asyncio event loop is one."""

    def time(self) -> float:
        """Seconds on a monotonic clock."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` at ``when``."""


@dataclass(frozen=True)
class Note:
    """An event for the log: ``kind`` is one word, ``text`` the sentence.

    ``generation`` is the job's newest. ``incident`` is the generation whose end began the present incident;
    0 if the job is not in an incident.
    """

    kind: str
    job_id: str
    text: str
    session: OutgoingStream | None = None
    code: str = ""
    generation: int = 0
    incident: int = 0


class RefusedByRulesError(RequestError):
    """The job's rules leave no place for this worker; the Refused message said why."""

    grpc_code = "FAILED_PRECONDITION"


@dataclass
class Counters:
    """Counts of what the job has done so far, for the metrics."""

    heartbeats: int = 0
    events: int = 0
    first_join_s: float | None = None
    formed_s: float | None = None
    formation_s: float | None = None
    build_s: float | None = None


@dataclass
class _Item:
    event: events.Event
    done: asyncio.Future[str] | None = None


Stepped = tuple[_Item, Decision]
"""An event and the decision that follows from it."""


@dataclass
class JobDriver:
    """Owns one job: its machine, its sessions and its timer.

    Args:
        job_id: the job.
        job: its machine.
        clock: the event loop, or a test's clock.
        make_durable: writes records; returns once they would survive a crash.
        note: called with each event that is worth a log line.
        unwritable: returns why nothing can be made durable at present; empty if nothing is known to prevent
            it.
        unread: given addresses of peers, returns those that have sent bytes that are not read yet.
        formed: the newest generation.
        formed_here: whether this process formed the newest generation, and not an earlier process before a
            restart.
        generation_over: why the newest generation is over, until another one is formed; empty if it is not
            over.
        encoder: the encoder of outgoing messages.
        incident: the generation that has ended without the job having recovered yet; 0 if there is none.
        keep: called with the evidence of a hang; returns immediately, and sets ``evidence`` later.
        evidence: a sentence that says where the evidence of the last hang is stored; empty if there is none.
    """

    job_id: str
    job: JobMachine
    clock: Clock
    make_durable: Callable[[Sequence[records.Record]], Awaitable[None]]
    note: Callable[[Note], None]
    sessions: dict[events.SessionId, OutgoingStream] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    ended: records.JobEnded | None = None
    formed: records.GenerationFormed | None = None
    formed_here: bool = False
    generation_over: str = ""
    on_ended: Callable[[JobDriver], None] = lambda driver: None
    unwritable: Callable[[], str] = lambda: ""
    unread: Callable[[Collection[str]], Collection[str]] = unread_peers
    encoder: AssignmentEncoder = field(default_factory=AssignmentEncoder)
    incident: int = 0
    keep: Callable[[JobDriver, events.Bundle], None] = lambda driver, bundle: None
    evidence: str = ""
    _stacks_for: dict[int, asyncio.Future[events.Bundle]] = field(default_factory=dict)
    _tickets: int = 0
    _queue: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)
    _timer: Timer | None = None
    _pulse: Timer | None = None
    _reason: str = ""
    _over: bool = False
    _awake_at: float = 0.0
    _stood_s: float = 0.0
    _held_up_s: float = 0.0
    _put_off: str = ""
    _put_off_at: float = 0.0
    _doubted: set[events.SessionId] = field(default_factory=set)
    _doubt_until: float = 0.0
    _time_due: float = math.inf
    _watchers: list[Callable[[records.Record], None]] = field(default_factory=list)

    def watch_records(self, watcher: Callable[[records.Record], None]) -> None:
        """Calls ``watcher`` with every record from now on, once the record is durable."""
        self._watchers.append(watcher)

    def admit(self, session: OutgoingStream) -> None:
        """Registers a stream, so that messages to its worker are sent on it from now on.

        Raises:
            StoppingError: the driver has stopped.
        """
        if self._over:
            raise StoppingError("The scheduler is stopping.")
        self.sessions[session.id] = session

    def carries(self, session: events.SessionId) -> bool:
        """Whether this session was admitted and has not been sent its last message yet."""
        return session in self.sessions

    def post(self, event: events.Event) -> None:
        """Enqueues an event without waiting for it."""
        self._queue.put_nowait(_Item(event))

    async def submit(self, event: events.Event) -> str:
        """Enqueues an event, waits until its decision is carried out, and returns the decision's reason.

        A stream that waits for each of its events before it reads the next one cannot flood the job.

        Raises:
            StoppingError: the driver has stopped.
        """
        if self._over:
            raise StoppingError("The scheduler is stopping.")
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Item(event, done))
        return await done

    async def ask_stacks(self, node_id: str = "") -> events.Bundle:
        """Asks one worker, or all, for stacks; returns the answers that came within ``GATHER_S`` seconds.

        Raises:
            LimitError: too many callers already wait for stacks.
            StoppingError: the driver has stopped.
        """
        if len(self._stacks_for) >= STACKS_AT_ONCE:
            raise LimitError(f"{STACKS_AT_ONCE} others ask for stacks of job {self.job_id} just now.")
        self._tickets += 1
        ticket = self._tickets
        answer = self._stacks_for[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self.submit(events.StacksRequested(ticket, node_id))
            bundle: events.Bundle = await answer
            return bundle
        finally:
            del self._stacks_for[ticket]

    async def run(self) -> None:
        """Handles events until cancelled. An error that it raises, such as a broken disk's, ends the job."""
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
        """The job in its present state."""
        view = self.job.view(self.clock.time())
        return replace(view, reason=self._put_off or view.reason, evidence=self.evidence)

    # ------------------------------------------------------------ inside

    def _gather(self, batch: list[_Item]) -> None:
        while len(batch) < MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())

    async def _settle(self, batch: list[_Item]) -> None:
        """Waits while more losses arrive, so that losses with a common cause lead to one new generation."""
        seen = 0
        for _ in range(LOSS_SETTLE_TIMES):
            losses = sum(isinstance(item.event, events.SessionLost | events.ProcessEnded) for item in batch)
            if losses == seen:
                return
            seen = losses
            await asyncio.sleep(LOSS_SETTLE_S)
            self._gather(batch)

    async def _handle(self, batch: list[_Item]) -> None:
        now = self.clock.time()
        stepped = self.decide(batch, now)
        await self.persist(stepped)
        self.carry_out(stepped, now)
        self._arm()

    def decide(self, batch: list[_Item], now: float) -> list[Stepped]:
        """Steps the machine with each event. The caller must then write the records and send the messages."""
        stood_s, held_up_s = self._stood_s + self._late(now), self._held_up_s
        self._stood_s = self._held_up_s = 0.0
        if stood_s:  # The pause is handled first, because it may have caused the waiting events.
            batch.insert(0, _Item(events.ProcessPaused(stood_s)))
        if held_up_s:
            batch.insert(0, _Item(events.HeldUp(held_up_s)))
        stepped: list[Stepped] = []
        over: set[events.SessionId] = set()
        ended = {item.event.session for item in batch if isinstance(item.event, events.SessionLost)}
        for item, more in zip(batch, _losses_to_come(batch), strict=True):
            if isinstance(item.event, events.Joined) and (
                item.event.session in over
                or item.event.session not in self.sessions
                or (item.event.session in ended and self._is_unknown(item.event.candidate))
            ):  # The stream has ended or has been sent its last message, so the Join could not be answered.
                stepped.append((item, Decision()))
                continue
            if isinstance(item.event, events.Tick):
                behind, doubtful = self.look(now)
                if behind is not None:
                    stepped.append((_Item(behind), self.job.step(behind, now)))
                elif doubtful:
                    stepped.append((item, Decision()))
                    continue
            decision = self.job.step(item.event, now, more=more)
            stepped.append((item, decision))
            over |= {
                to
                for to, message in decision.messages
                if isinstance(message, messages.Refused | messages.Ended)
            }
            self._count(item.event, now)
        return stepped

    def _is_unknown(self, candidate: messages.Candidate) -> bool:
        """Whether this worker's process has no place in the job."""
        process = candidate.node_id, candidate.incarnation
        known = (worker.candidate for worker in self.view().workers)
        return all((each.node_id, each.incarnation) != process for each in known)

    async def persist(self, stepped: Sequence[Stepped]) -> None:
        """Makes the records durable. No message may be sent before that, and none at all if it fails."""
        records = [record for _, decision in stepped for record in decision.records]
        last_words = any(
            isinstance(message, messages.Refused | messages.Ended)
            for _, decision in stepped
            for _, message in decision.messages
        )
        if records or last_words:  # Of several schedulers, only the leader may refuse a worker for good.
            self._pulse = self.clock.call_at(self._awake_at + PULSE_S, self._still_writing)
            try:
                await self.make_durable(records)
            finally:
                self._pulse.cancel()
            self._written()

    def _still_writing(self) -> None:
        """Measures pauses during a long write, and tells workers why they get no decision."""
        now, before = self.clock.time(), self._awake_at
        late_s = self._late(now)
        self._stood_s += late_s
        self._held_up_s += now - before - late_s
        self._pulse = self.clock.call_at(now + PULSE_S, self._still_writing)
        why = self.unwritable()
        if why and now >= self._put_off_at:
            self._put_off_at = now + PUT_OFF_S
            self._put_off = (
                f"The scheduler's journal cannot be written: {why} Joins and losses wait for that."
            )
            self._tell(self._put_off, undecided=True)

    def _written(self) -> None:
        if self._put_off:
            self._put_off = ""
            self._tell("The scheduler's journal can be written again.", undecided=False)

    def _tell(self, sentence: str, *, undecided: bool) -> None:
        here = len(self.sessions)
        message = messages.Waiting(here, here, sentence, undecided=undecided)
        for session in self.sessions.values():
            session.send(*self.encoder.encode_parts(message, 0))

    def _late(self, now: float) -> float:
        """How long this process was paused since the last call, in seconds; 0 if it was hardly late."""
        turn_s, self._awake_at = now - self._awake_at, now
        late_s = turn_s - PULSE_S
        if late_s <= LATE_S:
            return 0.0
        # A busy process ran for most of the time. A stopped process may not have run at all.
        return turn_s if late_s > PULSE_S / 2 else late_s

    def carry_out(self, stepped: Sequence[Stepped], now: float) -> None:
        """Sends and logs the decisions, and gives their reasons to the waiting callers of :meth:`submit`."""
        for item, decision in stepped:
            self._carry_out(item.event, decision, now)
            if item.done is not None and not item.done.done():
                item.done.set_result(decision.reason)

    def look(self, now: float) -> tuple[events.ReceiveBacklog | None, bool]:
        """Checks whether silent workers have sent bytes that this process has not read yet.

        It is called before a Tick declares workers lost.

        Returns:
            An event that names the workers with unread bytes, None if there are none; and whether the Tick
            must be put off, because it is not known yet whether this process is behind with reading.
        """
        overdue: dict[str, list[events.SessionId]] = {}  # Workers of one host may share a stream.
        for session_id in self.job.overdue(now):
            if (session := self.sessions.get(session_id)) is not None:
                overdue.setdefault(session.caller.address, []).append(session_id)
        if not overdue:
            self._doubted.clear()
            return None, False
        if now < self._doubt_until:
            return None, True
        unread = self.unread(overdue)
        if unread:
            return events.ReceiveBacklog(tuple(each for peer in unread for each in overdue[peer])), False
        known, self._doubted = self._doubted, {each for some in overdue.values() for each in some}
        if self._doubted <= known:
            return None, False
        # Bytes that were just read may still be in gRPC's threads. The time of this check shows how busy
        # the process is.
        looked_at = self.clock.time()
        self._doubt_until = looked_at + max(DOUBT_S, 2 * (looked_at - now))
        return None, True

    def write(
        self, kind: str, text: str, session: OutgoingStream | None = None, code: str = "", incident: int = 0
    ) -> None:
        """Logs an event, with its generation and the incident that it belongs to."""
        generation = 0 if self.formed is None else self.formed.generation
        self.note(Note(kind, self.job_id, text, session, code, generation, incident or self.incident))

    def _begin_incident(self, decision: Decision) -> None:
        """Starts an incident if the decision ends a generation, so that its log lines belong to it."""
        if self.formed is not None and not self.incident:
            ends = (records.GenerationEnded, records.GenerationFormed)
            if any(isinstance(record, ends) for record in decision.records):
                self.incident = self.formed.generation

    def _carry_out(self, event: events.Event, decision: Decision, now: float) -> None:
        self._begin_incident(decision)
        if isinstance(event, events.SessionLost):
            self._lost(event, decision)
        held = event.held_generation if isinstance(event, events.Joined) else 0
        for record in decision.records:
            self.observe(record, now, held)
        for session_id, message in decision.messages:
            session = self.sessions.get(session_id)
            if session is not None:
                self._deliver(session, message, event)
        # Periodic reports, such as who is missing, are repeated. A reason that a peer causes is logged only
        # when it changes.
        if decision.reason and (decision.reason != self._reason or isinstance(event, events.Tick)):
            self.write("decided", decision.reason)
        self._reason = decision.reason or self._reason
        for bundle in decision.bundles:
            self._hand_over(bundle)
        self._say_time(decision, now)
        if self.ended is not None:
            self.on_ended(self)

    def _say_time(self, decision: Decision, now: float) -> None:
        """Logs how the job's time was spent: at intervals, when a group is established, and at the end."""
        turns = records.GroupEstablished, records.JobEnded
        if now >= self._time_due or any(isinstance(record, turns) for record in decision.records):
            self._time_due = now + TIME_SAID_EVERY_S
            self._write_time(now)

    def _write_time(self, now: float) -> None:
        """Logs how the job's time was spent, for ``muster report``."""
        if spent := self.job.view(now).time_by_cause:
            self.write("time", spent_in_words(spent))

    def _hand_over(self, bundle: events.Bundle) -> None:
        if not bundle.ticket:
            self.keep(self, bundle)
        elif (answer := self._stacks_for.get(bundle.ticket)) is not None and not answer.done():
            answer.set_result(bundle)

    def _deliver(
        self, session: OutgoingStream, message: messages.SchedulerMessage, cause: events.Event
    ) -> None:
        if isinstance(message, messages.Welcome):
            self.write("joined", "as a spare" if message.spare else "", session)
        elif isinstance(message, messages.Assignment):
            session.generation, session.rank = message.generation, message.rank
        session.send(
            *self.encoder.encode_parts(message, session.held if session.takes_deltas else 0),
            of_generation=isinstance(message, messages.Assignment | messages.UniqueIds | messages.GroupBuilt),
            assigns=message.generation if isinstance(message, messages.Assignment) else 0,
        )
        if isinstance(message, messages.Refused):
            kind = "expelled" if message.code is messages.RefusalCode.EXPELLED else "refused"
            self.write(kind, message.sentence, session, message.code.name.lower())
            self._close(session, RefusedByRulesError(message.sentence))
        elif isinstance(message, messages.Ended):
            text = message.reason
            if isinstance(cause, events.LeftCleanly) and cause.session == session.id:
                text = "finished" if cause.finished else cause.reason
            self.write("left", text, session)
            self._close(session, None)

    def _close(self, session: OutgoingStream, error: SchedulerError | None) -> None:
        session.close(error)
        self.sessions.pop(session.id, None)

    def _lost(self, event: events.SessionLost, decision: Decision) -> None:
        session = self.sessions.pop(event.session, None)
        if session is not None:
            is_gone = any(isinstance(record, records.Removed) for record in decision.records)
            text = event.detail if is_gone else f"{event.detail}; its place is kept, if it has one"
            self.write("lost", text, session)

    def _count(self, event: events.Event, now: float) -> None:
        self.counters.events += 1
        if isinstance(event, events.Heard):
            self.counters.heartbeats += 1
        elif isinstance(event, events.Joined) and self.counters.first_join_s is None:
            self.counters.first_join_s = now

    def observe(self, record: records.Record, now: float, held_generation: int = 0) -> None:
        """Updates the counters and the newest generation from a durable record, and calls the watchers."""
        counters = self.counters
        if isinstance(record, records.GenerationFormed):
            counters.formed_s = now
            self.formed, self.generation_over = record, ""
            # A generation that a joining worker already holds was adopted, not formed here.
            self.formed_here = record.generation > held_generation
        elif isinstance(record, records.GenerationEnded):
            self.generation_over = record.reason
        elif isinstance(record, records.GroupEstablished):
            self.incident = 0
            if counters.formed_s is not None:
                counters.build_s = now - counters.formed_s
            if counters.formation_s is None and counters.first_join_s is not None:
                counters.formation_s = now - counters.first_join_s
        elif isinstance(record, records.JobEnded):
            self.ended = record
            self.generation_over = record.reason
        for watcher in self._watchers:
            watcher(record)

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
        self.post(events.Tick())

    def _stop(self, batch: list[_Item]) -> None:
        self._over = True
        if self.ended is None:
            self._write_time(self.clock.time())
        if self._timer is not None:
            self._timer.cancel()
        self._put_off = ""
        while not self._queue.empty():
            batch.append(self._queue.get_nowait())
        for item in batch:
            if item.done is not None and not item.done.done():
                item.done.set_exception(StoppingError("The scheduler is stopping."))
        for answer in self._stacks_for.values():
            if not answer.done():
                answer.set_exception(StoppingError("The scheduler is stopping."))
        for session in list(self.sessions.values()):
            session.close(StoppingError("The scheduler is stopping."))


def _losses_to_come(batch: Sequence[_Item]) -> list[bool]:
    """Returns for each event whether it is a loss that is followed by another loss; ignores heartbeats."""
    marks: list[bool] = []
    follows = False
    for item in reversed(batch):
        lost = isinstance(item.event, events.SessionLost | events.LeftCleanly | events.ProcessEnded)
        marks.append(lost and follows)
        if not isinstance(item.event, events.Heard):
            follows = lost
    return marks[::-1]
