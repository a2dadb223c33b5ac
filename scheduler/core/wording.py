"""The sentences that people read: who, where, who is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muster.scheduler.core import messages as v
from muster.scheduler.core import ranks

LISTED_AT_MOST = 16
STATELESS = "no member is known to hold the training state: without one it starts from a checkpoint or anew"


def who(candidate: v.Candidate, rank: int = -1) -> str:
    """A worker in words: rank if it has one, node id, host, device."""
    device = f", {candidate.device.kind}:{candidate.device.index}" if candidate.device.index >= 0 else ""
    place = f"node {candidate.node_id} on host {candidate.host.name}{device}"
    return f"rank {rank} ({place})" if rank >= 0 else place


def upper_first(text: str) -> str:
    """The text with a capital first letter; the rest is left alone (node ids stand in it)."""
    return text[:1].upper() + text[1:]


def listing(items: Sequence[str]) -> str:
    """The items with commas; a long list is cut and says how many more there are."""
    if len(items) <= LISTED_AT_MOST:
        return ", ".join(items)
    return f"{', '.join(items[:LISTED_AT_MOST])} and {len(items) - LISTED_AT_MOST} more"


def nodes(candidates: Iterable[v.Candidate]) -> str:
    """Node ids in natural order."""
    return listing(sorted((candidate.node_id for candidate in candidates), key=ranks.natural_key))


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are_in(number: int) -> str:
    """``1 worker is in``, ``2 workers are in``."""
    return f"{count(number, 'worker')} {'is' if number == 1 else 'are'} in"


def all_in(number: int) -> str:
    """``the only worker is in``, ``all 2 workers are in``."""
    return "the only worker is in" if number == 1 else f"all {are_in(number)}"


def missing(candidates: Sequence[v.Candidate], needed: int, table: v.RankTable | None) -> tuple[str, ...]:
    """Who is not there: lines of the rank table, integer node ids, or how many.

    Args:
        candidates: who is there.
        needed: how many there should be.
        table: the job's rank table.
    """
    if table is not None:
        filled = {ranks.table_entry(table, candidate) for candidate in candidates}
        return tuple(
            f"host {entry.server_id} device {entry.device_index} (rank {entry.rank})"
            for entry in table.entries
            if entry not in filled
        )
    absent = needed - len(candidates)
    if absent <= 0:
        return ()
    present = {candidate.node_id for candidate in candidates}
    if present and ranks.all_integers(present, needed):
        return tuple(f"node {number}" for number in range(needed) if str(number) not in present)
    return (count(absent, "worker"),)


def waiting(candidates: Sequence[v.Candidate], needed: int, table: v.RankTable | None) -> str:
    """``2 of 4 workers are in: ...; missing: ...``."""
    if not needed:
        return "no worker has come yet"
    absent = missing(candidates, needed, table)
    present = f"{len(candidates)} of {count(needed, 'worker')} {'is' if len(candidates) == 1 else 'are'} in"
    there = f": {nodes(candidates)}" if candidates else ""
    return f"{present}{there}; missing: {listing(absent) or 'nobody'}"
