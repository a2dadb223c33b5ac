"""The scheduler's state machine of a job, which a driver feeds with events.

Nothing here reads a clock, sends, writes or logs: an event and the time go in, a decision comes out. The
driver of a job must do the following for each event, in this order:

1. Call :meth:`Machine.step`, one event after the other, with times that never decrease. Events that are
  waiting together may all be stepped first; the rest of this list is then done once for all of them.
2. Make ``records`` durable, in order, all of them or none. If that fails, nothing of the decision may be
  sent, and the machine may not be stepped again, because its state includes what was not written. Recover a
  machine from the records that were written.
3. Send ``messages``, in order. Delivery is not guaranteed: a message goes to its stream or is lost, and a
  worker that reconnects gets it again. After ``Refused`` or ``Ended`` close that stream.
4. Log ``reason``, if there is one. Store ``bundles``, or return each to the operator who asked for it.
5. Ask :meth:`Machine.deadline`, and step a ``Tick`` at that time at the latest.

A driver must report times during which it did not run normally. ``ProcessPaused`` goes before events that
came while the process was stopped, and ``HeldUp`` before events that came while nothing could be written.
``ReceiveBacklog`` goes before a ``Tick`` that would declare workers lost (:meth:`Machine.overdue`) although
bytes of theirs have arrived and are unread. After a crash, :meth:`Machine.recover` builds the machine from
all durable records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from muster.scheduler.core import (
    drains,
    events,
    evidence,
    gpus,
    hearing,
    joining,
    leaving,
    phases,
    probing,
    records,
    sentences,
    silence,
)
from muster.scheduler.core.job import Job, Outbox
from muster.scheduler.core.ledger import Phase
from muster.scheduler.core.views import JobView, job_view
from muster.wire import messages


class RecoveryError(ValueError):
    """The journal's records are not a possible history of this job."""


class Machine:
    """The machine of one job.

    Args:
        job_id: the job's name.
        settings: what the core must know of the scheduler's settings.

    Attributes:
        job: the job in its present state.

    Raises:
        ValueError: ``worker_num`` and the rank table disagree.
    """

    def __init__(self, job_id: str, settings: events.CoreSettings) -> None:
        table = settings.rank_table
        if table is not None and settings.worker_num not in (0, len(table.entries)):
            raise ValueError(
                f"MS_WORKER_NUM is {settings.worker_num}, but the rank table has {len(table.entries)} entries"
            )
        self.job = Job(job_id, settings)
        self._started = False
        self._handlers: dict[type, Callable[[Job, Any, float], None]] = {
            events.Joined: joining.joined,
            events.Heard: hearing.heard,
            events.UniqueIdsPublished: hearing.published,
            events.BuiltReported: hearing.built_reported,
            events.QuiescedReported: hearing.quiesced_reported,
            events.PeerSuspected: hearing.peer_suspected,
            events.PeerLate: hearing.peer_late,
            events.ProbeAnswered: hearing.probed,
            events.StacksTold: evidence.stacks_told,
            events.StacksRequested: evidence.stacks_requested,
            events.LeaveRequested: leaving.leave_requested,
            events.LeftCleanly: leaving.left,
            events.SessionLost: leaving.session_lost,
            events.DrainRequested: leaving.drain_requested,
            events.DrainAsked: drains.asked,
            events.DrainCalledOff: drains.called_off,
            events.AdmitAsked: gpus.admit_asked,
            events.TimeOfDay: drains.time_of_day,
            events.EndRequested: phases.end_requested,
            events.Expel: leaving.expel,
            events.ProcessEnded: leaving.process_ended,
            events.Tick: silence.tick,
            events.ProcessPaused: silence.process_paused,
            events.HeldUp: silence.held_up,
            events.ReceiveBacklog: silence.receive_backlog,
        }

    @classmethod
    def recover(
        cls, job_id: str, settings: events.CoreSettings, records: Iterable[records.Record], now: float
    ) -> Machine:
        """Builds the machine of a job from its records.

        Its workers have ``recovered_timeout_s`` to come back.

        Raises:
            RecoveryError: the records belong to another job or other settings, or are not a possible history.
        """
        machine = cls(job_id, settings)
        job = machine.job
        try:
            for record in records:
                job.apply(record)
        except (KeyError, AttributeError, TypeError) as error:
            raise RecoveryError(f"The records of job {job_id} contradict one another: {error!r}") from error
        _check_opened(job)
        grace_s = (settings.recovered_timeout_s or settings.node_timeout_s) - settings.node_timeout_s
        job.members.not_before = now + max(0.0, grace_s)
        for node_id in job.ledger.claims:
            job.members.expect(node_id, now, placed=job.ledger.claims[node_id].since > 0)
        machine._start(now)
        phases.note_phase(job, now)
        phases.explain_recovered(job)
        return machine

    @property
    def outcome(self) -> records.JobEnded | None:
        """The result of the job (``ok`` and the reason); None while it runs."""
        return self.job.ledger.outcome

    def step(self, event: events.Event, now: float, *, more: bool = False) -> events.Decision:
        """Handles one event; returns the decision.

        Args:
            event: what happened.
            now: seconds on the clock of all calls.
            more: another event follows immediately, and the job is advanced only with that one, so that
                losses that come together make one new generation.
        """
        if not self._started:
            self._start(now)
        job = self.job
        job.now, job.outbox, job.needs_advance = now, Outbox(), type(event) is not events.Heard and not more
        _revise(job)
        self._handlers[type(event)](job, event, now)
        if type(event) is events.Tick:
            drains.tend(job, now)
            evidence.tend(job, now)
            _conclude(job, job.probing.take_in(), now)
            sentences.report(job, now)
            sentences.check_progress(job, now)
        if job.needs_advance:
            _conclude(job, [*job.probing.take_in(), *joining.held_back(job)], now)
        if job.phase is Phase.ENDED:
            probing.dismiss_outside(job)
        for session, message in job.outbox.messages:
            if isinstance(message, messages.Refused | messages.Ended):
                job.forget(session)
        if isinstance(event, events.SessionLost | events.LeftCleanly):
            job.forget(event.session)
        return job.outbox.decision()

    def deadline(self) -> float | None:
        """When the machine wants a Tick at the latest; may be earlier than the true deadline, never later."""
        job = self.job
        if not self._started or _revised_min(job):
            return 0.0
        deadlines, phase = job.deadlines, job.phase
        if phase is Phase.ENDED:
            return None
        silence = job.members.next_silence(job.patience)
        times = [silence, deadlines.suspicion.due if deadlines.suspicion else None]
        times += [
            phases.departure_due(job),
            phases.switch_due(job),
            deadlines.hand_over,
            job.probing.due(job.settings.hang_timeout_s),
            job.evidence.due(),
            drains.due(job),
            sentences.stall_due(job),
        ]
        if phase in (Phase.FORMING, Phase.BUILDING, Phase.SUSPENDED):
            times += [phases.times_out_at(job), deadlines.report]
        if phase is Phase.FORMING:
            times += [due for due in (deadlines.spares_fill_in, deadlines.last_call) if due > job.now]
        if phase is Phase.SUSPENDED and deadlines.holders_return > job.now:
            times.append(deadlines.holders_return)
        return min((time for time in times if time is not None), default=None)

    def overdue(self, now: float) -> tuple[events.SessionId, ...]:
        """The streams whose workers the next Tick would declare lost for their silence."""
        job = self.job
        if job.phase is Phase.ENDED:
            return ()
        silent = job.members.silent(now, job.patience)
        sessions = (job.members.session_of(node_id) for node_id in silent)
        return tuple(session for session in sessions if session is not None)

    def view(self, now: float) -> JobView:
        """The job as ``status`` shows it: members by rank, then waiting workers."""
        return job_view(self.job, now)

    def weigh_drain(self, node_ids: Collection[str], hosts: Collection[str]) -> str:
        """Returns sentences on what it would cost to drain these workers now."""
        return drains.weigh(self.job, node_ids, hosts)

    def _start(self, now: float) -> None:
        self._started = True
        deadlines = self.job.deadlines
        deadlines.phase_since = deadlines.progress_since = deadlines.formed_at = now
        deadlines.report = now + self.job.settings.waiting_report_interval_s


