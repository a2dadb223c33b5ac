"""The scheduler's state machine of a job, which a driver feeds with events.

Nothing here reads a clock, sends, writes or logs: an event and the time go in, a decision comes out. The
driver of a job has to do this, in this order, for each event:

1. Call :meth:`Machine.step`, one event after the other, with times that never decrease. Events that wait
   together may all be stepped first; the rest of this list is then done for all of them at once.
2. Make ``records`` durable, in order, all of them or none. If that fails, nothing of the decision may leave,
   and the machine may not be stepped again: it knows what is not written. Recover it from what is.
3. Send ``messages``, in order. Each goes to its stream or nowhere: to send is not to deliver, and a worker
   that comes back gets it again. After ``Refused`` or ``Ended`` close that stream.
4. Log ``reason``, if there is one.
5. Ask :meth:`Machine.deadline`, and step a ``Tick`` at that time at the latest.

A driver says the truth about time: ``StoodStill`` goes before what came while it was stopped, ``HeldUp``
before what came while nothing could be written, and ``FellBehind`` before a ``Tick`` that would declare
workers lost (:meth:`Machine.overdue`) whose bytes have arrived unread. After a crash :meth:`Machine.recover`
makes the machine again from all durable records.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from muster.scheduler.core import events as e
from muster.scheduler.core import probing
from muster.scheduler.core import records as r
from muster.scheduler.core.job import Job, Outbox, Suspicion
from muster.scheduler.core.ledger import (
    STATELESS,
    UNSET,
    Claim,
    Phase,
    all_in,
    are_in,
    check_place,
    check_process,
    count,
    early_end,
    listing,
    natural_key,
    nodes,
    remarks,
    sizes,
    upper_first,
    waiting,
    who,
)
from muster.scheduler.core.probing_state import ROUND_PAUSE_S
from muster.scheduler.core.reports import absent, awaited, progress_report
from muster.scheduler.core.views import JobView, worker_view
from muster.wire import messages as m

LONG_LIST = 32
"""From this many workers on, a Join is not announced to all workers at once."""


class RecoveryError(ValueError):
    """The journal's records are not a possible history of this job."""


