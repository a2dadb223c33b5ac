"""To which snapshot all go back, and who hands out what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.restoration import (
    MAX_BYTES,
    MAX_HOLDINGS,
    Handing,
    Holding,
    PartsMissing,
    Restoration,
    Told,
    decide,
    decode,
    encode,
    overlapping,
)

OLD, NEW = SnapshotId(1, 100), SnapshotId(1, 110)


def holding(
    snapshot: SnapshotId,
    rank: int,
    *,
    size: int = 2,
    own: bool = False,
    announced: int | None = None,
    found: int | None = None,
) -> Holding:
    right = hash((snapshot, rank)) % 2**64
    announced, found = right if announced is None else announced, right if found is None else found
    return Holding(PartKey(snapshot, size, rank), announced, found, own)


def told(*holdings: Holding, agreed: SnapshotId | None = None) -> Told:
    return Told(agreed, holdings)


def test_with_everybody_there_each_takes_its_own_and_nothing_travels() -> None:
    decision = decide([told(holding(OLD, 0, own=True)), told(holding(OLD, 1, own=True))])
    assert decision == Restoration(OLD, 2, ((0,), (1,)), (), OLD)


def test_a_lost_ranks_part_comes_from_its_partner() -> None:
    survivor = told(holding(OLD, 0, own=True), holding(OLD, 1))
    decision = decide([survivor, told()])
    assert isinstance(decision, Restoration)
    assert decision.handings == (Handing(PartKey(OLD, 2, 1), 0, 1),)


def test_the_newest_that_is_found_whole_is_taken() -> None:
    both = [told(holding(OLD, r, own=True), holding(NEW, r, own=True), agreed=OLD) for r in (0, 1)]
    decision = decide(both)
    assert isinstance(decision, Restoration)
    assert (decision.snapshot, decision.keep) == (NEW, OLD), "what is known to count stays"


def test_one_that_lacks_a_part_is_not_mixed_with_an_older_one() -> None:
    decision = decide(
        [told(holding(OLD, 0, own=True), holding(NEW, 0, own=True)), told(holding(OLD, 1, own=True))]
    )
    assert isinstance(decision, Restoration)
    assert decision.snapshot == OLD and not decision.handings


def test_a_later_generations_step_is_the_newer_though_its_number_is_less() -> None:
    later = SnapshotId(2, 50)
    decision = decide([told(holding(OLD, r, own=True), holding(later, r, own=True)) for r in (0, 1)])
    assert isinstance(decision, Restoration) and decision.snapshot == later


def test_what_is_nowhere_is_named() -> None:
    decision = decide([told(holding(NEW, 0, own=True), holding(OLD, 0, own=True), agreed=OLD), told()])
    assert decision == PartsMissing(OLD, 2, (1,)), "of the one that counted"


def test_where_nobody_holds_anything_nothing_is_missed() -> None:
    assert decide([told(), told()]) == PartsMissing(None, 0, ())


@pytest.mark.parametrize(("announced", "found"), [(None, 1), (1, None), (1, 1)])
def test_a_copy_that_is_not_as_its_owner_announced_is_not_used(
    announced: int | None, found: int | None
) -> None:
    right, flipped = holding(OLD, 1, own=True), holding(OLD, 1, announced=announced, found=found)
    decision = decide(
        [told(flipped, holding(OLD, 0, own=True)), told(right), told()], lambda *_: [[0], [1], [1]]
    )
    assert isinstance(decision, Restoration)
    assert decision.handings == (Handing(PartKey(OLD, 2, 1), 1, 2),)


def test_of_two_copies_that_differ_neither_is_used_without_the_owners_word() -> None:
    one, other = holding(OLD, 1), holding(OLD, 1, announced=1, found=1)
    assert decide([told(one, holding(OLD, 0, own=True)), told(other)]) == PartsMissing(OLD, 2, (1,))


def test_the_owners_own_flipped_part_is_replaced_by_a_partners_copy() -> None:
    flipped = holding(OLD, 1, own=True, found=1)
    decision = decide([told(holding(OLD, 0, own=True), holding(OLD, 1)), told(flipped)])
    assert isinstance(decision, Restoration)
    assert decision.handings == (Handing(PartKey(OLD, 2, 1), 0, 1),)


def test_with_fewer_ranks_each_takes_the_parts_of_its_share() -> None:
    there = [
        told(holding(OLD, 0, size=3, own=True), holding(OLD, 2, size=3)),
        told(holding(OLD, 1, size=3, own=True)),
    ]
    decision = decide(there)
    assert isinstance(decision, Restoration)
    assert decision.needs == ((0, 1), (1, 2))
    assert [(each.part.rank, each.source, each.target) for each in decision.handings] == [
        (1, 1, 0),
        (2, 0, 1),
    ]


def test_those_that_hand_out_share_the_work() -> None:
    all_parts = [holding(OLD, rank, size=4) for rank in range(4)]
    decision = decide([told(*all_parts), told(*all_parts), told(), told()])
    assert isinstance(decision, Restoration)
    assert sorted(each.source for each in decision.handings) == [0, 1]


def test_equal_shares_of_one_line() -> None:
    assert overlapping(4, 4) == ((0,), (1,), (2,), (3,))
    assert overlapping(4, 2) == ((0, 1), (2, 3))
    assert overlapping(2, 4) == ((0,), (0,), (1,), (1,))
    assert overlapping(3, 2) == ((0, 1), (1, 2))


# ---------------------------------------------------------------- the exchange

IDS = st.builds(SnapshotId, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
HOLDINGS = st.builds(
    lambda which, size, rank, one, other, own: Holding(PartKey(which, size, rank % size), one, other, own),
    IDS,
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)


@given(st.builds(Told, st.none() | IDS, st.lists(HOLDINGS, max_size=5).map(tuple)))
def test_what_one_tells_comes_through_whole_with_padding(said: Told) -> None:
    assert decode(encode(said).ljust(MAX_BYTES, b"\0")) == said


def test_a_rank_tells_of_a_bounded_number() -> None:
    most = told(*[holding(OLD, 0)] * MAX_HOLDINGS)
    assert len(encode(most)) == MAX_BYTES
    with pytest.raises(ValueError, match=f"at most {MAX_HOLDINGS} parts; these are {MAX_HOLDINGS + 1}"):
        encode(told(*[holding(OLD, 0)] * (MAX_HOLDINGS + 1)))


GOOD = encode(told(holding(OLD, 0)))


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * MAX_BYTES, GOOD[:-1], GOOD + b"\1", b"x" + GOOD[1:], encode(told(holding(OLD, 2, size=2)))],
    ids=["nothing", "padding alone", "cut", "something behind", "something else", "a rank beyond the world"],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|rank"):
        decode(data)
