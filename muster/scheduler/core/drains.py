"""Drains of hosts and workers: now or at a time of day, how they are cancelled, and what they cost.

A plan names hosts and node ids, not processes: the workers that are there at its time leave, all in one
change of members. A plan is durable and survives a restart of the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muster.scheduler.core import events, records
from muster.scheduler.core.job import Job
from muster.scheduler.core.leaving import plan_leave
from muster.scheduler.core.ledger import Claim, Phase, count, listing, natural_key
from muster.wire import messages

MOST_PLANS = 64
"""The most planned drains of one job."""


def asked(job: Job, event: events.DrainAsked, now: float) -> None:
    """Drains hosts and workers now, or plans their drain."""
    _note_time_of_day(job, event.unix_s - now)
    if job.phase is Phase.ENDED:
        job.outbox.mention(f"Job {job.job_id} has ended.")
        return
    if event.at_s <= event.unix_s:
        drained = _drain(job, event.node_ids, event.hosts, event.reason)
        if not drained:
            job.outbox.mention(f"Nobody is left to drain of {in_words(event.node_ids, event.hosts)}.")
        return
    if len(job.ledger.drains) >= MOST_PLANS:
        job.outbox.mention(f"{MOST_PLANS} drains are planned already; cancel one.")
        return
    number = 1 + max(job.ledger.drains, default=0)
    plan = records.DrainPlanned(number, event.at_s, event.node_ids, event.hosts, event.reason)
    job.commit(plan)
    what, cost = in_words(plan.node_ids, plan.hosts), weigh(job, plan.node_ids, plan.hosts)
    job.outbox.mention(f"The drain of {what} is planned: in {_span(event.at_s - event.unix_s)}. {cost}")


def called_off(job: Job, event: events.DrainCalledOff, now: float) -> None:
    """Cancels planned drains: those of these hosts and node ids, or all."""
    nodes, hosts = set(event.node_ids), set(event.hosts)
    everything = not nodes and not hosts
    kept = []
    for plan in list(job.ledger.drains.values()):
        left_nodes = tuple(each for each in plan.node_ids if each not in nodes)
        left_hosts = tuple(each for each in plan.hosts if each not in hosts)
        if not everything and (left_nodes, left_hosts) == (plan.node_ids, plan.hosts):
            continue
        job.commit(records.DrainOver(plan.number))
        if not everything and (left_nodes or left_hosts):
            job.commit(records.DrainPlanned(plan.number, plan.at_s, left_nodes, left_hosts, plan.reason))
        gone = _without(plan.node_ids, left_nodes), _without(plan.hosts, left_hosts)
        kept.append(in_words(*((plan.node_ids, plan.hosts) if everything else gone)))
    what = f"The drain of {listing(kept)} is called off." if kept else "No such drain is planned."
    job.outbox.mention(what)


def time_of_day(job: Job, event: events.TimeOfDay, now: float) -> None:
    """Records the time of day, which decides when planned drains are due."""
    _note_time_of_day(job, event.unix_s - now)


def _note_time_of_day(job: Job, offset_s: float) -> None:
    """Keeps the largest offset between the time of day and the events' clock, in seconds.

    If an event has waited for the journal, its offset is too small.
    """
    before = job.unix_offset_s
    job.unix_offset_s = offset_s if before is None else max(before, offset_s)


def due(job: Job) -> float | None:
    """When the next planned drain is due, on the clock of events; None if none is planned."""
    if not job.ledger.drains or job.unix_offset_s is None or job.phase is Phase.ENDED:
        return None
    return min(plan.at_s for plan in job.ledger.drains.values()) - job.unix_offset_s


def tend(job: Job, now: float) -> None:
    """Carries out the planned drains that are due."""
    while (next_due := due(job)) is not None and now >= next_due:
        plan = min(job.ledger.drains.values(), key=lambda each: (each.at_s, each.number))
        job.commit(records.DrainOver(plan.number))
        if not _drain(job, plan.node_ids, plan.hosts, plan.reason):
            what = in_words(plan.node_ids, plan.hosts)
            job.outbox.mention(f"The drain of {what} is due, and none of its workers is here.")


def planned_of(job: Job) -> tuple[messages.PlannedDrain, ...]:
    """The planned drains, the next one first."""
    plans = sorted(job.ledger.drains.values(), key=lambda plan: (plan.at_s, plan.number))
    return tuple(messages.PlannedDrain(p.number, p.at_s, p.node_ids, p.hosts, p.reason) for p in plans)


def in_words(node_ids: Collection[str], hosts: Collection[str]) -> str:
    """Formats ``host gpu-17 and nodes 3, 4``."""
    parts = [
        f"{noun if len(names) == 1 else noun + 's'} {listing(sorted(names, key=natural_key))}"
        for noun, names in (("host", hosts), ("node", node_ids))
        if names
    ]
    return " and ".join(parts)


def targets(job: Job, node_ids: Collection[str], hosts: Collection[str]) -> list[Claim]:
    """The workers that these node ids and hosts (by name, id or address) refer to, in order of rank."""
    found = [
        claim
        for node_id, claim in job.ledger.claims.items()
        if node_id in node_ids or not _names(claim).isdisjoint(hosts)
    ]
    return sorted(found, key=lambda claim: (job.rank_of(claim.candidate.node_id) < 0, _order(job, claim)))


def _order(job: Job, claim: Claim) -> tuple[int, object]:
    node_id = claim.candidate.node_id
    return job.rank_of(node_id), natural_key(node_id)


def _names(claim: Claim) -> set[str]:
    host = claim.candidate.host
    return {host.name, host.id, host.address}


def _without(names: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(each for each in names if each not in others)


def _drain(job: Job, node_ids: Collection[str], hosts: Collection[str], reason: str) -> list[Claim]:
    """Plans the leave of all of them together, so that one change of members covers all."""
    found = [claim for claim in targets(job, node_ids, hosts) if claim.leaving is None]
    for claim in found:
        plan_leave(job, claim, reason)
    job.needs_advance |= bool(found)
    return found


# ---------------------------------------------------------------- what it costs


def weigh(job: Job, node_ids: Collection[str], hosts: Collection[str]) -> str:
    """Describes what draining these workers would cost at present: steps, seconds and speed."""
    found = [claim for claim in targets(job, node_ids, hosts) if claim.leaving is None]
    members = [claim for claim in found if job.rank_of(claim.candidate.node_id) >= 0]
    if not found:
        return f"None of {in_words(node_ids, hosts)} is here now."
    if not members or job.ledger.opened is None:
        return f"{count(len(found), 'worker')} without a rank would go: training does not notice."
    goers = {claim.candidate.node_id for claim in found}
    staying = [claim for claim in job.ledger.staying() if claim.candidate.node_id not in goers]
    size, least = len(job.ledger.ranks), job.ledger.opened.worker_min
    left = min(len(staying), job.ledger.opened.worker_num)
    who = f"{count(len(members), 'rank')} of {size} would go"
    if left < least:
        return (
            f"{who}, {left} would be left, and MS_WORKER_MIN is {least}: the job would be suspended, its"
            f" state saved by one of them, until {count(least - left, 'worker')} more {_come(least - left)}."
        )
    return f"{who}. {_steps(job, goers)} {_seconds(job)} {_speed(job, left, size)}"


def _come(number: int) -> str:
    return "comes" if number == 1 else "come"


def _steps(job: Job, goers: Collection[str]) -> str:
    stateless = job.stateless()
    holders = [each for each in job.ledger.claims if job.ledger.holds_state(each, stateless)]
    if job.phase is Phase.RUNNING and any(each not in goers for each in holders):
        return "No step is lost: all finish the one that they are in."
    if job.phase is Phase.RUNNING:
        return "No step is lost if newcomers take over the state from those that go."
    return f"The job is {job.phase.value} just now; a step that has not been finished is made again."


def _seconds(job: Job) -> str:
    """A sentence on how long the change would take, from recent changes and the length of a step."""
    last_s, step_s = job.last_change_s, job.stragglers.step_s()
    within = f", after the end of a step ({step_s:.2g} s)" if step_s else ""
    if last_s is None:
        return f"How long a change takes is not known: this scheduler has seen none of this job{within}."
    return f"The last change took {last_s:.1f} s{within}."


def _speed(job: Job, left: int, size: int) -> str:
    if left >= size:
        return f"Others take the places: {count(left, 'rank')} as before."
    return f"{count(left, 'rank')} train on: about {100 * left / size:.0f} % of the samples a second."


def _span(seconds: float) -> str:
    """Formats a duration: ``2 h 5 min``, ``5 min``, ``40 s``."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"
