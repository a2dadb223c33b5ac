"""Which ranks keep a rank's parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.training.snapshots.partners import partners
from muster.wire import messages


def members(hosts: Sequence[str], labels: dict[str, str] | None = None) -> list[messages.Member]:
    return [
        messages.Member(
            rank,
            f"n{rank}",
            rank + 1,
            messages.Host(host, "name", "10.0.0.1", (labels or {}).get(host, "")),
            messages.Device(),
            0,
            1,
        )
        for rank, host in enumerate(hosts)
    ]


def kept_for(chosen: Sequence[Sequence[int]]) -> Counter[int]:
    return Counter(rank for mine in chosen for rank in mine)


def test_four_ranks_of_two_hosts_keep_for_one_on_the_other_host_each() -> None:
    chosen = partners(members("aabb"))
    assert [rank for (rank,) in chosen[:2]] in ([2, 3], [3, 2])
    assert set(kept_for(chosen).values()) == {1}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.integers(1, 4))
def test_each_copy_is_on_another_host(hosts: list[str], copies: int) -> None:
    chosen = partners(members(hosts), copies)
    others = len(set(hosts)) - 1
    for rank, mine in enumerate(chosen):
        if others:
            assert len(mine) == min(copies, others)
            assert len({hosts[each] for each in (rank, *mine)}) == len(mine) + 1
        else:
            assert len(mine) == min(copies, len(hosts) - 1) and rank not in mine
            assert len(set(mine)) == len(mine)


@given(st.integers(2, 6), st.integers(1, 8), st.integers(1, 3))
def test_on_hosts_alike_all_keep_for_equally_many(hosts: int, per_host: int, copies: int) -> None:
    chosen = partners(members([f"h{rank // per_host}" for rank in range(hosts * per_host)]), copies)
    assert set(kept_for(chosen).values()) == {min(copies, hosts - 1)}
    assert len(kept_for(chosen)) == hosts * per_host


def test_a_copy_lies_in_another_failure_domain_where_there_is_one() -> None:
    labels = {"a": "rack 1", "b": "rack 1", "c": "rack 2", "d": "rack 2"}
    there = members("aabbccdd", labels)
    for rank, (partner,) in enumerate(partners(there)):
        assert there[partner].host.topology != there[rank].host.topology


def test_where_one_host_has_most_ranks_the_others_share_their_copies_evenly() -> None:
    chosen = partners(members("aaaaaabbb"))
    assert {chosen[rank][0] for rank in range(6)} == {6, 7, 8}
    assert [kept_for(chosen)[rank] for rank in (6, 7, 8)] == [2, 2, 2]


def test_one_of_a_hosts_label_goes_to_the_other_label_though_its_host_has_most_ranks() -> None:
    there = members("aaaabc", {"a": "rack 1", "b": "rack 1", "c": "rack 2"})
    assert {partner for (partner,) in partners(there)[:4]} == {5}


def test_who_is_alone_has_no_partner() -> None:
    assert partners(members("a"), 3) == ((),)


def test_the_choice_follows_from_the_members_alone_and_changes_with_them() -> None:
    assert partners(members("aabbcc"), 2) == partners(members("aabbcc"), 2)
    assert partners(members("aabbcc")) != partners(members("aabbc"))


def test_no_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="copies must be 1 or more"):
        partners(members("ab"), 0)
