"""The phases of a job: what follows from the state in which its events have left it."""

from __future__ import annotations

from collections.abc import Collection

from muster.scheduler.core import events, records
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import (
    STATELESS,
    Claim,
    Phase,
    all_in,
    are_in,
    count,
    listing,
    named_first,
    nodes,
)
from muster.scheduler.core.reports import absent, awaited, progress_report
from muster.scheduler.core.sentences import standing_sentence, waiting_message, waiting_sentence
from muster.wire import messages
from muster.wire.time_by_cause import FORMING, REDOING, SUSPENDED, TRAINING

HAND_OVER_S = 15.0
"""How long a leaving member waits for others to take the state, in seconds: half of Kubernetes' grace
period.
"""


RETURN_S = 5.0
"""How long a suspended job in which no worker holds the state waits for the members that did, in seconds.
Longer than the pauses between a worker's attempts to connect.
"""


def advance(job: Job, now: float) -> None:
    """Moves the job from phase to phase until nothing more follows from its state."""
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


def cause(job: Job) -> str:
    """The present cause of the job's time, one of :mod:`muster.wire.time_by_cause`."""
    phase = job.phase
    if phase is Phase.SUSPENDED:
        return SUSPENDED
    if phase in (Phase.RUNNING, Phase.QUIESCING) or job.switches_by_steps:
        return REDOING if job.goodput.redo_until else TRAINING
    return FORMING if phase is not Phase.ENDED and job.ledger.claims else ""


def note_phase(job: Job, now: float) -> None:
    """Records when the phase began."""
    job.goodput.follow(cause(job), now)
    if job.phase is not job.phase_seen:
        job.phase_seen = job.phase
        job.deadlines.phase_since = job.deadlines.progress_since = now
        job.deadlines.report = now + job.settings.waiting_report_interval_s


def timed_out(job: Job, now: float) -> bool:
    """Whether the phase has taken too long."""
    return now >= times_out_at(job)