class Machine:
    """The machine of one job.

    Args:
        job_id: the job's name.
        settings: what the core must know of the scheduler's settings.

    Attributes:
        job: the job as it stands.

    Raises:
        ValueError: ``worker_num`` and the rank table disagree.
    """

    def __init__(self, job_id: str, settings: e.Settings) -> None:
        table = settings.rank_table
        if table is not None and settings.worker_num not in (0, len(table.entries)):
            raise ValueError(
                f"MS_WORKER_NUM is {settings.worker_num}, but the rank table has {len(table.entries)} entries"
            )
        self.job = Job(job_id, settings)
        self._started = False
        self._handlers: dict[type, Callable[[Job, Any, float], None]] = {
            e.Joined: joined,
            e.Heard: _heard,
            e.UniqueIdsPublished: _published,
            e.BuiltReported: _built_reported,
            e.QuiescedReported: _quiesced_reported,
            e.PeerSuspected: peer_suspected,
            e.PeerLate: _peer_late,
            e.Probed: probed,
            e.LeaveRequested: _leave_requested,
            e.LeftCleanly: left,
            e.SessionLost: session_lost,
            e.DrainRequested: _drain_requested,
            e.EndRequested: _end_requested,
            e.Expel: _expel,
            e.ProcessEnded: process_ended,
            e.Tick: tick,
            e.StoodStill: stood_still,
            e.HeldUp: held_up,
            e.FellBehind: fell_behind,
        }

    @classmethod
    def recover(cls, job_id: str, settings: e.Settings, records: Iterable[r.Record], now: float) -> Machine:
        """Makes the machine of a job from its records. Its workers have ``recovered_timeout_s`` to come back.

        Raises:
            RecoveryError: the records are those of another job, or of other settings, or no history at all.
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
        note_phase(job, now)
        explain_recovered(job)
        return machine

    @property
    def outcome(self) -> r.JobEnded | None:
        """How the job ended (``ok`` and why); None while it goes on."""
        return self.job.ledger.outcome

    def step(self, event: e.Event, now: float, *, more: bool = False) -> e.Decision:
        """Takes one event and says what follows from it.

        Args:
            event: what happened.
            now: seconds on the clock of all calls.
            more: another event follows at once, and the conclusions are drawn with that one: losses that
                come together make one new generation.
        """
        if not self._started:
            self._start(now)
        job = self.job
        job.now, job.outbox, job.matters = now, Outbox(), type(event) is not e.Heard and not more
        _revise(job)
        self._handlers[type(event)](job, event, now)
        if type(event) is e.Tick:
            _conclude(job, job.rounds.take_in(), now)
            report(job, now)
            check_progress(job, now)
        if job.matters:
            _conclude(job, [*job.rounds.take_in(), *held_back(job)], now)
        if job.phase is Phase.ENDED:
            probing.dismiss_outside(job)
        for session, message in job.outbox.messages:
            if isinstance(message, m.Refused | m.Ended):
                job.rounds.forget(session)
        if isinstance(event, e.SessionLost | e.LeftCleanly):
            job.rounds.forget(event.session)
        return job.outbox.decision()

    def deadline(self) -> float | None:
        """When the machine wants a Tick at the latest; never later than the true deadline, maybe earlier."""
        job = self.job
        if not self._started or _revised_min(job):
            return 0.0
        deadlines, phase = job.deadlines, job.phase
        if phase is Phase.ENDED:
            return None
        silence = job.members.next_silence(job.patience)
        times = [silence, deadlines.suspicion.due if deadlines.suspicion else None]
        times += [
            departure_due(job),
            switch_due(job),
            deadlines.hand_over,
            job.rounds.due(job.settings.hang_timeout_s),
            stall_due(job),
        ]
        if phase in (Phase.FORMING, Phase.BUILDING, Phase.SUSPENDED):
            times += [times_out_at(job), deadlines.report]
        if phase is Phase.FORMING:
            times += [due for due in (deadlines.spares_fill_in, deadlines.last_call) if due > job.now]
        if phase is Phase.SUSPENDED and deadlines.holders_return > job.now:
            times.append(deadlines.holders_return)
        return min((time for time in times if time is not None), default=None)

    def overdue(self, now: float) -> tuple[e.SessionId, ...]:
        """The streams whose workers the next Tick would declare lost for their silence."""
        job = self.job
        if job.phase is Phase.ENDED:
            return ()
        silent = job.members.silent(now, job.patience)
        sessions = (job.members.session_of(node_id) for node_id in silent)
        return tuple(session for session in sessions if session is not None)

    def view(self, now: float) -> JobView:
        """The job as ``status`` shows it: members by rank, then waiting workers."""
        job, ledger = self.job, self.job.ledger
        waiting = sorted(ledger.unplaced, key=natural_key)
        claims = itertools.chain(ledger.living_members(), (ledger.claims[node_id] for node_id in waiting))
        built, by_node, building = job.current.built, job.members.by_node, ledger.phase is Phase.BUILDING
        workers = []
        for claim in claims:
            node_id = claim.candidate.node_id
            awaited = building and node_id not in built
            workers.append(worker_view(ledger, claim, by_node[node_id], now, awaited=awaited))
        return JobView(
            job_id=job.job_id,
            state=job.phase.value,
            generation=ledger.generation,
            worker_num=job.needed,
            worker_min=ledger.opened.worker_min if ledger.opened else job.settings.worker_min,
            workers=tuple(workers),
            missing=job.missing(),
            reason=state_reason(job),
        )

    def _start(self, now: float) -> None:
        self._started = True
        deadlines = self.job.deadlines
        deadlines.phase_since = deadlines.progress_since = deadlines.formed_at = now
        deadlines.report = now + self.job.settings.waiting_report_interval_s


def _conclude(job: Job, joins: Iterable[e.Joined], now: float) -> None:
    """Advances the job until nothing follows from its state any more; takes in Joins in between."""
    waiting = deque(joins)
    while True:
        while waiting and job.door.arrived is None:
            joined(job, waiting.popleft(), now, again=True)
        advance(job, now)
        if job.door.arrived is None:
            return
        node_id, job.door.arrived = job.door.arrived, None
        _announce_arrival(job, node_id)


# ---------------------------------------------------------------- who comes


def joined(job: Job, event: e.Joined, now: float, *, again: bool = False) -> None:
    """Handles a Join: a worker comes, or comes back; ``again``: it was held back before."""
    candidate = event.candidate
    job.door.held_back.pop(event.session, None)  # one answer to each stream, however often it asks
    job.rounds.addresses[event.session] = event.probe_address
    job.deadlines.last_call_s = event.last_call_s or job.deadlines.last_call_s
    known = job.members.nodes.get(event.session)
    if known is not None and not _is_of(job, known, candidate):
        job.lose(known, "asked for a second place on its stream", m.RefusalCode.MALFORMED)
        return
    answer = check_process(job.ledger, event)
    if answer is not None:
        job.outbox.send(event.session, answer)
    elif _is_of(job, candidate.node_id, candidate):
        _come_back(job, event, now)
    elif not (job.rounds.bars(candidate) and probing.keep_outside(job, event)):
        _ask_for_place(job, event, now, again=again)


def _ask_for_place(job: Job, event: e.Joined, now: float, *, again: bool) -> None:
    candidate = event.candidate
    refusal = check_place(job.ledger, job.settings, candidate)
    if refusal is not None and _may_free_up(job, refusal, candidate):
        job.door.held_back[event.session] = event
        if not again:
            job.outbox.mention(f"{upper_first(who(candidate))} waits until it is clear who comes back.")
        return
    if refusal is not None:
        job.outbox.send(event.session, refusal)
        job.outbox.mention(refusal.sentence)
        return
    if job.ledger.opened is None:
        job.commit(r.JobOpened(job.job_id, *sizes(job.settings, candidate)))
    job.commit(r.Admitted(candidate))
    contact = job.members.attach(candidate.node_id, event.session, now)
    contact.step = contact.baseline = event.step
    greet(job, candidate.node_id, now)
    job.say(f"{upper_first(who(candidate))} has joined.")
    _remark(job, candidate)
    job.door.arrived = candidate.node_id


def _is_of(job: Job, node_id: str, candidate: m.Candidate) -> bool:
    claim = job.ledger.claims.get(node_id)
    return (
        claim is not None
        and node_id == candidate.node_id
        and claim.candidate.incarnation == candidate.incarnation
    )


def _remark(job: Job, candidate: m.Candidate) -> None:
    """Logs warnings about a worker that differs from the others, each once."""
    for topic, sentence in remarks(job.ledger, candidate):
        _warn_once(job, topic, sentence)
    host = candidate.host
    if job.door.machines.setdefault(host.name, host.id) != host.id:
        sentence = f"several machines are named {host.name}; give each a host name of its own."
        _warn_once(job, f"host {host.name}", sentence)
    label = job.door.labels.setdefault(host.id, host.topology)
    if label != host.topology:
        one, other = sorted((label or UNSET, host.topology or UNSET))
        sentence = f"workers of host {host.name} came with MS_TOPOLOGY {one} and {other}; give all the same."
        _warn_once(job, f"label {host.id}", sentence)


def _warn_once(job: Job, topic: str, sentence: str) -> None:
    if topic not in job.door.remarked:
        job.door.remarked.add(topic)
        job.outbox.mention(f"Warning: {sentence}")


def _may_free_up(job: Job, refusal: m.Refused, candidate: m.Candidate) -> bool:
    """Whether a refused worker may get the place of one that has not returned since a restart."""
    contacts = job.members.by_node
    if len(job.door.held_back) > job.needed + job.settings.spares:
        return False
    if refusal.code is m.RefusalCode.NODE_ID_TAKEN and candidate.node_id in contacts:
        return contacts[candidate.node_id].session is None
    if refusal.code in (m.RefusalCode.NODE_ID_TAKEN, m.RefusalCode.JOB_FULL):
        return not job.members.all_have_streams
    return False


def held_back(job: Job) -> list[e.Joined]:
    """Retries the Joins that were held back, where something has changed for them."""
    now = job.records, job.members.turns
    if now == job.door.tried:
        return []
    job.door.tried = now
    joins, job.door.held_back = list(job.door.held_back.values()), {}
    return joins


def _announce_arrival(job: Job, node_id: str) -> None:
    if job.phase not in (Phase.FORMING, Phase.SUSPENDED):
        return
    if len(job.ledger.claims) <= LONG_LIST:
        broadcast_waiting(job)
    else:
        job.send(node_id, _how_many(job))


def _how_many(job: Job) -> m.Waiting:
    """The answer to a newcomer where a list of all workers would be long."""
    number = len(job.ledger.claims)
    return m.Waiting(number, job.needed, f"{number} of {job.needed} workers are in.")


def _come_back(job: Job, event: e.Joined, now: float) -> None:
    """Takes in a worker that opens its stream anew: what it may have missed is sent again."""
    node_id = event.candidate.node_id
    old = job.members.session_of(node_id)
    if old is not None and old != event.session:
        sentence = f"{upper_first(who(event.candidate))} has opened a newer stream."
        job.outbox.send(old, m.Refused(m.RefusalCode.SUPERSEDED, sentence))
    contact = job.members.attach(node_id, event.session, now)
    contact.step = max(contact.step, event.step)
    if event.built and event.held_generation == job.ledger.generation:
        _mark_built(job, node_id)
    greet(job, node_id, now)
    if job.phase is Phase.FORMING:
        is_long = len(job.ledger.claims) > LONG_LIST
        job.send(node_id, _how_many(job) if is_long else waiting_message(job))
    job.outbox.mention(f"{upper_first(job.name(node_id))} is back.")


def greet(job: Job, node_id: str, now: float) -> None:
    """Sends a worker with a new stream everything that it has to know."""
    ledger, settings = job.ledger, job.settings
    claim = ledger.claims[node_id]
    no_place = ledger.rank_of(node_id) < 0 and ledger.living >= job.needed
    welcome = m.Welcome(
        job.heartbeat_interval_s,
        job.patience.member_s,
        settings.topo_timeout_s,
        no_place or ledger.is_spare(claim),
        job.waiting_interval_s,
    )
    job.send(node_id, welcome)
    rank, generation, phase = ledger.rank_of(node_id), ledger.generation, job.phase
    if phase is Phase.SUSPENDED and rank >= 0:
        wait_s = max(0.0, job.deadlines.phase_since + settings.topo_timeout_s - now)
        job.send(node_id, m.Suspended(generation, ledger.suspended or "", wait_s, job.first_loss))
    if phase not in (Phase.BUILDING, Phase.RUNNING, Phase.QUIESCING):
        return
    if rank >= 0 or (claim.leaving is not None and claim.since):
        job.send(node_id, job.assignment(rank))
    if rank >= 0:
        _send_rest(job, node_id, generation, phase)


def _send_rest(job: Job, node_id: str, generation: int, phase: Phase) -> None:
    """Sends what a member needs besides its Assignment."""
    if phase is Phase.BUILDING and job.current.unique_ids:
        job.send(node_id, m.UniqueIds(generation, job.current.unique_ids))
    if phase is not Phase.BUILDING:
        job.send(node_id, m.GroupBuilt(generation))
    if phase is Phase.QUIESCING:
        job.send(node_id, m.Quiesce(generation, job.current.plan or ""))


def _mark_built(job: Job, node_id: str) -> None:
    if job.phase is Phase.BUILDING and job.ledger.rank_of(node_id) >= 0:
        job.current.built.add(node_id)


# ---------------------------------------------------------------- word from members


def _claim_behind(job: Job, session: e.SessionId, now: float) -> Claim | None:
    node_id = job.members.nodes.get(session)
    if node_id is None:
        return None
    job.members.has_spoken(node_id, now)
    return job.ledger.claims[node_id]


def member_behind(job: Job, session: e.SessionId, generation: int, now: float) -> str | None:
    """Node id of the sender, if it is a member of the newest generation and speaks of that one."""
    claim = _claim_behind(job, session, now)
    if claim is None or generation != job.ledger.generation or job.phase is Phase.ENDED:
        return None
    node_id = claim.candidate.node_id
    return node_id if job.ledger.rank_of(node_id) >= 0 else None


def _heard(job: Job, event: e.Heard, now: float) -> None:
    claim = _claim_behind(job, event.session, now)
    if claim is None or event.generation > job.ledger.generation:
        return
    settled = job.ledger.established and event.generation == job.ledger.generation
    node_id = claim.candidate.node_id
    contact = job.members.by_node[node_id]
    lacked_state = claim.newcomer and not contact.has_moved
    if contact.entered < event.entered_generation == job.ledger.generation:
        _came_to_build(job, now)
    trains = job.phase is not Phase.BUILDING or job.switches_by_steps
    if job.members.hear(node_id, event, settled=settled) and trains:
        job.deadlines.progress_since = now
        if probing.all_have_moved(job) or job.deadlines.stalled:
            job.deadlines.stalled = False
            job.rounds.forget_waits()
            sentence = f"Training goes on at step {event.step}."
            job.say(sentence)
            job.tell_members(sentence, wait=False)
    job.matters = lacked_state and contact.has_moved  # who leaves may wait for that


def _came_to_build(job: Job, now: float) -> None:
    """Gives a worker that comes late, perhaps after all time-outs, its time to build.

    One that comes soon does not, lest a group that fails again and again be tried for ever.
    """
    late = now > job.deadlines.formed_at + job.settings.topo_timeout_s / 2
    if late and job.phase is Phase.BUILDING and job.ledger.ever_established:
        job.deadlines.phase_since = now


def _published(job: Job, event: e.UniqueIdsPublished, now: float) -> None:
    node_id = member_behind(job, event.session, event.generation, now)
    if node_id is None or job.ledger.rank_of(node_id) != 0 or job.phase is not Phase.BUILDING:
        return
    if len(event.unique_ids) != job.unique_id_count or not all(event.unique_ids):
        problem = f"handed in {len(event.unique_ids)} of {count(job.unique_id_count, 'unique id')}"
        job.lose(node_id, problem, m.RefusalCode.MALFORMED)
    elif not job.current.unique_ids:
        job.current.unique_ids = event.unique_ids
        job.send_to_members(m.UniqueIds(event.generation, event.unique_ids))


def _built_reported(job: Job, event: e.BuiltReported, now: float) -> None:
    node_id = member_behind(job, event.session, event.generation, now)
    if node_id is None:
        return
    if job.members.by_node[node_id].entered < job.ledger.generation:  # it has built before its next heartbeat
        _came_to_build(job, now)
    _mark_built(job, node_id)


def _quiesced_reported(job: Job, event: e.QuiescedReported, now: float) -> None:
    node_id = member_behind(job, event.session, event.generation, now)
    if node_id is None:
        return
    if job.phase is Phase.RUNNING and job.ledger.wanted_change(job.settings) is None:
        quiesce(job, "a change was under way before the scheduler restarted")
    job.members.quiesce(node_id, event.last_started_step)


def peer_suspected(job: Job, event: e.PeerSuspected, now: float) -> None:
    """Handles a failed collective: the peer is lost, or the group is built anew."""
    if event.rank < 0:  # nobody is to blame, but one that has finished may be missed
        node_id = member_behind(job, event.session, event.generation, now)
        if node_id is not None:
            job.current.puzzled.add(node_id)
            _explain_failures(job)
        return
    claim = _claim_behind(job, event.session, now)
    formed, phase = job.ledger.formed, job.phase
    if claim is None or formed is None or phase in (Phase.SUSPENDED, Phase.ENDED):
        return
    own = who(claim.candidate, job.ledger.rank_of(claim.candidate.node_id))
    peer = "its peers"
    suspects = event.rank != job.ledger.rank_of(claim.candidate.node_id)  # its own rank: it knows of none
    if suspects and event.generation == formed.generation and 0 <= event.rank < len(formed.members):
        peer = who(formed.members[event.rank].candidate, event.rank)
    sentence = f"{own} could not go on with {peer}: {event.detail}"
    if job.ledger.finished:
        sentence = f"{sentence}; {early_end(job.ledger)}"
    planned = phase is Phase.BUILDING and formed.switch_after_step >= 0
    if event.generation == job.ledger.stood and planned:
        job.current.broken = sentence  # the others may hang in the last step before the planned switch
    elif event.generation != formed.generation or job.ledger.rank_of(claim.candidate.node_id) < 0:
        return
    job.say(f"{upper_first(sentence)}.")
    if job.deadlines.suspicion is None:
        job.deadlines.suspicion = Suspicion(now + job.patience.member_s, sentence)
    probing.want_round(job, now, urgent=True)


def _explain_failures(job: Job) -> None:
    """Names finished members to those whose collective failed, whichever is heard first."""
    if job.ledger.finished and job.current.puzzled:
        probing.name_finished(job, job.current.puzzled)
        job.current.puzzled = set()


def _peer_late(job: Job, event: e.PeerLate, now: float) -> None:
    claim = _claim_behind(job, event.session, now)
    if claim is not None and job.ledger.rank_of(claim.candidate.node_id) >= 0:
        probing.want_round(job, now, urgent=False)


def probed(job: Job, event: e.Probed, now: float) -> None:
    """Handles a worker's answer to a round of probes."""
    _claim_behind(job, event.session, now)
    probing.take_answer(job, event, now)


