"""The rule that orders workers by rank, never by their order of arrival; workers' names in sentences.

The first rule that applies holds for the whole generation:

1. a rank table: ranks follow the table;
2. all node ids are integers in range: ranks follow the ids (they *are* the ranks in a full job);
3. topology: hosts by label and name in natural order, the workers of a host by device index, so that the
   ranks of one host are contiguous, hosts with one label are neighbours, and local ranks follow device
   indexes. The PCI bus id decides only between equal indexes, then the launcher's index, then the node id.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from muster.rendezvous.messages import Candidate, Host
from muster.rendezvous.rank_table import RankTable, RankTableEntry
from muster.scheduler.core.records import Placed

NaturalKey = tuple[tuple[int, int, str, str], ...]
Place = tuple[bool, NaturalKey, NaturalKey]

LONGEST_KEPT = 48
"""Characters of a name whose sort key is kept."""

_INTEGER = re.compile(r"0|[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"([0-9]+)")


def natural_key(text: str) -> NaturalKey:
    """Sort key under which ``node2`` comes before ``node10``.

    Strings that differ have keys that differ ("01" and "1" too).
    """
    return _kept_key(text) if len(text) <= LONGEST_KEPT else _key(text)


def _key(text: str) -> NaturalKey:
    key = []
    for index, part in enumerate(_NUMBER.split(text)):
        if index % 2:  # the pattern's group: digits; compared as numbers of any length, without int()
            digits = part.lstrip("0")
            key.append((1, len(digits), digits, part))
        elif part:
            key.append((0, 0, part, part))
    return tuple(key)


_kept_key = functools.lru_cache(maxsize=1 << 14)(_key)
"""The same names are put in order again and again; few and short ones are kept, so that memory is bounded."""


def integer_id(node_id: str) -> int | None:
    """The rank that a node id stands for, if it is a plain decimal integer (no sign, no leading zero)."""
    return int(node_id) if _INTEGER.fullmatch(node_id) else None


def all_integers(node_ids: Iterable[str], limit: int) -> bool:
    """Whether every node id is an integer in [0, limit)."""
    numbers = [integer_id(node_id) for node_id in node_ids]
    return all(number is not None and number < limit for number in numbers)


def places(candidate: Candidate) -> tuple[tuple[str, int], ...]:
    """The names that a rank table may use for a worker's host (address, name, id), with its device."""
    host = candidate.host
    names = dict.fromkeys((host.address, host.name, host.id))
    return tuple((name, device_index(candidate)) for name in names)


def table_entry(table: RankTable, candidate: Candidate) -> RankTableEntry | None:
    """The line of the rank table that this worker fills."""
    ranks = [table.rank_at[place] for place in places(candidate) if place in table.rank_at]
    return table.entries[min(ranks)] if ranks else None


def device_index(candidate: Candidate) -> int:
    """Index of the worker's device; of the worker on its host where it has not chosen one."""
    return candidate.device.index if candidate.device.index >= 0 else candidate.local_index


def in_order(candidates: Iterable[Candidate], *, limit: int, table: RankTable | None) -> list[Candidate]:
    """The candidates in order of rank.

    Args:
        candidates: workers with distinct node ids; with a rank table, each fills a line of its own.
        limit: integer node ids count as ranks if all are below it.
        table: the job's rank table.
    """
    pool = list(candidates)
    if table is not None:
        return sorted(pool, key=lambda candidate: _table_rank(table, candidate))
    if all_integers((candidate.node_id for candidate in pool), limit):
        return sorted(pool, key=lambda candidate: int(candidate.node_id))
    places = _places(pool)
    return sorted(pool, key=lambda candidate: _topology_key(candidate, places[candidate.host.id]))


def assign(ordered: Sequence[Candidate]) -> tuple[Placed, ...]:
    """Members with dense ranks from 0; local ranks count within one host *id*, whatever the host's name."""
    sizes = Counter(candidate.host.id for candidate in ordered)
    seen: Counter[str] = Counter()
    members = []
    for rank, candidate in enumerate(ordered):
        host_id = candidate.host.id
        members.append(Placed(rank, seen[host_id], sizes[host_id], candidate))
        seen[host_id] += 1
    return tuple(members)


def _table_rank(table: RankTable, candidate: Candidate) -> int:
    entry = table_entry(table, candidate)
    return entry.rank if entry is not None else len(table.entries)


def _places(pool: Iterable[Candidate]) -> dict[str, Place]:
    """One place for each host id: its workers stay together, even if they report different labels or names.

    The smallest label counts, and no label only where no worker has one.
    """
    places: dict[str, Place] = {}
    for host in (candidate.host for candidate in pool):
        reported = _reported_place(host)
        places[host.id] = min(reported, places.get(host.id, reported))
    return places


def _reported_place(host: Host) -> Place:
    return not host.topology, natural_key(host.topology), natural_key(host.name)


def _topology_key(
    candidate: Candidate, place: Place
) -> tuple[NaturalKey, NaturalKey, str, int, str, int, NaturalKey]:
    device = candidate.device
    _, label, name = place
    return (
        label,
        name,
        candidate.host.id,
        device.index,
        device.pci_bus_id,
        candidate.local_index,
        natural_key(candidate.node_id),
    )


# ---------------------------------------------------------------- in words

LISTED_AT_MOST = 16
STATELESS = "no member is known to hold the training state: without one it starts from a checkpoint or anew"


def who(candidate: Candidate, rank: int = -1) -> str:
    """A worker's name in sentences: rank if it has one, node id, host, device."""
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


def nodes(candidates: Iterable[Candidate]) -> str:
    """Node ids in natural order."""
    return listing(sorted((candidate.node_id for candidate in candidates), key=natural_key))


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are_in(number: int) -> str:
    """``1 worker is in``, ``2 workers are in``."""
    return f"{count(number, 'worker')} {'is' if number == 1 else 'are'} in"


def all_in(number: int) -> str:
    """``the only worker is in``, ``all 2 workers are in``."""
    return "the only worker is in" if number == 1 else f"all {are_in(number)}"


def missing(candidates: Sequence[Candidate], needed: int, table: RankTable | None) -> tuple[str, ...]:
    """Names the missing workers: lines of the rank table, integer node ids, or how many.

    Args:
        candidates: who is there.
        needed: how many there should be.
        table: the job's rank table.
    """
    if table is not None:
        filled = {table_entry(table, candidate) for candidate in candidates}
        return tuple(
            f"host {entry.server_id} device {entry.device_index} (rank {entry.rank})"
            for entry in table.entries
            if entry not in filled
        )
    absent = needed - len(candidates)
    if absent <= 0:
        return ()
    present = {candidate.node_id for candidate in candidates}
    if present and all_integers(present, needed):
        return tuple(f"node {number}" for number in range(needed) if str(number) not in present)
    return (count(absent, "worker"),)


def waiting(candidates: Sequence[Candidate], needed: int, table: RankTable | None) -> str:
    """``2 of 4 workers are in: ...; missing: ...``."""
    if not needed:
        return "no worker has come yet"
    absent = missing(candidates, needed, table)
    present = f"{len(candidates)} of {count(needed, 'worker')} {'is' if len(candidates) == 1 else 'are'} in"
    there = f": {nodes(candidates)}" if candidates else ""
    return f"{present}{there}; missing: {listing(absent) or 'nobody'}"