def times_out_at(job: Job) -> float:
    """When forming, building or waiting will have taken too long.

    If it took long to find that a group cannot work (two hosts do not reach each other, a member hangs), the
    next group still has at least half of the time. All tries together have at most twice the time, so that
    nothing is retried for ever.
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
    """Whether the wait for more members than needed (MS_LAST_CALL_TIMEOUT) is over."""
    deadlines = job.deadlines
    if not deadlines.last_call_s or not _could_form(job, worker_min):
        deadlines.last_call = 0.0
        return False
    deadlines.last_call = deadlines.last_call or now + deadlines.last_call_s
    return now >= deadlines.last_call and len(job.ledger.choose(job.settings)) >= worker_min


def _could_form(job: Job, least: int) -> bool:
    """Whether this many workers can form a group: each line of a rank table counts only once."""
    ledger = job.ledger
    staying = len(ledger.claims) - len(ledger.leaving)
    if staying < least or job.settings.rank_table is None:
        return staying >= least
    # Ordinary workers have lines of their own.
    return staying - len(ledger.spares - ledger.leaving) >= least or len(ledger.choose(job.settings)) >= least


def _enough_to_form(job: Job, worker_num: int, now: float) -> bool:
    """Whether to form the first group now. Spares wait a while for ordinary workers."""
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
        # A finished worker has done the last step before a planned switch, and a worker that had not arrived
        # yet takes no part in that step. The others still have to do it.
        return regroup(job, now, _departure(job), ledger.formed.switch_after_step)
    if len(job.current.built) == len(job.ledger.ranks):
        job.commit(records.GroupEstablished(job.ledger.generation))
        job.probing.drop_round_of_members()
        job.send_to_members(messages.GroupBuilt(job.ledger.generation))
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
        # A training member and a hanging member look alike, so this is reported as in a running job.
        job.deadlines.phase_since = now
        return False
    return end(job, False, f"The group was not built in time: {awaited(job)}.")


def departure_due(job: Job) -> float | None:
    """When departing members lose their node ids, if the others already train without them."""
    running = job.phase is Phase.RUNNING
    return job.deadlines.phase_since + HAND_OVER_S if running and _departing(job) else None


def _let_go(job: Job, now: float) -> None:
    """Removes departing members whose Leave does not come, for example because their training hangs."""
    due = departure_due(job)
    for claim in _departing(job) if due is not None and now >= due else ():
        what = f"had {HAND_OVER_S:g} s to say goodbye and did not; its node id is free"
        job.outbox.mention(f"{named_first(claim.candidate)} {what}.")
        job.dismiss(claim, job.farewell(claim.leaving or ""), what)


def _advance_running(job: Job, now: float) -> bool:
    ledger = job.ledger
    _let_go(job, now)
    if ledger.lost or len(ledger.finished) == len(ledger.ranks):
        return regroup(job, now, _departure(job))
    if _suspicion_due(job, now) or _hand_over_overdue(job, now):
        return True
    if job.deadlines.hand_over is not None:  # The leaving worker is still needed.
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
    change = _planned(job)  # More workers may want to leave by now.
    # A member whose collective failed cannot finish the step with the others.
    if job.deadlines.suspicion is not None:
        return regroup(job, now, change)
    if hand_over_first(job):
        return True
    return regroup(job, now, change, job.members.last_started_step())


def hand_over_first(job: Job) -> bool:
    """Lets members that have stopped continue, if a leaving member has to hand over the state first."""
    if not job.ledger.is_handing_over(job.members.stateless()):
        return False
    for claim in job.ledger.living_members():  # Members that get the assignment again may continue.
        node_id = claim.candidate.node_id
        job.send(node_id, job.assignment(job.rank_of(node_id)))
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
    """Whether to wait for lost members that held the state, because a member that was cut off may return."""
    ledger, stateless = job.ledger, job.members.stateless()
    members = job.trained.keys() | ledger.ranks.keys()
    gone = members - ledger.finished - ledger.parted - ledger.claims.keys()
    known = ledger.living and any(ledger.holds_state(node_id, stateless) for node_id in ledger.claims)
    if known or not gone or not ledger.ever_established:
        return False
    job.deadlines.holders_return = job.deadlines.holders_return or now + RETURN_S
    return now < job.deadlines.holders_return


def _departure(job: Job) -> str:
    """Says why members are gone."""
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
    """The time by which a planned change must be made; None if there is none."""
    if job.switches_by_steps or job.phase is Phase.QUIESCING:
        return job.deadlines.phase_since + _switch_patience_s(job)
    return None


def _switch_patience_s(job: Job) -> float:
    return min(job.settings.stall_timeout_s, job.settings.topo_timeout_s)


def _switch_overdue(job: Job, now: float) -> bool:
    """Makes a planned change immediately if some member cannot reach the step of the switch."""
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
    """Names the workers that join or leave by the planned change in progress."""
    if job.phase is Phase.QUIESCING:
        return job.ledger.wanted_change(job.settings) or job.current.plan or ""
    return job.current.change


def _hand_over_overdue(job: Job, now: float) -> bool:
    """Lets leaving members that hold the state go if no other member took it in time; they save it."""
    stateless = job.members.stateless()
    if not job.ledger.is_handing_over(stateless):
        job.deadlines.hand_over = None
    elif job.deadlines.hand_over is None:
        job.deadlines.hand_over = now + HAND_OVER_S
    elif now >= job.deadlines.hand_over:
        job.deadlines.hand_over = None
        for claim in job.ledger.leaving_holders(stateless):
            what = f"left: nobody took the training state from it within {HAND_OVER_S:g} s"
            job.say(f"{named_first(claim.candidate)} {what}.")
            job.dismiss(claim, job.farewell(claim.leaving or ""), what)
        return True
    return False


def quiesce(job: Job, reason: str) -> bool:
    """Asks all members to stop at a step boundary."""
    job.current.plan, job.deadlines.hand_over = reason, None
    job.members.forget_quiesced()
    job.send_to_members(messages.Quiesce(job.ledger.generation, reason))
    job.say(f"A change of members is prepared: {reason}.")
    return True


def regroup(job: Job, now: float, reason: str, switch_after_step: int = -1) -> bool:
    """Forms the next generation from the available workers, or suspends the job, or ends it."""
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


def _remark_on_state(job: Job, chosen: Collection[messages.Candidate], stateless: Collection[str]) -> str:
    """Adds a remark if the next generation begins without the training state."""
    ledger = job.ledger
    givers = [c.node_id for c in chosen if ledger.claims[c.node_id].leaving is not None]
    if givers:
        return f"; node {listing(givers)} stays until it has handed over the training state"
    known = any(ledger.holds_state(c.node_id, stateless) for c in chosen)
    return f"; {STATELESS}" if ledger.ever_established and not known else ""


def _release_idle(job: Job, chosen: Collection[str]) -> None:
    """Once a member has finished, dismisses the workers that have neither a place nor the state."""
    for node_id, claim in list(job.ledger.claims.items()):
        if node_id not in chosen and claim.leaving is None:
            sentence = "The job is finishing and needs no more workers."
            job.dismiss(claim, messages.Ended(True, sentence), "is not needed any more")


def _departing(job: Job) -> list[Claim]:
    """Former members that are leaving as planned."""
    return [
        claim
        for claim in map(job.ledger.claims.__getitem__, sorted(job.ledger.leaving))
        if claim.since and job.rank_of(claim.candidate.node_id) < 0
    ]


def _suspend(job: Job, reason: str) -> bool:
    """Suspends the job because too few members are left: the survivors keep their state and wait."""
    ledger = job.ledger
    if ledger.phase is Phase.SUSPENDED:
        return False
    assert ledger.opened is not None
    job.commit(records.GenerationEnded(ledger.generation, reason))
    for claim in [claim for claim in ledger.claims.values() if claim.leaving is not None]:
        job.dismiss(claim, job.farewell(claim.leaving or ""), "left as planned")
    sentence = _suspension(job)
    wait_s = job.settings.topo_timeout_s  # Not in the sentence: the worker adds it to its own message.
    stateless = job.stateless()
    members = [claim.candidate.node_id for claim in ledger.living_members()]
    heard = [node_id for node_id in members if job.members.session_of(node_id) is not None]
    holders = [node_id for node_id in heard if ledger.holds_state(node_id, stateless)]
    for node_id in heard:
        save = node_id in holders[:1]
        job.send(node_id, messages.Suspended(ledger.generation, f"{sentence}.", wait_s, job.first_loss, save))
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
    """Sets what ``status`` shows for a job that was just recovered, until something happens."""
    ledger, phase = job.ledger, job.phase
    if phase is Phase.SUSPENDED:
        wait_s = job.settings.topo_timeout_s
        job.reason = f"{_suspension(job)}; waiting up to {wait_s:g} s for more."
    elif phase is Phase.BUILDING and ledger.formed is not None:
        job.reason = f"Generation {ledger.generation} is formed with {job.size()}: {ledger.formed.reason}."
    elif phase is Phase.FORMING and ledger.claims:
        job.reason = waiting_message(job).sentence


def end(
    job: Job, ok: bool, reason: str, refusal: messages.RefusalCode = messages.RefusalCode.TOPO_TIMEOUT
) -> bool:
    """Ends the job; ``refusal`` is the answer to workers whose group has never formed."""
    formed = job.ledger.formed is not None
    job.commit(records.JobEnded(ok, reason))
    ended = messages.Ended(ok, reason, first_loss=job.first_loss)
    message = ended if formed else messages.Refused(refusal, reason)
    for node_id in job.ledger.claims:
        job.send(node_id, message)
    job.members.nodes.clear()
    job.say(reason)
    return True


def end_requested(job: Job, event: events.EndRequested, now: float) -> None:
    """Ends the job for an operator. Workers outside the group get the same answer to their next message."""
    if job.phase is not Phase.ENDED:
        end(job, False, f"An operator has ended the job: {event.reason}", messages.RefusalCode.JOB_ENDED)