# ---------------------------------------------------------------- going


def _leave_requested(job: Job, event: e.LeaveRequested, now: float) -> None:
    claim = _claim_behind(job, event.session, now)
    if claim is not None:
        plan_leave(job, claim, event.reason)


def _drain_requested(job: Job, event: e.DrainRequested, now: float) -> None:
    claim = job.ledger.claims.get(event.node_id)
    if claim is None or job.phase is Phase.ENDED:
        job.outbox.mention(f"Job {job.job_id} has no worker with node id {event.node_id}.")
        return
    if claim.leaving is not None:
        job.outbox.mention(f"{upper_first(who(claim.candidate))} is leaving already: {claim.leaving}.")
    plan_leave(job, claim, event.reason)


def _end_requested(job: Job, event: e.EndRequested, now: float) -> None:
    """Ends the job for an operator; workers outside get the answer that follows every event."""
    if job.phase is not Phase.ENDED:
        end(job, False, f"An operator has ended the job: {event.reason}", m.RefusalCode.JOB_ENDED)


def plan_leave(job: Job, claim: Claim, reason: str) -> None:
    """Plans a leave: a member's at the next step boundary, any other worker's at once."""
    node_id, phase = claim.candidate.node_id, job.phase
    rank = job.ledger.rank_of(node_id)
    if phase is Phase.ENDED or claim.leaving is not None:
        return
    if rank >= 0:
        job.commit(r.LeavePlanned(node_id, claim.candidate.incarnation, reason))
    if rank >= 0 and phase is not Phase.SUSPENDED:
        job.say(f"{upper_first(who(claim.candidate, rank))} will leave at a step boundary: {reason}.")
    else:
        job.dismiss(claim, job.farewell(reason), f"left: {reason}")
        job.say(f"{upper_first(who(claim.candidate))} has left: {reason}.")


