"""Who stays where some cannot reach each other."""

from __future__ import annotations

import itertools
import random

import pytest

from muster.scheduler.core import reachability
from muster.scheduler.core.reachability import Accusation, Party, leaving


def parties(**workers: int) -> dict[str, Party]:
    """Hosts by name with so many workers; all hold the state, ranks go up from the first."""
    return {name: Party(count, True, 10 * number) for number, (name, count) in enumerate(workers.items())}


def both_ways(*pairs: str) -> set[Accusation]:
    """``"ab"``: a and b accuse each other."""
    return {ends for pair in pairs for ends in ((pair[0], pair[1]), (pair[1], pair[0]))}


@pytest.mark.parametrize(
    ("hosts", "accusations", "out"),
    [
        (parties(a=1, b=1, c=1), set(), ""),
        # Of two that cannot reach each other the one with fewer workers goes, else that of higher rank.
        (parties(a=1, b=2, c=1), both_ways("ab"), "a"),
        (parties(a=1, b=1, c=1), both_ways("ab"), "b"),
        # A host that nobody reaches goes, wherever it stands.
        (parties(a=1, b=1, c=1, d=1), both_ways("ab", "ac", "ad"), "a"),
        # The largest set, not the first that comes: b is in most broken pairs.
        (parties(a=1, b=1, c=1, d=1), both_ways("ab", "bc", "bd", "cd"), "bd"),
        # One direction is enough; in doubt the accuser goes.
        (parties(a=1, b=1), {("a", "b")}, "a"),
        (parties(a=1, b=1), {("b", "a")}, "b"),
        # One that alone accuses many goes, however many workers it has.
        (parties(a=8, b=1, c=1), {("a", "b"), ("a", "c")}, "a"),
        # Not if they accuse it as well: then it is a cut between equals, and the most workers stay.
        (parties(a=8, b=1, c=1), both_ways("ab", "ac"), "bc"),
        (parties(a=8, b=1, c=1), {("a", "b"), ("a", "c"), ("c", "a")}, "bc"),
    ],
)
def test_who_goes(hosts: dict[str, Party], accusations: set[Accusation], out: str) -> None:
    assert leaving(hosts, accusations) == set(out)


def test_the_training_state_stays() -> None:
    hosts = {"a": Party(1, True, 0), "b": Party(3, False, 1), "c": Party(3, False, 4)}
    assert leaving(hosts, both_ways("ab", "ac")) == {"b", "c"}
    assert leaving(hosts, {("a", "b"), ("a", "c")}) == {"b", "c"}


def test_the_training_state_stays_among_many_hosts() -> None:
    names = [f"h{n}" for n in range(20)]
    hosts = {name: Party(1, name == "h7", n) for n, name in enumerate(names)}
    cut = {(a, b) for a in names for b in names if a != b and "h7" in (a, b)}
    assert "h7" not in leaving(hosts, cut)


def test_above_sixteen_hosts_the_one_with_the_most_broken_pairs_goes_first() -> None:
    hosts = {f"h{n}": Party(1, True, n) for n in range(40)}
    stars = {("h3", f"h{n}") for n in range(10, 20)} | {("h4", f"h{n}") for n in range(20, 30)}
    back = {(b, a) for a, b in stars}
    assert leaving(hosts, stars | back) == {"h3", "h4"}


def test_the_exact_answer_is_that_of_trying_all_sets() -> None:
    rng = random.Random(5)
    for _ in range(300):
        names = "abcdefg"[: rng.randint(2, 7)]
        hosts = {name: Party(rng.randint(1, 3), True, n) for n, name in enumerate(names)}
        broken = [pair for pair in itertools.combinations(names, 2) if rng.random() < 0.4]
        accusations = both_ways(*("".join(pair) for pair in broken))
        stay = set(names) - leaving(hosts, accusations)
        assert not any(set(pair) <= stay for pair in broken)
        sets = (set(some) for n in range(len(names) + 1) for some in itertools.combinations(names, n))
        whole = [each for each in sets if not any(set(pair) <= each for pair in broken)]
        most = max(sum(hosts[name].workers for name in each) for each in whole)
        assert sum(hosts[name].workers for name in stay) == most


def test_sixteen_hosts_that_all_hate_each_other_are_decided_soon() -> None:
    names = [f"h{n}" for n in range(reachability.EXACT_PARTIES)]
    hosts = {name: Party(1, True, n) for n, name in enumerate(names)}
    assert leaving(hosts, set(itertools.permutations(names, 2))) == set(names[1:])
