"""The rules of ``muster check``, which turn facts and measurements of all ranks into sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.communicators.nccl.encryption import REQUIRE
from muster.wire.messages import NCCL_FACT, PLAIN, SEALED
from muster.worker.host import MUST_AGREE_LIBRARIES, MUST_AGREE_NCCL

ENCRYPTION, WORDS = "MS_NCCL_ENCRYPTION", "NCCL between hosts"
"""Names of two facts: whether NCCL's traffic must be encrypted, and, in words, whether it would be."""

MUST_AGREE = frozenset(
    {"muster", "nccl", "architecture", ENCRYPTION, NCCL_FACT, *MUST_AGREE_LIBRARIES, *MUST_AGREE_NCCL}
)
UNSET = "(unset)"
SKEW_LIMIT_S = 1.0
SLOW_SHARE = 0.5
"""A pair or host below this share of the median counts as slow."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact in which ranks differ.

    Attributes:
        name: the fact.
        refused: whether training must not begin with this difference.
        values: each value and the ranks that have it, the most common value first.
    """

    name: str
    refused: bool
    values: tuple[tuple[str, tuple[int, ...]], ...]


def compare(facts: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Finds the facts in which ranks differ; those that forbid training come first.

    Args:
        facts: the facts of each rank, in order of rank.
    """
    findings = []
    for name in sorted({name for one in facts for name in one}):
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            by_value.setdefault(one.get(name, UNSET), []).append(rank)
        if len(by_value) > 1:
            values = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
            findings.append(
                Finding(name, name in MUST_AGREE, tuple((value, tuple(ranks)) for value, ranks in values))
            )
    return sorted(findings, key=lambda finding: not finding.refused)


def unsealed(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a sentence on each reason why ranks that must encrypt NCCL's traffic cannot.

    Args:
        facts: the facts of each rank, in order of rank.
    """
    by_words: dict[str, list[int]] = {}
    for rank, one in enumerate(facts):
        if one.get(ENCRYPTION) == REQUIRE and one.get(NCCL_FACT) != SEALED:
            by_words.setdefault(one.get(WORDS, PLAIN), []).append(rank)
    return [f"NCCL between hosts is {words} (rank {ranges(ranks)})" for words, ranks in by_words.items()]


def name_clashes(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Returns sentences on machines that share a name.

    Args:
        hosts: the identity and name of each rank's host, in order of rank.
    """
    ids: dict[str, dict[str, list[int]]] = {}
    for rank, (identity, name) in enumerate(hosts):
        ids.setdefault(name, {}).setdefault(identity, []).append(rank)
    return [
        f"{len(machines)} machines are named {name}: ranks "
        + " and ".join(ranges(ranks) for ranks in machines.values())
        + "; give each a host name of its own."
        for name, machines in sorted(ids.items())
        if len(machines) > 1
    ]


def clock_skews(offsets_s: Sequence[float], uncertainty_s: float) -> list[str]:
    """Returns sentences on ranks whose clock is off.

    Args:
        offsets_s: each rank's time of day minus that of rank 0, read at about the same moment, in seconds.
        uncertainty_s: the largest possible time between the readings, in seconds.
    """
    ordered = sorted(offsets_s)
    middle = ordered[len(ordered) // 2]
    return [
        f"The clock of rank {rank} is {abs(offset - middle):.1f} s "
        f"{'ahead of' if offset > middle else 'behind'} the others'; certificates and logs need clocks that "
        "agree (NTP)."
        for rank, offset in enumerate(offsets_s)
        if abs(offset - middle) > SKEW_LIMIT_S + uncertainty_s
    ]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns all pairs of ``count`` ranks, in rounds of disjoint pairs (the circle method)."""
    places: list[int] = list(range(count + count % 2))
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def slow_sentences(names: Sequence[str], speeds: Mapping[tuple[int, int], float]) -> list[str]:
    """Names what is slow: a host, if all its pairs are; otherwise the pairs.

    Args:
        names: the hosts.
        speeds: GB/s of each pair of hosts, by their numbers.
    """
    if len(speeds) < 3:
        return []  # with two hosts, it is not known which one is slow
    ordered = sorted(speeds.values())
    # If there are few hosts, the pairs of one slow host are a large share of all pairs. So the usual speed is
    # the upper quartile.
    usual = ordered[(3 * (len(ordered) - 1)) // 4]
    slow = {pair: speed for pair, speed in speeds.items() if speed < SLOW_SHARE * usual}
    hosts = [
        host
        for host in range(len(names))
        if (own := [pair for pair in speeds if host in pair]) and all(pair in slow for pair in own)
    ]
    sentences = [
        f"Host {names[host]} is slow: at most "
        f"{max(speed for pair, speed in slow.items() if host in pair):.2f} GB/s with each other host, "
        f"where {usual:.2f} GB/s is usual."
        for host in hosts
    ]
    return sentences + [
        f"The link between {names[one]} and {names[other]} is slow: {speed:.2f} GB/s, where {usual:.2f} GB/s "
        "is usual."
        for (one, other), speed in slow.items()
        if one not in hosts and other not in hosts
    ]


def ranges(ranks: Sequence[int]) -> str:
    """Writes rank numbers in short: ``0-3, 7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