def _expel(job: Job, event: e.Expel, now: float) -> None:
    if event.node_id in job.ledger.claims and job.phase is not Phase.ENDED:
        job.lose(event.node_id, f"was expelled: {event.reason}", m.RefusalCode.EXPELLED)


def left(job: Job, event: e.LeftCleanly, now: float) -> None:
    """Handles a worker's Leave."""
    claim = _claim_behind(job, event.session, now)
    job.door.held_back.pop(event.session, None)
    if claim is None or job.phase is Phase.ENDED:
        job.outbox.send(event.session, m.Ended(True, "Goodbye.", first_loss=job.first_loss))
        return
    node_id = claim.candidate.node_id
    rank = job.ledger.rank_of(node_id)
    finished = event.finished and rank >= 0
    why = event.reason.rstrip(".") or "no reason given"
    what = "has completed the training" if finished else f"left: {why}"
    sentence = f"{who(claim.candidate, rank)} {what}"
    if not (finished or event.consequence):
        job.note_loss(node_id, sentence, exit_code=event.exit_code)
    job.outbox.send(event.session, m.Ended(True, "Goodbye.", first_loss=job.first_loss))
    job.remove(node_id, sentence, finished=finished)
    job.say(f"{upper_first(sentence)}.")
    _explain_failures(job)


def session_lost(job: Job, event: e.SessionLost, now: float) -> None:
    """Handles the end of a stream without a Leave."""
    job.door.held_back.pop(event.session, None)
    node_id = job.members.nodes.get(event.session)
    if node_id is None or job.phase is Phase.ENDED:
        return
    if now < job.deadlines.forgiving_until:
        job.members.has_spoken(node_id, now)  # the end itself: words before it may be lost with the stream
        job.members.detach(event.session)
        name = upper_first(job.name(node_id))
        job.outbox.mention(f"{name} has lost its stream while the scheduler stood still; it may come back.")
        return
    contact, patience = job.members.by_node[node_id], job.patience
    silent_s = now - contact.last_heard
    interval_s = job.waiting_interval_s if contact.waits else job.heartbeat_interval_s
    patience_s = patience.waiting_s if contact.waits else patience.member_s
    killed = silent_s <= 2 * interval_s and not event.may_return
    if killed:
        job.lose(node_id, f"is lost: its stream ended ({event.detail})")
    elif silent_s < patience_s:  # as of one that pauses: it may live
        job.members.detach(event.session)
        name = upper_first(job.name(node_id))
        left_s = patience_s - silent_s
        job.outbox.mention(
            f"{name} was not heard for {silent_s:.1f} s when its stream ended ({event.detail}); "
            f"it has {left_s:.1f} s to come back."
        )
    else:
        detail = f"not heard for {silent_s:.1f} s, until its stream ended ({event.detail})"
        job.lose(node_id, f"is lost: {detail}")


