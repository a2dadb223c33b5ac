"""The model of a scheduler and its jobs, built from its streams. Pure: time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from muster.scheduler.cli.status import newest_of
from muster.web.series import Point, Series
from muster.wire.v1 import rendezvous_pb2 as rendezvous_pb
from muster.wire.v1 import watch_pb2 as pb

GENERATIONAL = frozenset(("formed", "stands", "over", "ended"))
EVENTS_KEPT = 512
STILL_S = 5.0
"""Seconds without a finished step, and five times the last steps' time, after which a job stands still."""

LISTED = 8
ONE_OFF = "one-off"
"""The kind of a single long step, which is no straggler."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker as last seen: its seat, and its figures; None: not reported.

    ``computed_s``, ``waited_s`` and ``data_s`` say where a step's time goes; ``straggler`` says how it holds
    the others up; ``gpu`` is what its driver says.
    """

    seat: pb.Seat
    step: int
    silent_s: float
    samples_per_s: float
    loss: float | None
    call: rendezvous_pb.Collective | None
    sequence: int
    done: bool
    snapshot: rendezvous_pb.SnapshotReport | None = None
    checkpoint: rendezvous_pb.CheckpointReport | None = None
    computed_s: float = 0.0
    waited_s: float = 0.0
    data_s: float = 0.0
    straggler: rendezvous_pb.Straggler | None = None
    gpu: rendezvous_pb.GpuReport | None = None


@dataclass(slots=True)
class ObservedGeneration:
    """A membership: when it was formed, stood and was over, in seconds since 1970; None: not (yet) seen."""

    number: int
    members: int
    reason: str
    formed: float
    stood: float | None = None
    over: float | None = None
    why_over: str = ""


@dataclass
class ObservedJob:
    """A job as last heard of.

    Attributes:
        line: the job in short.
        roster: who is in.
        progress: how far they are, in the roster's order.
        events: what happened, the oldest first.
        series: its figures over time.
        moved_at: when a step was last seen to end.
        gone: the scheduler has no such job any more.
        refusal: why the scheduler does not show it; empty: it does.
    """

    line: pb.JobLine
    roster: pb.Roster = field(default_factory=pb.Roster)
    progress: pb.Progress = field(default_factory=pb.Progress)
    events: deque[pb.Happening] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    series: Series = field(default_factory=Series)
    moved_at: float = 0.0
    gone: bool = False
    refusal: str = ""
    homes: dict[str, pb.Seat] = field(default_factory=dict)

    def take_line(self, line: pb.JobLine, now: float) -> None:
        """Takes the job in short in."""
        if (line.step, line.furthest, line.generation, line.state) != (
            self.line.step,
            self.line.furthest,
            self.line.generation,
            self.line.state,
        ):
            self.moved_at = now
        if line.began > self.line.began + 60 and line.generation < self.line.generation:
            self.series = Series()  # another run of that name
        self.line, self.gone = line, False
        if line.members and (line.step or line.samples_per_s) and line.state != "ended":
            loss = line.loss if line.HasField("loss") and math.isfinite(line.loss) else None
            rate = line.learning_rate if line.HasField("learning_rate") else None
            numbers = tuple(sorted(line.numbers.items()))
            self.series.take(Point(now, line.step, line.samples_per_s, loss, rate, numbers))

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return any(event.kind == "ended" and event.code == "failed" for event in self.events)

    def begin(self) -> None:
        """A new stream of the job begins, perhaps another scheduler's: it sends everything from the start."""
        self.events.clear()
        self.refusal = ""
        self.progress = pb.Progress()  # its numbers are the stream's before; the roster comes first

    def take(self, reply: pb.WatchReply, now: float) -> None:
        """Takes a part of the job's own stream in."""
        kind = reply.WhichOneof("body")
        if kind == "roster":
            self.roster = reply.roster
            for seat in reply.roster.seats:
                self.homes[seat.node_id] = seat
                if len(self.homes) > 4 * (len(reply.roster.seats) + LISTED):
                    del self.homes[next(iter(self.homes))]
        elif kind == "progress":
            self.progress = reply.progress
            self.take_line(reply.progress.job, now)
        elif kind == "happenings":
            self.events.extend(reply.happenings.happenings)

    def workers(self) -> list[ObservedWorker]:
        """The workers, with figures where those are of the newest roster."""
        seats, columns = self.roster.seats, self.progress
        if columns.roster != self.roster.number or len(columns.step) != len(seats):
            return [ObservedWorker(seat, 0, 0.0, 0.0, None, None, 0, False) for seat in seats]
        calls = columns.calls
        copies = {each.seat: each for each in columns.seat_copies}
        gpus = {each.seat: each.gpu for each in columns.gpus}
        slow = {each.node_id: each for each in columns.stragglers if each.kind != ONE_OFF}
        return [
            ObservedWorker(
                seat,
                step,
                silent_s,
                speed,
                None if math.isnan(loss) else loss,
                calls[call - 1] if call else None,
                sequence,
                done,
                *_copies(copies.get(number)),
                *_times(columns, number),
                slow.get(seat.node_id),
                gpus.get(number),
            )
            for number, seat, step, silent_s, speed, loss, call, sequence, done in zip(
                range(len(seats)),
                seats,
                columns.step,
                columns.silent_s,
                columns.samples_per_s,
                columns.loss,
                columns.call,
                columns.sequence,
                columns.done,
                strict=True,
            )
        ]

    def stands_still_s(self, now: float) -> float:
        """Seconds without a finished step, if the job stands still; else 0."""
        if self.line.state not in ("running", "quiescing") or not self.moved_at:
            return 0.0
        still_s = now - self.moved_at
        return still_s if still_s >= max(STILL_S, 5 * self._step_s()) else 0.0

    def _step_s(self) -> float:
        """How long a step took lately; 0: not known."""
        times = sorted(took for _, took in self.series.step_times()[-32:])
        return times[len(times) // 2] if times else 0.0

    def generations(self) -> list[ObservedGeneration]:
        """The memberships that are remembered, the oldest first."""
        found: list[ObservedGeneration] = []
        for event in self.events:
            last = found[-1] if found else None
            if event.kind == "formed":
                if last is not None and last.over is None:
                    last.over = event.time
                found.append(ObservedGeneration(event.generation, event.count, event.text, event.time))
            elif last is not None and event.kind == "stands":
                last.stood = event.time
            elif last is not None and event.kind in ("over", "ended") and last.over is None:
                last.over, last.why_over = event.time, event.text
        return found


def _copies(
    seat: pb.SeatCopies | None,
) -> tuple[rendezvous_pb.SnapshotReport | None, rendezvous_pb.CheckpointReport | None]:
    """What a worker says of its snapshots and its last checkpoint."""
    if seat is None:
        return None, None
    has_snapshot = seat.HasField("snapshot") and newest_of(seat.snapshot) >= 0
    return (
        seat.snapshot if has_snapshot else None,
        seat.checkpoint if seat.HasField("checkpoint") else None,
    )


def _times(columns: pb.Progress, number: int) -> tuple[float, float, float]:
    """Where a worker's time goes; zeros where an older scheduler does not say it."""
    if number >= len(columns.computed_s):
        return 0.0, 0.0, 0.0
    return columns.computed_s[number], columns.waited_s[number], columns.data_s[number]


def trouble(line: pb.JobLine) -> str:
    """What is wrong with a job, in the scheduler's words; empty: nothing is."""
    calm = line.state == "running" and line.reason.startswith(f"Generation {line.generation} stands with ")
    if calm and not line.missing:
        return ""
    if calm:
        return f"{line.missing} of {line.worker_num} workers {'is' if line.missing == 1 else 'are'} missing."
    return line.reason


def who_waits(workers: Sequence[ObservedWorker]) -> Iterator[str]:
    """Who waits for which ranks in which collective: a sentence for each group of ranks that has one."""
    groups: dict[str, list[ObservedWorker]] = {}
    for worker in workers:
        if worker.seat.rank >= 0 and worker.call is not None:
            groups.setdefault(worker.call.group, []).append(worker)
    silent = [w.seat.rank for w in workers if w.seat.rank >= 0 and w.call is None]
    for group, members in sorted(groups.items()):
        newest = max(member.sequence for member in members)
        waiting = [w for w in members if w.sequence == newest and not w.done]
        behind = [w for w in members if w.sequence < newest]
        if not waiting:
            continue
        call = waiting[0].call
        assert call is not None
        what = f"collective {newest} of group {group} ({call.name} of {call.size_bytes:,} B {call.dtype})"
        what_waits = f"{ranks([w.seat.rank for w in waiting])} {_verb(waiting, 'waits', 'wait')} in {what}"
        if behind:
            at = sorted({w.sequence for w in behind})
            last = f"collective {at[0]}" if len(at) == 1 else f"collectives {at[0]} to {at[-1]}"
            what_waits += f" for {ranks([w.seat.rank for w in behind])}, last seen at {last}"
        elif silent:
            what_waits += f" for {ranks(silent)}, not seen in any"
        yield f"{what_waits}."


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = f" and {len(words) - LISTED} more" if len(words) > LISTED else ""
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(words[:LISTED])}{more}"


