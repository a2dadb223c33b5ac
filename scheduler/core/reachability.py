"""Who stays where some cannot reach each other. Pure questions to what probes have shown.

An accusation is a pair (accuser, accused): the first could not reach the second. A pair is broken if either
accuses the other, because a group needs connections both ways.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

EXACT_PARTIES = 16
"""Up to so many, the best of all sets is looked for; beyond, those with the most broken pairs leave."""

MANY = 2
"""From so many on that one alone accuses, it is its own network that is broken."""

Accusation = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Party:
    """A host, or a worker.

    Attributes:
        workers: how many workers go if it goes.
        holds_state: one of them holds the training state.
        lowest_rank: the lowest of their ranks.
    """

    workers: int
    holds_state: bool
    lowest_rank: int


def leaving(parties: Mapping[str, Party], accusations: Collection[Accusation]) -> frozenset[str]:
    """Who has to leave so that all that stay reach each other.

    One that alone accuses many leaves itself. Of the rest the largest set stays that holds the training
    state; of equals, the one that accused fewer others, then the one with the lowest ranks.

    Args:
        parties: all there are, by name.
        accusations: who could not reach whom.
    """
    alone = lone_accusers(parties, accusations)
    rest = [name for name in parties if name not in alone]
    left = [(a, b) for a, b in accusations if a not in alone and b not in alone]
    involved = {name for pair in left for name in pair}
    if len(involved) <= EXACT_PARTIES:
        stay = _best(frozenset(rest), parties, left)
    else:
        stay = _thinned_out(frozenset(rest), parties, left)
    return frozenset(parties) - stay


def lone_accusers(parties: Mapping[str, Party], accusations: Collection[Accusation]) -> frozenset[str]:
    """Those that accuse many others whom nobody else accuses, and who do not accuse back."""
    accused_by: dict[str, set[str]] = {}
    for accuser, accused in accusations:
        accused_by.setdefault(accused, set()).add(accuser)
    found = set()
    for accuser in {accuser for accuser, _ in accusations}:
        victims = [accused for accused, by in accused_by.items() if accuser in by]
        one_sided = all(accused_by[victim] == {accuser} for victim in victims)
        if len(victims) >= MANY and one_sided and not accused_by.get(accuser):
            found.add(accuser)
    others_hold = any(party.holds_state for name, party in parties.items() if name not in found)
    hold = any(parties[name].holds_state for name in found)
    return frozenset() if hold and not others_hold else frozenset(found)


def _broken(names: frozenset[str], accusations: Collection[Accusation]) -> dict[str, set[str]]:
    pairs: dict[str, set[str]] = {}
    for a, b in accusations:
        if a in names and b in names:
            pairs.setdefault(a, set()).add(b)
            pairs.setdefault(b, set()).add(a)
    return pairs


def _worth(
    names: frozenset[str], parties: Mapping[str, Party], accusations: Collection[Accusation]
) -> tuple[bool, int, int, int, list[int]]:
    """Sets compare by this; the greater one stays."""
    accused = sum(a in names and b not in names for a, b in accusations)
    return (
        any(parties[name].holds_state for name in names),
        sum(parties[name].workers for name in names),
        len(names),
        -accused,
        sorted((-parties[name].lowest_rank for name in names), reverse=True),
    )


def _best(
    names: frozenset[str], parties: Mapping[str, Party], accusations: Collection[Accusation]
) -> frozenset[str]:
    """The best set whose members all reach each other: without the one of most broken pairs, or with it."""
    pairs = _broken(names, accusations)
    if not pairs:
        return names
    most = max(sorted(pairs), key=lambda name: len(pairs[name]))
    without = _best(names - {most}, parties, accusations)
    with_it = _best(names - pairs[most], parties, accusations)
    return max(with_it, without, key=lambda found: _worth(found, parties, accusations))


def _thinned_out(
    names: frozenset[str], parties: Mapping[str, Party], accusations: Collection[Accusation]
) -> frozenset[str]:
    """The one with the most broken pairs leaves first; the last that holds the state stays."""
    while pairs := _broken(names, accusations):
        holders = [name for name in names if parties[name].holds_state]
        ranked = [
            (len(pairs[name]), -parties[name].workers, parties[name].lowest_rank, name)
            for name in pairs
            if holders != [name]
        ]
        names -= {max(ranked)[-1]}
    return names
