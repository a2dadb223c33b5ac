"""Handles messages of members: heartbeats, unique ids, progress, and the members for which they wait."""

from __future__ import annotations

from muster.scheduler.core import events, evidence, gpus, holdups, phases, probing
from muster.scheduler.core.job import Job, Suspicion
from muster.scheduler.core.ledger import Phase, count, early_end, upper_first, who
from muster.scheduler.core.members import Contact
from muster.wire import messages


def heard(job: Job, event: events.Heard, now: float) -> None:
    """Handles a heartbeat."""
    claim = job.sender(event.session)
    if claim is None or event.generation > job.ledger.generation:
        return
    settled = job.ledger.established and event.generation == job.ledger.generation
    node_id = claim.candidate.node_id
    contact = job.members.by_node[node_id]
    if settled:
        job.goodput.step_heard(event.step, now, fell=_fell(job, contact, event))
        job.goodput.checkpoints_heard(node_id, event.checkpoints_s, now)
    lacked_state = claim.newcomer and not contact.has_moved
    if contact.entered < event.entered_generation == job.ledger.generation:
        _came_to_build(job, now)
    trains = job.phase is not Phase.BUILDING or job.switches_by_steps
    if job.members.hear(node_id, event, settled=settled) and trains:
        job.deadlines.progress_since = now
        if probing.all_have_moved(job) or job.deadlines.stalled:
            job.deadlines.stalled = False
            job.probing.forget_waits()
            evidence.over(job)
            sentence = f"Training goes on at step {event.step}."
            job.say(sentence)
            job.tell_members(sentence, wait=False)
    if event.snapshot is not None:
        _take_snapshots(job, node_id, event, event.snapshot)
    if event.gpu is not None:
        gpus.heard(job, node_id, event.gpu, now)
    if event.times is not None and settled and job.stragglers.hear(node_id, event.times, now):
        job.goodput.data_waited(job.stragglers.data_s(now), now)
        holdups.interval_ended(job, now)
    moved = lacked_state and contact.has_moved  # A leaving member may be waiting for that.
    job.needs_advance = job.needs_advance or moved


def _fell(job: Job, contact: Contact, event: events.Heard) -> bool:
    """Whether a member went back in its steps, or started over because no member held the state."""
    formed = job.ledger.formed
    afresh = formed is not None and formed.generation > 1 and formed.state_source_rank < 0
    return event.step < contact.step or (afresh and not contact.has_moved)


def _take_snapshots(job: Job, node_id: str, event: events.Heard, report: messages.SnapshotReport) -> None:
    """Updates which snapshots a worker keeps, and tells all members what follows."""
    agreement = job.snapshots
    before = agreement.word
    word = agreement.hear(node_id, report, event.step)
    if word is None:
        return
    if before is None or before.complete != word.complete:
        agreement.taken_at = job.now - report.age_s
    job.send_to_members(word)


def _came_to_build(job: Job, now: float) -> None:
    """Gives a worker that starts to build late, perhaps after all time-outs, its time to build.

    A worker that starts early gets no extra time, so that a group that fails repeatedly is not retried for
    ever.
    """
    late = now > job.deadlines.formed_at + job.settings.topo_timeout_s / 2
    if late and job.phase is Phase.BUILDING and job.ledger.ever_established:
        job.deadlines.phase_since = now


def published(job: Job, event: events.UniqueIdsPublished, now: float) -> None:
    """Sends the unique ids of rank 0 to all members."""
    node_id = job.member_behind(event.session, event.generation)
    if node_id is None or job.rank_of(node_id) != 0 or job.phase is not Phase.BUILDING:
        return
    if len(event.unique_ids) != job.unique_id_count or not all(event.unique_ids):
        problem = f"handed in {len(event.unique_ids)} of {count(job.unique_id_count, 'unique id')}"
        job.lose(node_id, problem, messages.RefusalCode.MALFORMED)
    elif not job.current.unique_ids:
        job.current.unique_ids = event.unique_ids
        job.send_to_members(messages.UniqueIds(event.generation, event.unique_ids))


def built_reported(job: Job, event: events.BuiltReported, now: float) -> None:
    """Notes that a member has built its group."""
    node_id = job.member_behind(event.session, event.generation)
    if node_id is None:
        return
    # The worker had built the group before its next heartbeat.
    if job.members.by_node[node_id].entered < job.ledger.generation:
        _came_to_build(job, now)
    job.mark_built(node_id)


def quiesced_reported(job: Job, event: events.QuiescedReported, now: float) -> None:
    """Notes that a member has stopped at a step boundary."""
    node_id = job.member_behind(event.session, event.generation)
    if node_id is None:
        return
    if job.phase is Phase.RUNNING and job.ledger.wanted_change(job.settings) is None:
        phases.quiesce(job, "a change was under way before the scheduler restarted")
    job.members.quiesce(node_id, event.last_started_step)


def peer_suspected(job: Job, event: events.PeerSuspected, now: float) -> None:
    """Handles a failed collective: either the peer is lost, or the group is built again."""
    if event.rank < 0:  # No peer is suspected, but the missing one may be a member that has finished.
        node_id = job.member_behind(event.session, event.generation)
        if node_id is not None:
            job.current.puzzled.add(node_id)
            probing.explain_failures(job)
        return
    claim = job.sender(event.session)
    formed, phase = job.ledger.formed, job.phase
    if claim is None or formed is None or phase in (Phase.SUSPENDED, Phase.ENDED):
        return
    own = who(claim.candidate, job.rank_of(claim.candidate.node_id))
    peer = "its peers"
    # A worker that names its own rank does not know which peer failed.
    suspects = event.rank != job.rank_of(claim.candidate.node_id)
    if suspects and event.generation == formed.generation and 0 <= event.rank < len(formed.members):
        peer = who(formed.members[event.rank].candidate, event.rank)
    sentence = f"{own} could not go on with {peer}: {event.detail}"
    if job.ledger.finished:
        sentence = f"{sentence}; {early_end(job.ledger)}"
    planned = phase is Phase.BUILDING and formed.switch_after_step >= 0
    if event.generation == job.ledger.stood and planned:
        job.current.broken = sentence  # The others may hang in the last step before the planned switch.
    elif event.generation != formed.generation or job.rank_of(claim.candidate.node_id) < 0:
        return
    job.say(f"{upper_first(sentence)}.")
    if job.deadlines.suspicion is None:
        job.deadlines.suspicion = Suspicion(now + job.patience.member_s, sentence)
    probing.want_round(job, now, urgent=True)


def peer_late(job: Job, event: events.PeerLate, now: float) -> None:
    """Starts a round of probes, because a member is waiting for its peers."""
    claim = job.sender(event.session)
    if claim is not None and job.rank_of(claim.candidate.node_id) >= 0:
        probing.want_round(job, now, urgent=False)


def probed(job: Job, event: events.ProbeAnswered, now: float) -> None:
    """Handles a worker's answer to a round of probes."""
    job.sender(event.session)
    probing.take_answer(job, event, now)
