"""What is said and done of ranks that hold the others up."""

from __future__ import annotations

from muster.scheduler.core.job import Job
from muster.scheduler.core.leaving import plan_leave
from muster.scheduler.core.ledger import Phase, upper_first
from muster.scheduler.core.stragglers import COMPUTING, DATA, LINK, Holdup, Named, in_words
from muster.wire import messages


def interval_ended(job: Job, now: float) -> None:
    """Says who holds the others up from now on, who does so no more, and drains where that is wanted."""
    watch, told = job.stragglers, job.told_stragglers
    for node_id, named in watch.named.items():
        if told.get(node_id) != named.finding.kind:
            told[node_id] = named.finding.kind
            job.outbox.mention(_sentence(job, named, now))
    for node_id in told.keys() - watch.named.keys():
        kind = told.pop(node_id)
        if node_id in job.ledger.claims:
            name = job.name(node_id)
            who = f"The link from {name}" if kind == LINK else upper_first(name)
            job.outbox.mention(f"{who} holds nobody up any more.")
    _drain(job, now)


def stragglers_of(job: Job, now: float) -> tuple[messages.Straggler, ...]:
    """Who holds a job's ranks up, the worst first, and then single long steps of late."""
    if job.phase not in (Phase.RUNNING, Phase.QUIESCING):
        return ()
    watch = job.stragglers
    shown = [*watch.named.values()]
    shown += [seen for node_id, seen in watch.one_offs.items() if node_id not in watch.named]
    return tuple(
        messages.Straggler(
            named.finding.node_id,
            job.rank_of(named.finding.node_id),
            named.finding.kind,
            max(0.0, now - named.since),
            named.finding.excess_s,
            named.finding.slowdown,
            named.finding.peer_rank,
            _sentence(job, named, now),
        )
        for named in shown
        if named.finding.node_id in job.ledger.claims
    )


def _sentence(job: Job, named: Named, now: float) -> str:
    finding = named.finding
    sentence = in_words(finding, job.name(finding.node_id), _peer(job, finding), now - named.since)
    return upper_first(sentence)


def _peer(job: Job, finding: Holdup) -> str:
    ranks = {rank: node_id for node_id, rank in job.ledger.ranks.items()} if finding.peer_rank >= 0 else {}
    node_id = ranks.get(finding.peer_rank)
    known = node_id is not None and node_id in job.ledger.claims
    return job.name(node_id) if known and node_id is not None else f"rank {finding.peer_rank}"


def _drain(job: Job, now: float) -> None:
    """Lets the worst straggler go where a spare waits; one at a time, and nobody for a link, whose end may
    be either.
    """
    policy = job.settings.drain_stragglers
    if policy is None or job.phase is not Phase.RUNNING or not job.ledger.spares:
        return
    for node_id, named in job.stragglers.named.items():
        finding, seconds = named.finding, now - named.since
        slow = finding.slowdown >= policy.slowdown and seconds >= policy.seconds
        if finding.kind in (COMPUTING, DATA) and slow and node_id in job.ledger.claims:
            reason = f"steps took {finding.slowdown:.1f} times as long because of it for {seconds:.0f} s"
            plan_leave(job, job.ledger.claims[node_id], f"{reason}, and a spare waits (--drain-stragglers)")
            job.needs_advance = True
            return
