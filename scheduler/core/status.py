"""A job as ``status`` shows it."""

from __future__ import annotations

from scheduler.core import values as v
from scheduler.core.admission import is_spare
from scheduler.core.contacts import Contact
from scheduler.core.ledger import Claim, Ledger, Phase


def worker_view(ledger: Ledger, claim: Claim, contact: Contact, now: float, *, built: bool) -> v.WorkerView:
    """One worker."""
    node_id = claim.candidate.node_id
    rank = ledger.rank_of(node_id)
    local_rank = ledger.formed.members[rank].local_rank if ledger.formed is not None and rank >= 0 else -1
    return v.WorkerView(
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
