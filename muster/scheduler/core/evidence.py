"""Evidence of a hang: which workers are asked for their stacks, when, and how long to wait for their answers.

A rank that is reported as late is asked before the hang time-out ends, once per hang. An operator may ask at
any time. Asking has no effect on the job: a worker answers, or the request times out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from muster.scheduler.core import events
from muster.scheduler.core.evidence_state import GATHER_S, INCIDENTS_APART_S, Gathering
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import natural_key
from muster.wire import messages

ASKED_AT_MOST = 8
"""The most late ranks that are asked in one request."""

EACH_BYTES = 64 * 1024
ALL_BYTES = 4 << 20
"""Limits in bytes of the answer of one worker and of all workers, which the scheduler holds in memory for a
moment.
"""

TOO_OLD = "its Muster, or what carries its stream, is older than these requests"
NO_STREAM = "it has no stream at the moment"
NO_ANSWER = (
    f"it did not answer within {GATHER_S:g} s: it is stopped, or C code holds its interpreter's lock;"
    " its launcher takes its stacks when it is lost"
)


def standstill(job: Job, now: float, node_ids: Collection[str], sentence: str) -> None:
    """Asks the ranks that are reported as late for their stacks, unless this hang has been handled already.

    Args:
        job: the job.
        now: the time.
        node_ids: the ranks that are reported.
        sentence: the report.
    """
    evidence = job.evidence
    if evidence.gathered or now < evidence.not_before or not node_ids:
        return
    evidence.gathered, evidence.not_before = True, now + INCIDENTS_APART_S
    _ask(job, now, sorted(node_ids, key=natural_key)[:ASKED_AT_MOST], ticket=0, sentence=sentence)


def over(job: Job) -> None:
    """Training goes on, so the next standstill counts as a new one."""
    job.evidence.gathered = False


def stacks_requested(job: Job, event: events.StacksRequested, now: float) -> None:
    """Asks one worker, or all, for an operator."""
    asked = [event.node_id] if event.node_id else list(job.ledger.claims)
    known = [node_id for node_id in asked if node_id in job.ledger.claims]
    _ask(job, now, known, ticket=event.ticket, sentence="asked for by an operator")


def stacks_told(job: Job, event: events.StacksTold, now: float) -> None:
    """Stores a worker's answer; the last answer ends the request."""
    claim = job.sender(event.session)
    gathering = job.evidence.open.get(event.request)
    if claim is None or gathering is None or claim.candidate.node_id not in gathering.awaited:
        return
    gathering.awaited.discard(claim.candidate.node_id)
    gathering.told[claim.candidate.node_id] = event.text
    if not gathering.awaited:
        _conclude(job, event.request)


def tend(job: Job, now: float) -> None:
    """Ends the requests that have timed out."""
    for number, gathering in list(job.evidence.open.items()):
        if now >= gathering.due:
            _conclude(job, number)


def _ask(job: Job, now: float, node_ids: Collection[str], *, ticket: int, sentence: str) -> None:
    evidence = job.evidence
    evidence.number += 1
    gathering = Gathering(now + GATHER_S, ticket, sentence, job.ledger.generation)
    evidence.open[evidence.number] = gathering
    limit_bytes = min(EACH_BYTES, ALL_BYTES // max(1, len(node_ids)))
    for node_id in node_ids:
        session = job.members.session_of(node_id)
        if session is None:
            gathering.obstacles[node_id] = NO_STREAM
        elif session not in evidence.givers:
            gathering.obstacles[node_id] = TOO_OLD
        else:
            gathering.awaited.add(node_id)
            job.outbox.send(session, messages.StacksWanted(evidence.number, limit_bytes))
    if not gathering.awaited:
        _conclude(job, evidence.number)


def _conclude(job: Job, number: int) -> None:
    gathering = job.evidence.open.pop(number)
    gathering.obstacles |= dict.fromkeys(gathering.awaited, NO_ANSWER)
    asked = gathering.told.keys() | gathering.obstacles.keys()
    members = [claim.candidate.node_id for claim in job.ledger.living_members()]
    # Evidence of a hang has the collectives of all ranks, because they show for what the ranks wait. An
    # operator gets only the requested workers.
    shown = members if not gathering.ticket else [node_id for node_id in members if node_id in asked]
    others = sorted(asked - set(members), key=natural_key)
    ranks = tuple(_of_ranks(job, gathering, [*shown, *others]))
    job.outbox.bundles.append(
        events.Bundle(gathering.ticket, gathering.sentence, gathering.generation, ranks)
    )


def _of_ranks(job: Job, gathering: Gathering, node_ids: Iterable[str]) -> Iterable[events.RankEvidence]:
    for node_id in node_ids:
        claim, contact = job.ledger.claims.get(node_id), job.members.by_node.get(node_id)
        if claim is None or contact is None:  # The worker is gone by now.
            continue
        yield events.RankEvidence(
            claim.candidate,
            job.rank_of(node_id),
            contact.step,
            contact.started_step,
            contact.recent,
            gathering.told.get(node_id, ""),
            gathering.obstacles.get(node_id, ""),
        )