def _verb(items: Sequence[object], one: str, many: str) -> str:
    return one if len(items) == 1 else many


@dataclass
class Followed:
    """A scheduler as last heard of.

    Attributes:
        where: its address.
        overview: its jobs in short, and what of its own ends.
        refusals: who was turned away before any job was known.
        jobs: by name.
        absent_since: since when it cannot be reached; None: it can.
        why_absent: in words.
    """

    where: str
    overview: pb.Overview = field(default_factory=pb.Overview)
    refusals: deque[pb.Happening] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    jobs: dict[str, ObservedJob] = field(default_factory=dict)
    absent_since: float | None = None
    why_absent: str = "It has not answered yet."

    def take(self, reply: pb.WatchReply, now: float) -> None:
        """Takes a part of the stream of all jobs in."""
        self.absent_since = None
        kind = reply.WhichOneof("body")
        if kind == "overview":
            self.overview = reply.overview
            for line in reply.overview.jobs:
                self.job(line.job_id, line).take_line(line, now)
            listed = {line.job_id for line in reply.overview.jobs}
            for job_id, job in self.jobs.items():
                job.gone = job_id not in listed
        elif kind == "happenings":
            self.refusals.extend(reply.happenings.happenings)

    def take_of(self, job_id: str, reply: pb.WatchReply, now: float) -> None:
        """Takes a part of a job's own stream in."""
        self.job(job_id, pb.JobLine(job_id=job_id)).take(reply, now)  # it may come before the list of all

    def job(self, job_id: str, line: pb.JobLine) -> ObservedJob:
        """The job of that name, a new one if there was none."""
        if job_id not in self.jobs:
            self.jobs[job_id] = ObservedJob(line)
        return self.jobs[job_id]

    def lose(self, why: str, now: float) -> None:
        """The scheduler cannot be reached."""
        self.absent_since = now if self.absent_since is None else self.absent_since
        self.why_absent = why