def process_ended(job: Job, event: e.ProcessEnded, now: float) -> None:
    """Handles a launcher's word that a process has ended, which the scheduler before this one may have known.

    A word alone expels nobody: it counts for that very incarnation, and only where that is not here. Of who
    has a stream the kernel says more, and in order with what it has still sent.
    """
    claim = job.ledger.claims.get(event.node_id)
    if claim is None or claim.candidate.incarnation != event.incarnation or job.phase is Phase.ENDED:
        return
    if job.members.session_of(event.node_id) is None:
        job.lose(event.node_id, f"is lost: its launcher says that it {event.detail}")


# ---------------------------------------------------------------- time


def tick(job: Job, event: e.Tick, now: float) -> None:
    """Handles a Tick: everything that is due by now."""
    if job.phase is Phase.ENDED:
        return
    for node_id in job.members.silent(now, job.patience):
        what = f"is lost: not heard for {now - job.members.by_node[node_id].last_heard:.1f} s"
        job.lose(node_id, what, m.RefusalCode.SUPERSEDED)
    if job.rounds.due(job.settings.hang_timeout_s) is not None:
        probing.tend_rounds(job, now)


def stood_still(job: Job, event: e.StoodStill, now: float) -> None:
    """Handles a standstill of the scheduler: silence meanwhile does not count, and lost streams may return.

    Workers end a stream that does not answer; that is seen only now, of streams begun meanwhile as well.
    """
    seconds, node_timeout_s = event.seconds, job.settings.node_timeout_s
    breaking_s = job.settings.breaking_pause_s or node_timeout_s / 3
    if job.phase is Phase.ENDED:
        return
    # Late turns add up, unless most of the time passes between them.
    job.deadlines.late_s = max(0.0, job.deadlines.late_s - (now - job.deadlines.late_at) / 3) + seconds
    job.deadlines.late_at = now
    if job.deadlines.late_s < breaking_s:  # too short to break a stream
        job.members.excuse(seconds, now)
        return
    forgave = now < job.deadlines.forgiving_until
    job.deadlines.forgiving_until = now + node_timeout_s
    job.members.excuse(math.inf if seconds >= breaking_s else seconds, now)
    job.deadlines.excuse(seconds)
    if not forgave or seconds >= breaking_s:
        job.outbox.mention(
            f"The scheduler itself stood still for {job.deadlines.late_s:.1f} s; "
            f"its workers have {node_timeout_s:g} s to be heard again."
        )


def held_up(job: Job, event: e.HeldUp, now: float) -> None:
    """Handles a time without a journal: what was said meanwhile comes now. Who is gone is gone."""
    if job.phase is not Phase.ENDED:
        job.members.excuse(event.seconds, now)
        job.deadlines.excuse(event.seconds)
        if event.seconds >= ROUND_PAUSE_S:
            job.rounds.repeat()


def fell_behind(job: Job, event: e.FellBehind, now: float) -> None:
    """Silence counts only while the scheduler keeps up: it has not read what these workers have sent."""
    unread = [node_id for session in event.sessions if (node_id := job.members.nodes.get(session))]
    if unread and job.phase is not Phase.ENDED:
        # It looks again when somebody has been silent for too long from now on, and soon after at the latest.
        job.deadlines.forgiving_until = now + job.patience.waiting_s + job.heartbeat_interval_s
        job.members.excuse(math.inf, now)
        job.deadlines.excuse(job.settings.node_timeout_s)  # since when nothing was read
        job.outbox.mention(
            f"The scheduler is behind: what {count(len(unread), 'worker')} sent is not read yet; "
            f"its workers have {job.settings.node_timeout_s:g} s to be heard again."
        )


def _revised_min(job: Job) -> int:
    """The new MS_WORKER_MIN, where the scheduler was restarted with another one; 0: unchanged."""
    opened, settings = job.ledger.opened, job.settings
    if opened is None or not settings.worker_num or job.phase is Phase.ENDED:
        return 0
    wanted = min(settings.worker_min or settings.worker_num, opened.worker_num)
    return wanted if wanted != opened.worker_min else 0


def _revise(job: Job) -> None:
    """Takes a changed MS_WORKER_MIN over: lowering it is how an operator frees a suspended job."""
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


HAND_OVER_S = 15.0
"""How long a member that leaves waits for others to take the state: half of what Kubernetes gives it."""


RETURN_S = 5.0
"""How long a suspended job in which nobody holds the state waits for those that did: longer than the pauses
between a worker's attempts to connect."""


# ---------------------------------------------------------------- conclusions


def advance(job: Job, now: float) -> None:
    """Takes the job from phase to phase for as long as its state asks for it."""
    moves = {
        Phase.FORMING: _advance_forming,
        Phase.BUILDING: _advance_building,
        Phase.RUNNING: _advance_running,
        Phase.QUIESCING: _advance_quiescing,
        Phase.SUSPENDED: _advance_suspended,
    }
    while job.phase is not Phase.ENDED and moves[job.phase](job, now):
        note_phase(job, now)
    note_phase(job, now)


def note_phase(job: Job, now: float) -> None:
    """Notes when the phase began."""
    if job.phase is not job.phase_seen:
        job.phase_seen = job.phase
        job.deadlines.phase_since = job.deadlines.progress_since = now
        job.deadlines.report = now + job.settings.waiting_report_interval_s


def timed_out(job: Job, now: float) -> bool:
    """Whether the phase has taken too long."""
    return now >= times_out_at(job)


def times_out_at(job: Job) -> float:
    """The time at which forming, building or waiting has taken too long.

    A group that took long to be found unfit (two hosts do not reach each other, a member hangs) leaves
    the next one half of the time at least; together they have twice the time, lest it be tried for ever.
    """
    limit_s = job.settings.topo_timeout_s
    due = job.deadlines.phase_since + limit_s
    if job.phase is not Phase.BUILDING:
        return due
    return min(max(due, job.deadlines.formed_at + limit_s / 2), due + limit_s)


