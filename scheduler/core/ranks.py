"""Who gets which rank. The order in which workers arrive never decides.

The first rule that applies holds for the whole generation:

1. a rank table: ranks follow the table;
2. all node ids are integers in range: ranks follow the ids (they *are* the ranks in a full job);
3. topology: hosts by label and name in natural order, the workers of a host by device index, so that the
   ranks of one host are contiguous, hosts with one label are neighbours, and local ranks follow device
   indexes. The PCI bus id decides only between equal indexes, then the launcher's index, then the node id.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from muster.scheduler.core.messages import Candidate, Host, Member, RankTable, RankTableEntry

NaturalKey = tuple[tuple[int, int, str, str], ...]
Place = tuple[bool, NaturalKey, NaturalKey]

_INTEGER = re.compile(r"0|[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"([0-9]+)")


def natural_key(text: str) -> NaturalKey:
    """Sort key under which ``node2`` comes before ``node10``.

    Strings that differ have keys that differ ("01" and "1" too).
    """
    key = []
    for index, part in enumerate(_NUMBER.split(text)):
        if index % 2:  # the pattern's group: digits; compared as numbers of any length, without int()
            digits = part.lstrip("0")
            key.append((1, len(digits), digits, part))
        elif part:
            key.append((0, 0, part, part))
    return tuple(key)


def integer_id(node_id: str) -> int | None:
    """The rank that a node id stands for, if it is a plain decimal integer (no sign, no leading zero)."""
    return int(node_id) if _INTEGER.fullmatch(node_id) else None


def all_integers(node_ids: Iterable[str], limit: int) -> bool:
    """Whether every node id is an integer in [0, limit)."""
    numbers = [integer_id(node_id) for node_id in node_ids]
    return all(number is not None and number < limit for number in numbers)


def fills(entry: RankTableEntry, candidate: Candidate) -> bool:
    """Whether this worker is the one of that line: by host (address, name or id) and device."""
    host = candidate.host
    return entry.device_index == device_index(candidate) and entry.server_id in (
        host.address,
        host.name,
        host.id,
    )


def table_entry(table: RankTable, candidate: Candidate) -> RankTableEntry | None:
    """The line of the rank table that this worker fills."""
    return next((entry for entry in table.entries if fills(entry, candidate)), None)


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
        ranks = {(entry.server_id, entry.device_index): entry.rank for entry in table.entries}
        return sorted(pool, key=lambda candidate: _table_rank(ranks, candidate))
    if all_integers((candidate.node_id for candidate in pool), limit):
        return sorted(pool, key=lambda candidate: int(candidate.node_id))
    places = _places(pool)
    return sorted(pool, key=lambda candidate: _topology_key(candidate, places[candidate.host.id]))


def assign(ordered: Sequence[Candidate]) -> tuple[Member, ...]:
    """Members with dense ranks from 0; local ranks count within one host *id*, whatever the host's name."""
    sizes = Counter(candidate.host.id for candidate in ordered)
    seen: Counter[str] = Counter()
    members = []
    for rank, candidate in enumerate(ordered):
        host_id = candidate.host.id
        members.append(Member(rank, seen[host_id], sizes[host_id], candidate))
        seen[host_id] += 1
    return tuple(members)


def _table_rank(ranks: dict[tuple[str, int], int], candidate: Candidate) -> int:
    host = candidate.host
    index = device_index(candidate)
    return min(ranks.get((name, index), len(ranks)) for name in (host.address, host.name, host.id))


def _places(pool: Iterable[Candidate]) -> dict[str, Place]:
    """One place for each host id: workers that tell different labels or names of it must stay together.

    The smallest label counts, and no label only where no worker has one.
    """
    places: dict[str, Place] = {}
    for host in (candidate.host for candidate in pool):
        told = _told_place(host)
        places[host.id] = min(told, places.get(host.id, told))
    return places


def _told_place(host: Host) -> Place:
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
