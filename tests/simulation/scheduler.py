"""The scheduler of the simulation: the real job, a disk, and crashes at every commit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import records as r
from muster.scheduler.core.events import Decision
from muster.scheduler.core.job import Job
from muster.scheduler.core.records import decode_record, encode_record
from tests.scheduler.core.transcript import show_record
from tests.simulation.network import Stream
from tests.simulation.scenario import NODE_TIMEOUT_S

if TYPE_CHECKING:
    from tests.simulation.world import World

BROKEN_AFTER_S = 4.0
"""After so long without an answer a worker may give its stream up."""

DROWNED_PING_S = 2 * NODE_TIMEOUT_S
"""So long a worker waits for the answer to its ping."""

LATE_TURN_S = 1.0
"""How late each turn of the event loop is in a flood; alone it is too short to break a stream."""

SEND_FIRST = False
"""A mutant sets this: messages leave before the records are on disk."""


class Scheduler:
    """Carries out what the job decides, as the driver does: records first, then messages, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.job = Job("job", world.scenario.settings)
        self.disk: list[r.Record] = []
        self.streams: dict[int, Stream] = {}
        self.up = True
        self.up_since = 0.0
        self.crashes_left = 3
        self.paused_until = 0.0
        self.deaf_until = 0.0
        self.is_late = False
        self.forgave_at = 0.0
        self.quiet = False
        self._epoch = 0
        self._ticks = 0
        self._armed: float | None = None

    # ------------------------------------------------------------ events

    def feed(self, event: e.Event) -> None:
        """One event, all the way."""
        world = self.world
        if world.loop.now < self.paused_until:
            world.loop.at(self.paused_until, self._feed_late, self._epoch, event)
            return
        world.judge.arriving(event)
        decision = self.job.step(event, world.loop.now)
        if world.trace is not None and (type(event) is not e.Heard or decision.reason):
            world.note(f"scheduler <- {_show_event(event)}")
            for record in decision.records:
                world.note(f"           * {show_record(record)}")
            if decision.reason:
                world.note(f"           = {decision.reason}")
        crash = self._crash_point(decision)
        if SEND_FIRST:
            self._send(decision.messages)
        if crash == "before the commit":
            self.crash(crash)
            return
        if decision.records:
            self.disk += decision.records
            world.judge.committed(decision.records)
        if crash != "after the commit" and not SEND_FIRST:
            self._send(decision.messages if not crash else decision.messages[: len(decision.messages) // 2])
        world.judge.stepped(event, decision, self.job)
        if crash:
            self.crash(crash)
        else:
            self.arm()

    def _feed_late(self, epoch: int, event: e.Event) -> None:
        if self.up and epoch == self._epoch:
            self.feed(event)

    def _crash_point(self, decision: Decision) -> str:
        rng = self.world.rng
        if not decision.records or self.crashes_left <= 0 or self.quiet:
            return ""
        if rng.random() >= self.world.scenario.commit_crash:
            return ""
        return rng.choice(("before the commit", "after the commit", "between two messages"))

    def _send(self, messages: tuple[tuple[int, m.Message], ...]) -> None:
        for session, message in messages:
            self.world.judge.sending(session, message)
            stream = self.streams.get(session)
            if stream is not None and stream.server_open:
                self.world.network.send_down(stream, message)

    def lost(self, stream: Stream, detail: str) -> None:
        """The end of a stream has come through."""
        if self.up and self.streams.pop(stream.session, None) is not None:
            self.feed(e.SessionLost(stream.session, detail))

    # ------------------------------------------------------------ time

    def arm(self) -> None:
        """Plans the next Tick, if the deadline is not covered by one that is planned."""
        due = self.job.deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self.world.loop.at(due, self._tick, self._epoch, due)

    def _tick(self, epoch: int, due: float) -> None:
        if not self.up or epoch != self._epoch or self._armed != due:
            return
        now = self.world.loop.now
        if now < self.paused_until:  # among what came meanwhile, at any place
            when = self.paused_until + self.world.rng.random() * 0.01
            self.world.loop.at(when, self._tick, epoch, due)
            return
        self._armed = None
        deadline = self.job.deadline()
        if deadline is None or deadline > now:
            self.arm()
            return
        unread = tuple(session for session in self.job.overdue(now) if self._is_unread(session))
        if unread:
            self.forgave_at = now
            self.feed(e.FellBehind(unread))
        self.feed(e.Tick())
        after = self.job.deadline() if self.up else None
        self._ticks = self._ticks + 1 if after is not None and after <= now else 0
        if self._ticks > 5:
            self.world.judge.fault("the deadline stays in the past: the scheduler would spin")

    def _is_unread(self, session: int) -> bool:
        stream = self.streams.get(session)
        return stream is not None and stream.unread > 0 and not self.is_late

    # ------------------------------------------------------------ death

    def pause(self, seconds: float) -> None:
        """It stands still: what comes waits, and workers give their streams up after a while."""
        world = self.world
        now = world.loop.now
        if now < self.paused_until:
            return
        self.paused_until = now + seconds
        self.up_since = max(self.up_since, self.paused_until)
        world.judge.disturbed(self.paused_until)
        world.loop.at(self.paused_until, self._feed_late, self._epoch, e.StoodStill(seconds))
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
            world.loop.after(LATE_TURN_S, self._turn_late, self._epoch)
        for stream in self.streams.values():
            if seconds > DROWNED_PING_S and world.rng.random() < 0.7:
                when = now + world.rng.uniform(DROWNED_PING_S, seconds)
                world.loop.at(when, world.network.break_up, stream, "ping timeout")

    def _turn_late(self, epoch: int) -> None:
        if self.up and epoch == self._epoch and self.world.loop.now < self.deaf_until:
            self.feed(e.StoodStill(LATE_TURN_S))
            self.world.loop.after(LATE_TURN_S, self._turn_late, epoch)

    def forgives(self) -> bool:
        """Whether a stream that ends now may have broken while the scheduler stood still, or was behind."""
        since = max(self.paused_until, self.deaf_until, self.forgave_at)
        return since > 0.0 and self.world.loop.now <= since + NODE_TIMEOUT_S

    def crash(self, when: str) -> None:
        """SIGKILL: memory and streams are gone, the disk stays."""
        if not self.up:
            return
        world = self.world
        self.crashes_left -= 1
        world.note(f"!! scheduler dies {when}")
        if when != "before the commit":
            world.judge.check_recovery(self.job, self._records())
        self.up = False
        self._epoch += 1
        self._armed = None
        self.paused_until = self.deaf_until = self.forgave_at = 0.0
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            world.network.closed_by_scheduler(stream, "connection reset")
        world.loop.after(world.rng.choice((0.05, 0.5, 2.0)), self.restart)

    def restart(self) -> None:
        """Comes up again on the same disk."""
        world = self.world
        world.note("!! scheduler starts again")
        self.job = Job.recover("job", world.scenario.settings, self._records(), world.loop.now)
        self.up = True
        self.up_since = world.loop.now
        self.arm()

    def _records(self) -> list[r.Record]:
        """What the disk holds, through the journal's codec."""
        lines = [json.dumps(encode_record(record)) for record in self.disk]
        self.world.judge.check_secrecy(lines)
        return [decode_record(json.loads(line)) for line in lines]


def _show_event(event: e.Event) -> str:
    text = repr(event)
    if isinstance(event, e.Joined):
        candidate = event.candidate
        return (
            f"Joined({event.session}, {candidate.node_id}#{candidate.incarnation}, "
            f"held {event.held_generation}/{event.held_rank}, built={event.built}, step={event.step})"
        )
    return text
