"""Sentences on a job that makes no progress: who has not built the group, who lags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import (
    Claim,
    Ledger,
    Phase,
    count,
    early_end,
    listing,
    who,
)
from muster.scheduler.core.members import Contact, Members
from muster.wire import messages


def awaited(job: Job) -> str:
    """Names the members that the group being built waits for, without a full stop."""
    return building_sentence(job.ledger, job.members, job.current.built, ids=bool(job.current.unique_ids))


def progress_report(job: Job, now: float) -> str:
    """Says why training makes no progress; empty if nothing has begun yet."""
    stalled_s = now - job.deadlines.progress_since
    if job.phase is Phase.BUILDING and not job.switches_by_steps:
        return f"No progress for {stalled_s:.0f} s: {awaited(job)}."
    # These are the members of the generation that trains, with their ranks in it. The next generation, which
    # is being built, may have others.
    standings = [
        RankProgress(rank, job.ledger.claims[node_id].candidate, contact)
        for node_id, rank in job.trained.items()
        if (contact := job.members.by_node.get(node_id)) is not None
        and (job.phase is not Phase.BUILDING or 0 < contact.entered < job.ledger.generation)
    ]
    return stall_report(job.ledger, standings, stalled_s)


def rearmost(job: Job) -> list[str]:
    """The node ids of the members with the fewest steps; all training members if none is ahead."""
    heard = job.members.by_node
    far = {
        node_id: _how_far(RankProgress(rank, job.ledger.claims[node_id].candidate, heard[node_id]))
        for node_id, rank in job.trained.items()
        if node_id in job.ledger.claims and node_id in heard
    }
    least = min(far.values(), default=None)
    return [node_id for node_id, place in far.items() if place == least]


# ---------------------------------------------------------------- who is waited for

NAMED_AT_MOST = 4


def absent(ledger: Ledger, members: Members, built: Collection[str], among: Iterable[Claim]) -> list[Claim]:
    """Members whose training thread is busy elsewhere and has not come to build yet.

    None before any group was established: then all members start to build immediately, and none has a
    reason to be elsewhere.
    """
    if not ledger.ever_established:
        return []
    return [
        claim
        for claim in among
        if claim.candidate.node_id not in built
        and members.by_node[claim.candidate.node_id].entered < ledger.generation
    ]


def building_sentence(ledger: Ledger, members: Members, built: Collection[str], *, ids: bool) -> str:
    """Names the members that have not built the group yet.

    If some have not begun, names only those, and where they are.

    Args:
        ledger: the job so far.
        members: its workers as last heard.
        built: node ids of those that have built it.
        ids: whether rank 0 has sent the unique ids.
    """
    away = {claim.candidate.node_id for claim in absent(ledger, members, built, ledger.living_members())}
    at_it, awaited = [], []
    for claim in ledger.living_members():
        node_id = claim.candidate.node_id
        name = who(claim.candidate, ledger.rank_of(node_id))
        if node_id in away:
            awaited.append(f"{name}, {_whereabouts(members.by_node[node_id])}")
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
    """Returns what a member does instead of building, according to its heartbeats."""
    if not contact.entered:
        return "which has not begun"
    step = f"step {contact.started_step} of " if contact.started_step else ""
    last = contact.recent[-1] if contact.recent else None
    state = "done" if last is not None and last.done else "not done"
    collective = (
        ""
        if last is None
        else f", last collective {last.sequence} of group {last.group} ({last.name}, {state})"
    )
    return f"still in {step}generation {contact.entered}{collective}"


WORLD = "world"
"""The group of all ranks, as the workers name it."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank and its progress."""

    rank: int
    candidate: messages.Candidate
    contact: Contact


def stall_report(ledger: Ledger, standings: Sequence[RankProgress], stalled_s: float) -> str:
    """The sentence on a stall; empty if nothing has begun yet, so that nothing can stall."""
    begun = [s for s in standings if s.contact.started_step or s.contact.recent]
    if not begun:
        return ""
    laggard = min(standings, key=_how_far)
    alone = _how_far(laggard) != max(_how_far(standing) for standing in standings)
    blamed = f"{who(laggard.candidate, laggard.rank)} lags" if alone else "all ranks are"
    head = f"No progress for {stalled_s:.0f} s: {blamed} {_step(laggard.contact)}"
    last = laggard.contact.recent[-1] if laggard.contact.recent else None
    at = f", last collective {_collective_in_words(last)}" if last is not None else ""
    early = early_end(ledger)
    return f"{head}{at}{_disagreement(standings)}{'; ' if early else ''}{early}."


def _step(contact: Contact) -> str:
    """The step that a rank is in; empty for a script that only reports finished steps."""
    if contact.started_step < max(contact.step, 1):
        return f"at {count(contact.step, 'finished step')}"
    return f"in step {contact.started_step} with {contact.step} finished"


def _how_far(standing: RankProgress) -> tuple[int, int, int, bool]:
    contact = standing.contact
    last = contact.recent[-1] if contact.recent else None
    return (
        max(contact.started_step, contact.step),
        contact.step,
        last.sequence if last else -1,
        bool(last and last.done),
    )


def _disagreement(standings: Sequence[RankProgress]) -> str:
    """The first collective that differs between the ranks, as text."""
    tables = {s.rank: {(c.group, c.sequence): c for c in s.contact.recent} for s in standings}
    keys = sorted({key for table in tables.values() for key in table}, key=lambda key: (key[1], key[0]))
    for key in keys:
        calls: dict[str, list[int]] = {}
        absent = []
        for rank, table in tables.items():
            if key in table:
                calls.setdefault(_call(table[key]), []).append(rank)
            elif _before(table, key):
                absent.append(rank)
        if len(calls) > 1:
            who_called = "; ".join(f"{_ranks(members)} called {call}" for call, members in calls.items())
            return f"; the ranks disagree on collective {key[1]} of group {key[0]}: {who_called}"
        if absent and calls:
            call, members = next(iter(calls.items()))
            return (
                f"; {_ranks(members)} called collective {key[1]} of group {key[0]} ({call}), "
                f"{_ranks(absent)} did not"
            )
    return ""


def _before(table: dict[tuple[str, int], messages.Collective], key: tuple[str, int]) -> bool:
    """Whether a rank that takes part in the group has not come to this collective yet.

    A rank that has passed it may no longer list it, because only the newest calls are kept. A rank that has
    called nothing in this generation is known to take part only in the group of all ranks.
    """
    if not table:
        return key[0] == WORLD
    sequences = [sequence for group, sequence in table if group == key[0]]
    return bool(sequences) and max(sequences) < key[1]


def _call(collective: messages.Collective) -> str:
    return f"{collective.name} of {collective.size_bytes} B {collective.dtype}"


def _collective_in_words(collective: messages.Collective) -> str:
    state = "done" if collective.done else "not done"
    return f"{collective.sequence} of group {collective.group} ({_call(collective)}, {state})"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {listing([str(rank) for rank in sorted(numbers)])}"