def _advance_forming(job: Job, now: float) -> bool:
    opened = job.ledger.opened
    if opened is not None and _enough_to_form(job, opened.worker_num, now):
        return regroup(job, now, all_in(opened.worker_num))
    if opened is not None and _last_call_over(job, opened.worker_min, now):
        return regroup(job, now, f"no more came within {job.deadlines.last_call_s:g} s")
    if not timed_out(job, now):
        return False
    if opened is not None and len(job.ledger.choose(job.settings)) >= opened.worker_min:
        return regroup(job, now, f"no more came within {job.settings.topo_timeout_s:g} s")
    return end(job, False, f"The group did not form in time: {waiting_sentence(job)}.")


def _last_call_over(job: Job, worker_min: int, now: float) -> bool:
    """Whether the last call (MS_LAST_CALL_TIMEOUT) for more members is over."""
    deadlines = job.deadlines
    if not deadlines.last_call_s or not _could_form(job, worker_min):
        deadlines.last_call = 0.0
        return False
    deadlines.last_call = deadlines.last_call or now + deadlines.last_call_s
    return now >= deadlines.last_call and len(job.ledger.choose(job.settings)) >= worker_min


def _could_form(job: Job, least: int) -> bool:
    """Whether so many of those that are in make up a group: of a line of a rank table one at most."""
    ledger = job.ledger
    staying = len(ledger.claims) - len(ledger.leaving)
    if staying < least or job.settings.rank_table is None:
        return staying >= least
    # Ordinary workers have lines of their own.
    return staying - len(ledger.spares - ledger.leaving) >= least or len(ledger.choose(job.settings)) >= least


def _enough_to_form(job: Job, worker_num: int, now: float) -> bool:
    """Whether to form the first group. Spares wait for ordinary workers for a while."""
    claims = job.ledger.claims
    if len(claims) < worker_num:
        job.deadlines.spares_fill_in = 0.0
        return False
    if not job.deadlines.spares_fill_in:
        job.deadlines.spares_fill_in = now + job.settings.waiting_report_interval_s
    ordinary = len(claims) - len(job.ledger.spares)
    no_more_can_come = len(claims) >= worker_num + job.settings.spares
    if ordinary < worker_num and not no_more_can_come and now < job.deadlines.spares_fill_in:
        return False
    return len(job.ledger.choose(job.settings)) >= worker_num


def _advance_building(job: Job, now: float) -> bool:
    ledger = job.ledger
    if job.current.broken or ledger.lost.keys() - ledger.arriving:
        return regroup(job, now, _departure(job))
    if (ledger.lost or ledger.finished) and ledger.formed is not None:
        # Who finished has done the last step before a planned switch, and who was still to arrive has no
        # part in it; the others are still to do it.
        return regroup(job, now, _departure(job), ledger.formed.switch_after_step)
    if len(job.current.built) == len(job.ledger.ranks):
        job.commit(r.GroupEstablished(job.ledger.generation))
        job.send_to_members(m.GroupBuilt(job.ledger.generation))
        job.say(standing_sentence(job))
        return True
    if _suspicion_due(job, now) or _switch_overdue(job, now):
        return True
    if ledger.formed is not None and ledger.formed.switch_after_step < 0 and _hand_over_overdue(job, now):
        return True
    if not (job.deadlines.stalled or timed_out(job, now)):
        return False
    if job.deadlines.stalled and absent(ledger, job.members, job.current.built, ledger.leaving_members()):
        return regroup(job, now, ledger.wanted_change(job.settings) or "")
    if not timed_out(job, now):
        return False
    if absent(ledger, job.members, job.current.built, ledger.living_members()):
        # One that trains and one that hangs look alike: reported, as in a running job.
        job.deadlines.phase_since = now
        return False
    return end(job, False, f"The group was not built in time: {awaited(job)}.")


def departure_due(job: Job) -> float | None:
    """When departing members, without which the others train on already, lose their node ids."""
    running = job.phase is Phase.RUNNING
    return job.deadlines.phase_since + HAND_OVER_S if running and _departing(job) else None


def _let_go(job: Job, now: float) -> None:
    """Removes departing members whose Leave does not come, because their training hangs, say."""
    due = departure_due(job)
    for claim in _departing(job) if due is not None and now >= due else ():
        what = f"had {HAND_OVER_S:g} s to say goodbye and did not; its node id is free"
        job.outbox.mention(f"{upper_first(who(claim.candidate))} {what}.")
        job.dismiss(claim, job.farewell(claim.leaving or ""), what)


def _advance_running(job: Job, now: float) -> bool:
    ledger = job.ledger
    _let_go(job, now)
    if ledger.lost or len(ledger.finished) == len(ledger.ranks):
        return regroup(job, now, _departure(job))
    if _suspicion_due(job, now) or _hand_over_overdue(job, now):
        return True
    if job.deadlines.hand_over is not None:  # the worker that leaves is still needed
        return False
    change = ledger.wanted_change(job.settings)
    return change is not None and quiesce(job, change)


def _advance_quiescing(job: Job, now: float) -> bool:
    ledger = job.ledger
    if ledger.lost or len(ledger.finished) == len(ledger.ranks):
        return regroup(job, now, _departure(job))
    if _suspicion_due(job, now) or _switch_overdue(job, now):
        return True
    if not job.members.all_quiesced(ledger):
        return False
    change = _planned(job)  # by now more may leave
    if job.deadlines.suspicion is not None:  # whose collective failed cannot finish the step with the others
        return regroup(job, now, change)
    if hand_over_first(job):
        return True
    return regroup(job, now, change, job.members.last_started_step())


def hand_over_first(job: Job) -> bool:
    """Lets members that have stopped go on where who leaves meanwhile has to hand over the state before."""
    if not job.ledger.is_handing_over(job.members.stateless()):
        return False
    for claim in job.ledger.living_members():  # who is sent the assignment again may go on
        node_id = claim.candidate.node_id
        job.send(node_id, job.assignment(job.ledger.rank_of(node_id)))
    job.say(f"The change of members ({_planned(job)}) waits until the training state is handed over.")
    job.current.plan = None
    return True


def _advance_suspended(job: Job, now: float) -> bool:
    opened = job.ledger.opened
    if job.ledger.finishing:
        return regroup(job, now, _departure(job))
    enough = opened is not None and _could_form(job, opened.worker_min)
    if enough and not _holders_may_return(job, now):
        return regroup(job, now, f"{are_in(len(job.ledger.choose(job.settings)))} again")
    if not enough:
        job.deadlines.holders_return = 0.0
    if timed_out(job, now):
        return end(job, False, f"No group could be formed again in time: {waiting_sentence(job)}.")
    return False


