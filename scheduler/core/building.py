"""How far the group of a new generation is, and for whom it waits."""

from __future__ import annotations

from collections.abc import Collection

from muster.scheduler.core.contacts import Contact, Contacts
from muster.scheduler.core.ledger import Claim, Ledger
from muster.scheduler.core.wording import count, listing, who

NAMED_AT_MOST = 4


def absent(ledger: Ledger, contacts: Contacts, built: Collection[str]) -> list[Claim]:
    """Members of a job that has trained whose thread has not come to build: it is still busy elsewhere.

    Before a job has trained all begin to build at once, and nobody has a reason to be elsewhere.
    """
    if not ledger.ever_established:
        return []
    return [
        claim
        for claim in ledger.living_members()
        if claim.candidate.node_id not in built
        and contacts.by_node[claim.candidate.node_id].entered < ledger.generation
    ]


def building_sentence(ledger: Ledger, contacts: Contacts, built: Collection[str], *, ids: bool) -> str:
    """Who has not built the group yet; if some have not come to it, then only those, and where they are.

    Args:
        ledger: the job so far.
        contacts: its workers as last heard.
        built: node ids of those that have built it.
        ids: rank 0 has handed in the unique ids.
    """
    away = {claim.candidate.node_id for claim in absent(ledger, contacts, built)}
    at_it, awaited = [], []
    for claim in ledger.living_members():
        node_id = claim.candidate.node_id
        name = who(claim.candidate, ledger.rank_of(node_id))
        if node_id in away:
            awaited.append(f"{name}, {_whereabouts(contacts.by_node[node_id])}")
        elif node_id not in built:
            at_it.append(name)
    size = count(len(ledger.ranks), "member")
    return "".join(
        (
            f"{len(built)} of {size} of generation {ledger.generation} built it",
            f", not yet: {listing(at_it)}" if at_it and not awaited else "",
            f", waiting for {'; '.join(awaited[:NAMED_AT_MOST])}" if awaited else "",
            f"; and {len(awaited) - NAMED_AT_MOST} more" if len(awaited) > NAMED_AT_MOST else "",
            "" if ids else "; rank 0 has not handed in the unique ids",
        )
    )


def _whereabouts(contact: Contact) -> str:
    """What a member does instead of building, as far as its heartbeats tell."""
    if not contact.entered:
        return "which has not begun"
    step = f"step {contact.started_step} of " if contact.started_step else ""
    last = contact.recent[-1] if contact.recent else None
    state = "done" if last is not None and last.done else "not done"
    told = (
        ""
        if last is None
        else f", last collective {last.sequence} of group {last.group} ({last.name}, {state})"
    )
    return f"still in {step}generation {contact.entered}{told}"
