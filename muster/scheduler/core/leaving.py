"""Handles departures: Leave messages, drains, ends of streams, and launchers' reports."""

from __future__ import annotations

from muster.scheduler.core import events, gpus, probing, records
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import Claim, Phase, named_first, upper_first, who
from muster.wire import messages


def leave_requested(job: Job, event: events.LeaveRequested, now: float) -> None:
    """Plans the leave that a worker has asked for."""
    claim = job.sender(event.session)
    if claim is not None:
        plan_leave(job, claim, event.reason)


def drain_requested(job: Job, event: events.DrainRequested, now: float) -> None:
    """Plans the leave of a worker, for an operator."""
    claim = job.ledger.claims.get(event.node_id)
    if claim is None or job.phase is Phase.ENDED:
        job.outbox.mention(f"Job {job.job_id} has no worker with node id {event.node_id}.")
        return
    if claim.leaving is not None:
        job.outbox.mention(f"{named_first(claim.candidate)} is leaving already: {claim.leaving}.")
    plan_leave(job, claim, event.reason)


def plan_leave(job: Job, claim: Claim, reason: str) -> None:
    """Plans a leave: a member leaves at the next step boundary, any other worker immediately."""
    node_id, phase = claim.candidate.node_id, job.phase
    rank = job.rank_of(node_id)
    if phase is Phase.ENDED or claim.leaving is not None:
        return
    if rank >= 0:
        job.commit(records.LeavePlanned(node_id, claim.candidate.incarnation, reason))
    if rank >= 0 and phase is not Phase.SUSPENDED:
        job.say(f"{named_first(claim.candidate, rank)} will leave at a step boundary: {reason}.")
    else:
        job.dismiss(claim, job.farewell(reason), f"left: {reason}")
        job.say(f"{named_first(claim.candidate)} has left: {reason}.")


def expel(job: Job, event: events.Expel, now: float) -> None:
    """Takes a worker's place away immediately."""
    if event.node_id in job.ledger.claims and job.phase is not Phase.ENDED:
        job.lose(event.node_id, f"was expelled: {event.reason}", messages.RefusalCode.EXPELLED)


def left(job: Job, event: events.LeftCleanly, now: float) -> None:
    """Handles a worker's Leave."""
    claim = job.sender(event.session)
    job.admissions.held_back.pop(event.session, None)
    if claim is None or job.phase is Phase.ENDED:
        job.outbox.send(event.session, messages.Ended(True, "Goodbye.", first_loss=job.first_loss))
        return
    node_id = claim.candidate.node_id
    rank = job.rank_of(node_id)
    finished = event.finished and rank >= 0
    why = event.reason.rstrip(".") or "no reason given"
    what = "has completed the training" if finished else f"left: {why}"
    sentence = f"{who(claim.candidate, rank)} {what}"
    if not (finished or event.consequence):
        job.note_loss(node_id, sentence, exit_code=event.exit_code)
    job.outbox.send(event.session, messages.Ended(True, "Goodbye.", first_loss=job.first_loss))
    if event.gpu_fault:
        gpus.remember(job, claim.candidate, job.members.by_node[node_id].gpu_uuid, event.gpu_fault)
    job.remove(node_id, sentence, finished=finished)
    job.say(f"{upper_first(sentence)}.")
    probing.explain_failures(job)


def session_lost(job: Job, event: events.SessionLost, now: float) -> None:
    """Handles the end of a stream without a Leave."""
    job.admissions.held_back.pop(event.session, None)
    node_id = job.members.nodes.get(event.session)
    if node_id is None or job.phase is Phase.ENDED:
        return
    if now < job.deadlines.forgiving_until:
        # The process itself may have ended, and its last messages may be lost with the stream.
        job.members.has_spoken(node_id, now)
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
    elif silent_s < patience_s:  # The worker may still be alive, as during a pause.
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


def process_ended(job: Job, event: events.ProcessEnded, now: float) -> None:
    """Handles a launcher's report that a process has ended. An earlier scheduler may have known the process.

    The report alone expels nobody: it counts only for that incarnation, and only if the incarnation has no
    stream. For a worker with a stream, the kernel's report of the stream's end is more reliable, and arrives
    after everything that the worker has sent.
    """
    claim = job.ledger.claims.get(event.node_id)
    if claim is None or claim.candidate.incarnation != event.incarnation or job.phase is Phase.ENDED:
        return
    if job.members.session_of(event.node_id) is None:
        job.lose(event.node_id, f"is lost: its launcher says that it {event.detail}")