def _holders_may_return(job: Job, now: float) -> bool:
    """Whether to wait for lost members that held the state: one that was cut off may return with it."""
    ledger, stateless = job.ledger, job.members.stateless()
    members = job.trained.keys() | ledger.ranks.keys()
    gone = members - ledger.finished - ledger.parted - ledger.claims.keys()
    known = ledger.living and any(ledger.holds_state(node_id, stateless) for node_id in ledger.claims)
    if known or not gone or not ledger.ever_established:
        return False
    job.deadlines.holders_return = job.deadlines.holders_return or now + RETURN_S
    return now < job.deadlines.holders_return


def _departure(job: Job) -> str:
    """Why members are gone, in words."""
    reasons = [*job.ledger.lost.values()]
    if job.current.broken:
        reasons.append(job.current.broken)
    if not reasons and job.ledger.finished:
        reasons.append(f"node {listing(sorted(job.ledger.finished))} finished")
    return listing(reasons)


def _suspicion_due(job: Job, now: float) -> bool:
    if job.deadlines.suspicion is None or now < job.deadlines.suspicion.due:
        return False
    return regroup(job, now, job.deadlines.suspicion.sentence)


def switch_due(job: Job) -> float | None:
    """The time by which a planned change must be carried out; None: there is none."""
    if job.switches_by_steps or job.phase is Phase.QUIESCING:
        return job.deadlines.phase_since + _switch_patience_s(job)
    return None


def _switch_patience_s(job: Job) -> float:
    return min(job.settings.stall_timeout_s, job.settings.topo_timeout_s)


def _switch_overdue(job: Job, now: float) -> bool:
    """Makes a planned change at once where some member cannot come to the step at which to switch."""
    due = switch_due(job)
    if due is None or now < due:
        return False
    stalled = now >= job.deadlines.progress_since + job.settings.stall_timeout_s
    if stalled and (report := progress_report(job, now)):
        job.say(report)
    job.deadlines.phase_since = now
    took = f"took over {_switch_patience_s(job):g} s"
    return regroup(job, now, f"the planned change ({_planned(job)}) {took}")


def _planned(job: Job) -> str:
    """Names who joins or leaves by the planned change under way."""
    if job.phase is Phase.QUIESCING:
        return job.ledger.wanted_change(job.settings) or job.current.plan or ""
    return job.current.change


def _hand_over_overdue(job: Job, now: float) -> bool:
    """Lets leaving members that hold the state go where nobody has taken it in time; they save it."""
    stateless = job.members.stateless()
    if not job.ledger.is_handing_over(stateless):
        job.deadlines.hand_over = None
    elif job.deadlines.hand_over is None:
        job.deadlines.hand_over = now + HAND_OVER_S
    elif now >= job.deadlines.hand_over:
        job.deadlines.hand_over = None
        for claim in job.ledger.leaving_holders(stateless):
            what = f"left: nobody took the training state from it within {HAND_OVER_S:g} s"
            job.say(f"{upper_first(who(claim.candidate))} {what}.")
            job.dismiss(claim, job.farewell(claim.leaving or ""), what)
        return True
    return False


def quiesce(job: Job, reason: str) -> bool:
    """Asks all members to stop at a step boundary."""
    job.current.plan, job.deadlines.hand_over = reason, None
    job.members.forget_quiesced()
    job.send_to_members(m.Quiesce(job.ledger.generation, reason))
    job.say(f"A change of members is prepared: {reason}.")
    return True


def regroup(job: Job, now: float, reason: str, switch_after_step: int = -1) -> bool:
    """Forms the next generation from the workers that are there, suspends the job, or ends it."""
    ledger = job.ledger
    assert ledger.opened is not None
    stateless = job.stateless()
    chosen = ledger.choose(job.settings, stateless)
    if ledger.finishing and not chosen:
        if ledger.lost.keys() <= ledger.parted:
            return end(job, True, "All members have completed the training.")
        return end(job, False, f"Workers were lost while the others finished: {reason}.")
    if len(chosen) < (1 if ledger.finishing else ledger.opened.worker_min):
        return _suspend(job, reason)
    lost = tuple(ledger.lost.values())
    if ledger.finishing:
        _release_idle(job, {candidate.node_id for candidate in chosen})
    change = f"{job.current.change}; {reason}" if job.switches_by_steps else reason
    reason += _remark_on_state(job, chosen, stateless)
    record = ledger.next_generation(
        chosen, stateless=stateless, reason=reason, switch_after_step=switch_after_step
    )
    job.commit(record)
    job.current.change = change
    for member in record.members:
        job.send(member.candidate.node_id, job.assignment(member.rank, lost))
    for claim in _departing(job):
        job.send(claim.candidate.node_id, job.assignment(-1, lost))
    job.say(f"Generation {record.generation} is formed with {job.size()}: {reason}.")
    return True


def _remark_on_state(job: Job, chosen: Collection[m.Candidate], stateless: Collection[str]) -> str:
    """Adds a remark where the next generation begins without the training state."""
    ledger = job.ledger
    givers = [c.node_id for c in chosen if ledger.claims[c.node_id].leaving is not None]
    if givers:
        return f"; node {listing(givers)} stays until it has handed over the training state"
    known = any(ledger.holds_state(c.node_id, stateless) for c in chosen)
    return f"; {STATELESS}" if ledger.ever_established and not known else ""


def _release_idle(job: Job, chosen: Collection[str]) -> None:
    """Dismisses, once some have finished, workers that have neither a place nor the state."""
    for node_id, claim in list(job.ledger.claims.items()):
        if node_id not in chosen and claim.leaving is None:
            sentence = "The job is finishing and needs no more workers."
            job.dismiss(claim, m.Ended(True, sentence), "is not needed any more")


def _departing(job: Job) -> list[Claim]:
    """Former members that are on their way out as planned."""
    return [
        claim
        for claim in map(job.ledger.claims.__getitem__, sorted(job.ledger.leaving))
        if claim.since and job.ledger.rank_of(claim.candidate.node_id) < 0
    ]


