"""Chooses the ranks that keep copies of another rank's parts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from muster.wire import messages


def partners(members: Sequence[messages.Member], copies: int = 1) -> tuple[tuple[int, ...], ...]:
    """Returns, by rank, the partners that keep a copy of its parts; the same result on all ranks.

    Partners are on other hosts, each on a different host. If there are enough hosts, they are in other
    failure domains, as named by the hosts' topology labels. Every rank keeps copies for the same number of
    others, or nearly so. On a single host, partners are other processes.

    Args:
        members: the members of the generation, in order of rank.
        copies: number of partners of each rank. If there are fewer other hosts, a rank gets one partner on
            each of them; a rank that is alone gets none.

    Raises:
        ValueError: ``copies`` is less than 1.
    """
    if copies < 1:
        raise ValueError(f"copies must be 1 or more; it is {copies}")
    hosts = {member.host.id for member in members}
    domain = [member.host.id if len(hosts) > 1 else member.node_id for member in members]
    count = min(copies, len(set(domain)) - 1)
    chosen = _by_rotation(members, domain, count)
    return chosen if chosen is not None else _one_by_one(members, domain, count)


def _by_rotation(
    members: Sequence[messages.Member], domain: Sequence[str], count: int
) -> tuple[tuple[int, ...], ...] | None:
    """Chooses partners at equal distances in the order of labels and hosts; None: some would share a host.

    In such a rotation, each rank keeps copies for as many ranks as it has partners. Partners are outside the
    rank's host, or label, if that has no more ranks than the shortest distance.
    """
    order = sorted(range(len(members)), key=lambda rank: (members[rank].host.topology, domain[rank], rank))
    size = len(order)
    chosen: list[tuple[int, ...]] = [()] * size
    for place, rank in enumerate(order):
        mine = tuple(order[(place + k * size // (count + 1)) % size] for k in range(1, count + 1))
        if len({domain[each] for each in (rank, *mine)}) <= count:
            return None
        chosen[rank] = mine
    return tuple(chosen)


def _one_by_one(
    members: Sequence[messages.Member], domain: Sequence[str], count: int
) -> tuple[tuple[int, ...], ...]:
    """Chooses the partners that keep the fewest copies, if a host has too many ranks for a rotation."""
    idlest: dict[str, list[tuple[int, int]]] = {}  # heaps of (number of ranks it keeps copies for, rank)
    for rank, name in enumerate(domain):
        idlest.setdefault(name, []).append((0, rank))
    chosen = []
    for rank, name in enumerate(domain):
        label = members[rank].host.topology
        others = [
            (members[each].host.topology == label, load, each, other)
            for other, heap in idlest.items()
            for load, each in heap[:1]
            if other != name
        ]
        mine = heapq.nsmallest(count, others)
        for _, load, each, other in mine:
            heapq.heapreplace(idlest[other], (load + 1, each))
        chosen.append(tuple(each for _, _, each, _ in mine))
    return tuple(chosen)
