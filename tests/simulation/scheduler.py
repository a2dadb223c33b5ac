"""The scheduler of the simulation: the real machine and its real driver, a disk that fails, and death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.records import decode_record, encode_record
from muster.scheduler.core.shortage import LONGEST_PAUSE_S
from muster.scheduler.core.views import JobView
from muster.scheduler.errors import JournalUnavailableError, NoSpaceError, SchedulerError
from muster.scheduler.jobs.adoption import AdoptingJob
from muster.scheduler.jobs.driver import JobDriver
from muster.scheduler.jobs.storage import Storage, WaitingStorage
from muster.wire import codec, messages
from tests.scheduler.core.transcript import show_record
from tests.simulation.loop import Process
from tests.simulation.network import Stream
from tests.simulation.scenario import HEARTBEAT_S, NODE_TIMEOUT_S, WAITING_HEARTBEAT_S

if TYPE_CHECKING:
    from tests.simulation.world import World

BROKEN_AFTER_S = 4.0
"""After so long without an answer a worker may give its stream up."""

DROWNED_PING_S = 2 * NODE_TIMEOUT_S
"""So long a worker waits for the answer to its ping."""

LOOKS_AGAIN_S = NODE_TIMEOUT_S + 1.5 * (WAITING_HEARTBEAT_S - HEARTBEAT_S) + 1.5 * HEARTBEAT_S
"""Of one that was behind it is known at the latest then whether it still is: so long workers without a place
may be silent."""

LATE_TURN_S = 1.0
"""How long each turn of the event loop takes in a flood; alone it is too short to break a stream."""

LATE_WRITE_S = 0.5
"""What was written so late was decided on what may be true no more."""

FAILED_AND_WRITTEN = "the disk says no, and has it"

SPINS = 20
"""So many Ticks at one and the same time are too many."""


class Watched:
    """The machine as its driver sees it; the judge looks on."""

    def __init__(self, scheduler: Scheduler, job: AdoptingJob) -> None:
        self.scheduler = scheduler
        self.world = scheduler.world
        self.job = job
        self.stepped: list[tuple[events.Event, Decision]] = []
        self.over: set[int] = set()
        self._ticks = (0.0, 0)

    @property
    def machine(self) -> Machine:
        return self.job.machine

    def step(self, event: events.Event, now: float, *, more: bool = False) -> Decision:
        world = self.world
        world.judge.arriving(event)
        if isinstance(event, events.ReceiveBacklog):
            self.scheduler.forgave_at = now
        settings = world.scenario.settings
        breaking_s = settings.breaking_pause_s or settings.node_timeout_s / 3
        if isinstance(event, events.ProcessPaused) and event.seconds >= breaking_s:
            self.scheduler.excused_at = now
        if isinstance(event, events.Tick):
            at, times = self._ticks
            self._ticks = (now, times + 1 if at == now else 1)
            if self._ticks[1] > SPINS:
                world.judge.fault("the deadline stays in the past: the scheduler would spin")
        decision = self.job.step(event, now, more=more)
        if world.trace is not None and (type(event) is not events.Heard or decision.reason):
            world.note(f"scheduler <- {_show_event(event)}")
            for record in decision.records:
                world.note(f"           * {show_record(record)}")
            if decision.reason:
                world.note(f"           = {decision.reason}")
        for session, message in decision.messages:
            final = isinstance(
                message, messages.Refused | messages.Ended
            )  # two goodbyes at once have two answers
            world.judge.expect(final or session not in self.over, f"a message follows the last on {session}")
            if final:
                self.over.add(session)
        self.stepped.append((event, decision))
        world.judge.decided(decision)
        return decision

    def deadline(self) -> float | None:
        """The driver asks for it when all is carried out."""
        stepped, self.stepped = self.stepped, []
        if self.scheduler.up and self.scheduler.leads():  # else none of it is carried out
            if self.machine.outcome is None:
                self.world.judge.check_indexes(self.machine.job)
            for event, decision in stepped:
                self.world.judge.stepped(event, decision, alone=len(stepped) == 1)
        return self.job.deadline()

    def overdue(self, now: float) -> Sequence[events.SessionId]:
        return self.job.overdue(now)

    def view(self, now: float) -> JobView:
        return self.job.view(now)

    def weigh_drain(self, node_ids: Collection[str], hosts: Collection[str]) -> str:
        return self.job.weigh_drain(node_ids, hosts)


class Disk:
    """The storage of the process of this moment, on the disk that survives it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def load(self) -> Mapping[str, Sequence[records.Record]]:
        return {"job": self._scheduler.disk}

    async def append(self, job_id: str, records: Sequence[records.Record]) -> None:
        await self._scheduler.write(records)

    async def forget(self, job_id: str) -> None:
        self._scheduler.disk.clear()

    async def notes(self) -> Mapping[str, str]:
        return {}

    async def note(self, name: str, text: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Scheduler:
    """A process with the driver of one job, and what survives it: the disk."""

    watched = Watched

    def __init__(self, world: World) -> None:
        self.world = world
        self.disk: list[records.Record] = []
        self.streams: dict[int, Stream] = {}
        self.up = False
        self.up_since = 0.0
        self.started_at = 0.0
        self.excused_at = 0.0
        self.crashes_left = 3
        self.paused_until = 0.0
        self.deaf_until = 0.0
        self.is_late = False
        self.forgave_at = 0.0
        self.quiet = False
        self.broken_until = 0.0
        self.no_space_until = 0.0
        self.held_up_at = self.held_up_for_s = 0.0
        self._late_writes: list[tuple[float, float]] = []
        self.writing, self.writing_since = False, 0.0
        self.next_write = ""
        self._dies_after: int | None = None
        self._tasks: list[asyncio.Task[None]] = []  # of the dead as well: what is left of them stays quiet

    def leads(self) -> bool:
        """Whether the job is this process's."""
        return True

    @property
    def leading(self) -> Scheduler | None:
        """Whom a launcher's word reaches."""
        return self

    def start(self) -> None:
        """Comes up for the first time."""
        self._begin(())

    def _begin(self, records: Sequence[records.Record]) -> None:
        self.process = Process(self.world.loop)
        self._drive(records)

    def _drive(self, records: Sequence[records.Record]) -> None:
        """Starts the driver of a job with these records, in this process."""
        job = AdoptingJob("job", self.world.scenario.settings, records, self.world.loop.now, adopt=False)
        self.job = self.watched(self, job)
        storage = WaitingStorage(self._storage(), self.process.time)
        self.driver = JobDriver(
            "job",
            self.job,
            self.process,
            lambda records: self._make_durable(storage, records),
            lambda note: None,
            unwritable=lambda: storage.unwritable,
            unread=self._unread,
            encoder=codec.AssignmentEncoder(delta_from=1),
        )
        self.up = True
        self.writing = False
        self._dies_after = None
        task = asyncio.Task(self.driver.run(), loop=self.process.asyncio)
        self._tasks.append(task)
        task.add_done_callback(self._stopped)

    # ------------------------------------------------------------ events

    def feed(self, event: events.Event) -> None:
        """An event arrives."""
        if isinstance(event, events.Joined) and event.session in self.streams:
            self.driver.sessions[event.session] = self.streams[event.session]  # type: ignore[assignment]
        asyncio._set_running_loop(self.process.asyncio)
        try:
            self.driver.post(event)
        finally:
            asyncio._set_running_loop(None)

    def lost(self, stream: Stream, detail: str, *, may_return: bool = False) -> None:
        """The end of a stream has come through."""
        known = self.up and self.streams.pop(stream.session, None) is not None
        if known and stream.session in self.driver.sessions:
            self.feed(events.SessionLost(stream.session, detail, may_return))

    def sending(self) -> bool:
        """Whether the process lives to send one more message."""
        if self._dies_after is not None:
            self._dies_after -= 1
            if self._dies_after < 0:
                self.crash("between two messages")
        return self.up

    # ------------------------------------------------------------ the disk

    def _storage(self) -> Storage:
        return Disk(self)

    async def _make_durable(self, storage: WaitingStorage, records: Sequence[records.Record]) -> None:
        self.writing, self.writing_since = True, self.world.loop.now
        await storage.append("job", records)
        self.writing = False
        now = self.world.loop.now
        if now > self.writing_since + LATE_WRITE_S:
            self.held_up_at, self.held_up_for_s = now, now - self.writing_since
            self._late_writes.append((self.writing_since, now))

    def held_up_s(self) -> float:
        """How old what it decided last may be: it has tried to write that, or heard late what it rests on."""
        now = self.world.loop.now
        late_s = self.held_up_for_s if now < self.held_up_at + 1.0 else 0.0
        return late_s + (now - self.writing_since if self.writing else 0.0)

    def held_up_since(self, since: float) -> float:
        """For how long it has waited for its journal from then on, in seconds: it has heard nobody then."""
        under_way = [(self.writing_since, self.world.loop.now)] if self.writing else []
        spans = ((max(begun, since), until) for begun, until in (*self._late_writes, *under_way))
        return sum(until - begun for begun, until in spans if until > begun)

    def lacked_space(self) -> bool:
        """Whether there was no space for the journal, ever."""
        return self.no_space_until > 0.0

    async def write(self, records: Sequence[records.Record]) -> None:
        """One try to write records to the disk."""
        world, process = self.world, self.process
        if not records:  # one scheduler need not make sure that it leads
            return
        crash = self._crash_point()
        if crash == "before the commit":
            self.crash(crash)
        await asyncio.sleep(world.network.delay())
        if not process.alive:
            return
        if world.loop.now < self.no_space_until:
            raise NoSpaceError("The disk is full.")
        failure, self.next_write = self.next_write, ""
        if world.loop.now < self.broken_until:
            failure = "the disk fails"
        if not failure or failure == FAILED_AND_WRITTEN:
            self.disk += records
            world.judge.committed(tuple(records))
        if failure:
            raise JournalUnavailableError(failure)
        if crash == "after the commit":
            self.crash(crash)
        elif crash:
            self._dies_after = world.rng.randint(1, 4)

    def _crash_point(self) -> str:
        rng = self.world.rng
        if self.crashes_left <= 0 or self.quiet or rng.random() >= self.world.scenario.commit_crash:
            return ""
        return rng.choice(("before the commit", "after the commit", "between two messages"))

    def break_disk(self, seconds: float) -> None:
        """Whatever is written fails for so long."""
        self.broken_until = max(self.broken_until, self.world.loop.now + seconds)
        self.world.judge.disturbed(self.broken_until)

    def fill_disk(self, seconds: float) -> None:
        """There is no space for so long."""
        self.no_space_until = max(self.no_space_until, self.world.loop.now + seconds)
        self.world.judge.disturbed(self.no_space_until + LONGEST_PAUSE_S)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """The driver has ended: without a journal the process goes; a fault of its own is one of ours."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, NoSpaceError):
            self.world.judge.fault("a scheduler gives up for want of space")
        if isinstance(error, SchedulerError):
            self._die(f"because {error}", check=False)
        elif error is not None:
            self.process.error = error

    # ------------------------------------------------------------ time

    def _unread(self, addresses: Collection[str]) -> Collection[str]:
        """What the kernel says; where turns are late the words have been read from it."""
        if self.is_late and self.world.loop.now < self.deaf_until:
            return []
        by_address = {stream.caller.address: stream for stream in self.streams.values()}
        return [each for each in addresses if each in by_address and by_address[each].unread]

    def pause(self, seconds: float) -> None:
        """It stands still: what comes waits, and workers give their streams up after a while."""
        world = self.world
        now = world.loop.now
        if now < self.paused_until:
            return
        self.paused_until = self.process.stopped_until = now + seconds
        self.up_since = max(self.up_since, self.paused_until)
        world.judge.disturbed(self.paused_until)
        for stream in self.streams.values():
            if seconds > BROKEN_AFTER_S and world.rng.random() < 0.7:
                when = now + world.rng.uniform(BROKEN_AFTER_S, seconds)
                world.loop.at(when, world.network.break_up, stream, "keepalive")

    def drown(self, seconds: float, *, late: bool) -> None:
        """It reads nothing for so long. The kernel says so; or its turns are late, and it knows by that."""
        world = self.world
        now = world.loop.now
        if now < max(self.deaf_until, self.paused_until):
            return
        self.deaf_until = now + seconds
        self.is_late = late
        self.up_since = max(self.up_since, self.deaf_until)
        world.judge.disturbed(self.deaf_until)
        if late:
            self._turn_late(self.process)
        for stream in self.streams.values():
            if seconds > DROWNED_PING_S and world.rng.random() < 0.7:
                when = now + world.rng.uniform(DROWNED_PING_S, seconds)
                world.loop.at(when, world.network.break_up, stream, "ping timeout")

    def _turn_late(self, process: Process) -> None:
        """One turn of the loop: whatever is due comes at its end."""
        now = self.world.loop.now
        if process.alive and now < self.deaf_until:
            process.stopped_until = max(process.stopped_until, now + LATE_TURN_S)
            self.world.loop.at(process.stopped_until + 0.001, self._turn_late, process)

    def forgives(self) -> bool:
        """Whether a stream that ends now may have broken while the scheduler stood still, or was behind."""
        since, now = max(self.paused_until, self.deaf_until, self.excused_at), self.world.loop.now
        was_behind = self.forgave_at > 0.0 and now <= self.forgave_at + LOOKS_AGAIN_S
        return was_behind or (since > 0.0 and now <= since + NODE_TIMEOUT_S)

    # ------------------------------------------------------------ death

    def crash(self, when: str) -> None:
        """SIGKILL: memory and streams are gone, the disk stays."""
        self.crashes_left -= 1
        self._die(when, check=not self.writing and not self.job.stepped)

    def _die(self, why: str, *, check: bool) -> None:
        if not self.up:
            return
        world = self.world
        world.note(f"!! scheduler dies {why}")
        if check:
            world.judge.check_recovery(self.job.machine, self._records())
        self.up = False
        self.process.kill(self._tasks)
        self.paused_until = self.deaf_until = self.forgave_at = self.excused_at = 0.0
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            world.network.closed_by_scheduler(stream, "connection reset")
        world.judge.disturbed()
        world.loop.after(world.rng.choice((0.05, 0.5, 2.0)), self.restart)

    def restart(self) -> None:
        """Comes up again on the same disk."""
        world = self.world
        world.note("!! scheduler starts again")
        self.up_since = self.started_at = world.loop.now
        self._begin(self._records())

    def _records(self) -> list[records.Record]:
        """What the disk holds, through the journal's codec."""
        lines = [json.dumps(encode_record(record)) for record in self.disk]
        self.world.judge.check_secrecy(lines)
        return [decode_record(json.loads(line)) for line in lines]


def _show_event(event: events.Event) -> str:
    if isinstance(event, events.Joined):
        candidate = event.candidate
        return (
            f"Joined({event.session}, {candidate.node_id}#{candidate.incarnation}, "
            f"held {event.held_generation}/{event.held_rank}, built={event.built}, step={event.step})"
        )
    return repr(event)