def _suspend(job: Job, reason: str) -> bool:
    """Too few members are left: the survivors keep their state and wait."""
    ledger = job.ledger
    if ledger.phase is Phase.SUSPENDED:
        return False
    assert ledger.opened is not None
    job.commit(r.GenerationEnded(ledger.generation, reason))
    for claim in [claim for claim in ledger.claims.values() if claim.leaving is not None]:
        job.dismiss(claim, job.farewell(claim.leaving or ""), "left as planned")
    sentence = _suspension(job)
    wait_s = job.settings.topo_timeout_s  # the worker puts it into words itself
    stateless = job.stateless()
    members = [claim.candidate.node_id for claim in ledger.living_members()]
    heard = [node_id for node_id in members if job.members.session_of(node_id) is not None]
    holders = [node_id for node_id in heard if ledger.holds_state(node_id, stateless)]
    for node_id in heard:
        save = node_id in holders[:1]
        job.send(node_id, m.Suspended(ledger.generation, f"{sentence}.", wait_s, job.first_loss, save))
    job.say(f"{sentence}; waiting up to {wait_s:g} s for more.")
    return True


def _suspension(job: Job) -> str:
    """Why the job is suspended, and who is left."""
    ledger = job.ledger
    assert ledger.opened is not None
    survivors = [claim.candidate for claim in ledger.living_members()]
    left = count(len(survivors), "member")
    return (
        f"Generation {ledger.generation} is over: {ledger.suspended}. {left} left "
        f"({nodes(survivors) or 'none'}), MS_WORKER_MIN is {ledger.opened.worker_min}"
    )


def explain_recovered(job: Job) -> None:
    """What ``status`` says of a job that was just recovered, until something happens."""
    ledger, phase = job.ledger, job.phase
    if phase is Phase.SUSPENDED:
        wait_s = job.settings.topo_timeout_s
        job.reason = f"{_suspension(job)}; waiting up to {wait_s:g} s for more."
    elif phase is Phase.BUILDING and ledger.formed is not None:
        job.reason = f"Generation {ledger.generation} is formed with {job.size()}: {ledger.formed.reason}."
    elif phase is Phase.FORMING and ledger.claims:
        job.reason = waiting_message(job).sentence


def end(job: Job, ok: bool, reason: str, refusal: m.RefusalCode = m.RefusalCode.TOPO_TIMEOUT) -> bool:
    """Ends the job; ``refusal`` is the answer to workers whose group has never formed."""
    formed = job.ledger.formed is not None
    job.commit(r.JobEnded(ok, reason))
    ended = m.Ended(ok, reason, first_loss=job.first_loss)
    message = ended if formed else m.Refused(refusal, reason)
    for node_id in job.ledger.claims:
        job.send(node_id, message)
    job.members.nodes.clear()
    job.say(reason)
    return True


# ---------------------------------------------------------------- what is said of it


def report(job: Job, now: float) -> None:
    """Logs, now and then, who is in and who is missing."""
    if job.phase not in (Phase.FORMING, Phase.SUSPENDED, Phase.BUILDING) or now < job.deadlines.report:
        return
    job.deadlines.report = now + job.settings.waiting_report_interval_s
    formed = job.ledger.formed
    if job.switches_by_steps and formed is not None:
        standing = progress_report(job, now).partition(": ")[2]
        begins = f"Generation {formed.generation} begins after step {formed.switch_after_step}"
        job.say(f"{begins}: {standing}" if standing else f"{begins}.")
        return
    if job.phase is Phase.BUILDING:
        since = f"for {now - job.deadlines.formed_at:.0f} s"
        job.say(f"The group is being built {since}: {awaited(job)}.")
        # Each member's own log then says for whom it waits.
        job.send_to_members(m.Waiting(len(job.current.built), len(job.ledger.ranks), job.reason))
        return
    broadcast_waiting(job)


def broadcast_waiting(job: Job) -> None:
    """Sends all workers the names of those that are missing."""
    message = waiting_message(job)
    for node_id in job.ledger.claims:
        job.send(node_id, message)
    job.say(message.sentence)


def waiting_message(job: Job) -> m.Waiting:
    """The message to all workers while some are missing."""
    sentence = upper_first(waiting_sentence(job)) + "."
    return m.Waiting(len(job.seated()), job.needed, sentence)


def waiting_sentence(job: Job) -> str:
    """Names who is in and who is missing, without a full stop."""
    sentence = waiting(job.seated(), job.needed, job.settings.rank_table)
    if job.phase is Phase.SUSPENDED and job.deadlines.holders_return > job.now:
        left_s = job.deadlines.holders_return - job.now
        return f"{sentence}; {left_s:.0f} s more for members that may return with the training state"
    spares = [job.ledger.claims[node_id].candidate for node_id in job.ledger.spares]
    if job.phase is not Phase.FORMING or not spares:
        return sentence
    left_s = job.deadlines.spares_fill_in - job.now
    when = f", to fill in after {left_s:.0f} s" if left_s > 0 else ""
    return f"{sentence}; {count(len(spares), 'spare')} in: {nodes(spares)}{when}"


def check_progress(job: Job, now: float) -> None:
    """Reports a standstill of training, ever more rarely; the job goes on waiting."""
    due = stall_due(job)
    if due is None or now < due:
        return
    deadlines = job.deadlines
    report = progress_report(job, now)
    if report:
        deadlines.stalled, deadlines.stall_report = True, now + (now - deadlines.progress_since)
        job.say(report)
        if trains(job):  # who builds is sent the like with each report
            job.tell_members(report)
    else:
        deadlines.progress_since = now


def stall_due(job: Job) -> float | None:
    """When a standstill of training is to be reported (again); None: training is not to go on."""
    deadlines = job.deadlines
    if deadlines.stalled:
        return deadlines.stall_report if trains(job) else None
    rebuilds = job.phase is Phase.BUILDING and job.ledger.ever_established
    if not (trains(job) or rebuilds):
        return None
    return deadlines.progress_since + job.settings.stall_timeout_s


def trains(job: Job) -> bool:
    """Whether a group stands."""
    return job.phase in (Phase.RUNNING, Phase.QUIESCING)


def standing_sentence(job: Job) -> str:
    """Says that the group is established."""
    formed = job.ledger.formed
    remark = f": {STATELESS}" if formed is not None and formed.reason.endswith(STATELESS) else ""
    return f"Generation {job.ledger.generation} stands with {job.size()}{remark}."


def state_reason(job: Job) -> str:
    """What the state is put down to; while all is well, news of single workers do not hide that."""
    complete = job.phase is Phase.RUNNING and not job.ledger.finished
    calm = not job.deadlines.stalled and job.deadlines.suspicion is None
    return standing_sentence(job) if complete and calm else job.reason
