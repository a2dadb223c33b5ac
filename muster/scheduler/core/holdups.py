"""Reports ranks that hold up the others, and drains them if the settings say so."""

from __future__ import annotations

from muster.scheduler.core.job import Job
from muster.scheduler.core.leaving import plan_leave
from muster.scheduler.core.ledger import Phase, upper_first
from muster.scheduler.core.stragglers import COMPUTING, DATA, LINK, Holdup, Named, in_words
from muster.wire import messages


def interval_ended(job: Job, now: float) -> None:
    """At the end of an interval, reports who now holds up the others and who no longer does.

    Drains one if wanted.
    """
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
    """The ranks that hold up a job, the worst first, followed by recent single long steps."""
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
    """Drains the worst straggler if a spare is waiting. One at a time, and never for a slow link, because
    either of its ends may be the cause.
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
