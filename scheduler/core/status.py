"""A job as ``status`` shows it."""

from __future__ import annotations

from dataclasses import dataclass

from muster.scheduler.core.admission import is_spare
from muster.scheduler.core.contacts import Contact
from muster.scheduler.core.ledger import Claim, Ledger, Phase
from muster.scheduler.core.values import Candidate, Collective


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as ``status`` shows it; ``rank`` and ``local_rank`` are -1 while there is none."""

    candidate: Candidate
    state: str
    rank: int
    local_rank: int
    silent_s: float
    step: int
    samples_per_s: float
    last_collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as ``status`` shows it. ``state``: forming, building, running, quiescing, suspended, ended."""

    job_id: str
    state: str
    generation: int
    worker_num: int
    worker_min: int
    workers: tuple[WorkerView, ...]
    missing: tuple[str, ...]
    reason: str


def worker_view(ledger: Ledger, claim: Claim, contact: Contact, now: float, *, built: bool) -> WorkerView:
    """One worker."""
    node_id = claim.candidate.node_id
    rank = ledger.rank_of(node_id)
    local_rank = ledger.formed.members[rank].local_rank if ledger.formed is not None and rank >= 0 else -1
    return WorkerView(
        candidate=claim.candidate,
        state=_state(ledger, claim, contact, rank, built),
        rank=rank,
        local_rank=local_rank,
        silent_s=max(0.0, now - contact.last_heard),
        step=contact.step,
        samples_per_s=contact.samples_per_s,
        last_collective=contact.recent[-1] if contact.recent else None,
    )


def _state(ledger: Ledger, claim: Claim, contact: Contact, rank: int, built: bool) -> str:
    if contact.session is None:
        return "lost"
    if claim.leaving is not None:
        return "leaving"
    if rank < 0:
        return "spare" if is_spare(ledger, claim) else "waiting"
    if ledger.phase is Phase.BUILDING and not built:
        return "building"
    return "member"