def _conclude(job: Job, joins: Iterable[events.Joined], now: float) -> None:
    """Advances the job until nothing more follows from its state; retries held-back Joins in between."""
    waiting = deque(joins)
    while True:
        while waiting and job.admissions.arrived is None:
            joining.joined(job, waiting.popleft(), now, again=True)
        phases.advance(job, now)
        if job.admissions.arrived is None:
            return
        node_id, job.admissions.arrived = job.admissions.arrived, None
        joining.announce_arrival(job, node_id)


def _revised_min(job: Job) -> int:
    """The new MS_WORKER_MIN, if the scheduler was restarted with a different one; 0 if it is unchanged."""
    opened, settings = job.ledger.opened, job.settings
    if opened is None or not settings.worker_num or job.phase is Phase.ENDED:
        return 0
    wanted = min(settings.worker_min or settings.worker_num, opened.worker_num)
    return wanted if wanted != opened.worker_min else 0


def _revise(job: Job) -> None:
    """Applies a changed MS_WORKER_MIN: lowering it is how an operator resumes a suspended job."""
    opened, wanted = job.ledger.opened, _revised_min(job)
    if opened is not None and wanted:
        job.commit(replace(opened, worker_min=wanted))
        job.outbox.mention(f"MS_WORKER_MIN is {wanted} from now on; it was {opened.worker_min}.")


def _check_opened(job: Job) -> None:
    opened, settings = job.ledger.opened, job.settings
    if opened is None:
        if job.ledger.claims or job.ledger.formed:
            raise RecoveryError(f"The records of job {job.job_id} do not begin with its opening")
        return
    if opened.job_id != job.job_id:
        raise RecoveryError(f"The records are those of job {opened.job_id}, not of job {job.job_id}")
    if settings.worker_num not in (0, opened.worker_num):
        raise RecoveryError(
            f"The records of job {job.job_id} say MS_WORKER_NUM={opened.worker_num}, the scheduler has "
            f"{settings.worker_num}; set the same, or start without the old journal"
        )
