"""The pages' model of a scheduler and its jobs, built from its streams. Pure: the time is an argument."""

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
"""The least time without a finished step after which a job counts as stalled, in seconds. In addition, at
least five times the recent step time must have passed.
"""

LISTED = 8
ONE_OFF = "one-off"
"""The kind of a single long step, which is not a straggler."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker as last seen: its seat and its figures; a figure that it has not reported is None.

    ``computed_s``, ``waited_s`` and ``data_s`` are the parts of a step's time, in seconds. ``straggler`` says
    how it slows the others down. ``gpu`` is its GPU's health as reported by the driver.
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
    """A generation: when it was formed, established and ended, in seconds since 1970; None if not seen."""

    number: int
    members: int
    reason: str
    formed: float
    stood: float | None = None
    over: float | None = None
    why_over: str = ""


@dataclass
class ObservedJob:
    """A job as last reported by the scheduler.

    Attributes:
        line: the job's summary.
        roster: the job's workers.
        progress: the workers' figures, in the roster's order.
        events: the latest events, the oldest first.
        series: the job's figures over time.
        moved_at: when the job last made progress, in seconds since 1970.
        gone: whether the scheduler no longer has the job.
        refusal: why the scheduler does not show it; empty if it does.
        homes: the last seat of each node, by node id.
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
        """Stores the job's new summary."""
        if (line.step, line.furthest, line.generation, line.state) != (
            self.line.step,
            self.line.furthest,
            self.line.generation,
            self.line.state,
        ):
            self.moved_at = now
        if line.began > self.line.began + 60 and line.generation < self.line.generation:
            self.series = Series()  # This is another run with the same job id.
        self.line, self.gone = line, False
        if line.members and (line.step or line.samples_per_s) and line.state != "ended":
            loss = line.loss if line.HasField("loss") and math.isfinite(line.loss) else None
            rate = line.learning_rate if line.HasField("learning_rate") else None
            numbers = tuple(sorted(line.numbers.items()))
            self.series.take(Point(now, line.step, line.samples_per_s, loss, rate, numbers))

    @property
    def failed(self) -> bool:
        """Whether the job has failed."""
        return any(event.kind == "ended" and event.code == "failed" for event in self.events)

    def begin(self) -> None:
        """Clears the data that a new stream, maybe of another scheduler, sends again from the start."""
        self.events.clear()
        self.refusal = ""
        self.progress = pb.Progress()  # The old one refers to the previous stream's roster.

    def take(self, reply: pb.WatchReply, now: float) -> None:
        """Stores the data of a reply on the job's own stream."""
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
        """Returns the workers, with figures if those belong to the newest roster."""
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
        """Returns the seconds since the last finished step, if the job is stalled; otherwise 0."""
        if self.line.state not in ("running", "quiescing") or not self.moved_at:
            return 0.0
        still_s = now - self.moved_at
        return still_s if still_s >= max(STILL_S, 5 * self._step_s()) else 0.0

    def _step_s(self) -> float:
        """Returns the median time of the last steps, in seconds; 0 if not known."""
        times = sorted(took for _, took in self.series.step_times()[-32:])
        return times[len(times) // 2] if times else 0.0

    def generations(self) -> list[ObservedGeneration]:
        """Returns the generations in the remembered events, the oldest first."""
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
    """Returns a worker's reports of its snapshots and its last checkpoint; None if there is none."""
    if seat is None:
        return None, None
    has_snapshot = seat.HasField("snapshot") and newest_of(seat.snapshot) >= 0
    return (
        seat.snapshot if has_snapshot else None,
        seat.checkpoint if seat.HasField("checkpoint") else None,
    )


def _times(columns: pb.Progress, number: int) -> tuple[float, float, float]:
    """Returns a worker's seconds per step for computing, waiting and data; zeros from older schedulers."""
    if number >= len(columns.computed_s):
        return 0.0, 0.0, 0.0
    return columns.computed_s[number], columns.waited_s[number], columns.data_s[number]


def trouble(line: pb.JobLine) -> str:
    """Returns what is wrong with a job, in the scheduler's words; empty if nothing is."""
    calm = line.state == "running" and line.reason.startswith(f"Generation {line.generation} stands with ")
    if calm and not line.missing:
        return ""
    if calm:
        return f"{line.missing} of {line.worker_num} workers {'is' if line.missing == 1 else 'are'} missing."
    return line.reason


def who_waits(workers: Sequence[ObservedWorker]) -> Iterator[str]:
    """Yields a sentence for each group with waiting ranks: who waits, for which ranks, in which call."""
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
    """Returns ranks in words: ``rank 3``, ``ranks 0 to 2, 5``."""
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
    """The latest known state of a scheduler.

    Attributes:
        where: its address.
        overview: summaries of its jobs, and when its own certificates end.
        refusals: the latest connections that were refused before their job was known.
        jobs: the jobs by job id.
        absent_since: since when it cannot be reached, in seconds since 1970; None if it can.
        why_absent: the reason why it cannot be reached, as text.
    """

    where: str
    overview: pb.Overview = field(default_factory=pb.Overview)
    refusals: deque[pb.Happening] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    jobs: dict[str, ObservedJob] = field(default_factory=dict)
    absent_since: float | None = None
    why_absent: str = "It has not answered yet."

    def take(self, reply: pb.WatchReply, now: float) -> None:
        """Stores the data of a reply on the stream of all jobs."""
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
        """Stores the data of a reply on the own stream of the job ``job_id``."""
        self.job(job_id, pb.JobLine(job_id=job_id)).take(reply, now)  # It may precede the list of jobs.

    def job(self, job_id: str, line: pb.JobLine) -> ObservedJob:
        """Returns the job with this id; adds it if there is none."""
        if job_id not in self.jobs:
            self.jobs[job_id] = ObservedJob(line)
        return self.jobs[job_id]

    def lose(self, why: str, now: float) -> None:
        """Records that the scheduler cannot be reached, and why."""
        self.absent_since = now if self.absent_since is None else self.absent_since
        self.why_absent = why
