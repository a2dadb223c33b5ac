"""Which snapshots a rank takes, keeps and drops."""

from __future__ import annotations

import pytest

from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.retention import Retention, RetentionChange
from muster.wire import messages

EVERY = 10


def part(step: int, generation: int = 1, rank: int = 0) -> PartKey:
    return PartKey(SnapshotId(generation, step), 2, rank)


def word(complete: int, following: int, generation: int = 1) -> messages.SnapshotWord:
    return messages.SnapshotWord(generation, complete, following)


@pytest.fixture
def retention() -> Retention:
    """A rank with a first snapshot, of step 0, that counts; 10 is named next."""
    retention = Retention(EVERY)
    retention.enter(1, rank=0, world_size=2, step=0, keep=None)
    retention.completed(part(0))
    retention.at_step(1, word(0, 2))
    return retention


def test_the_first_is_taken_as_the_generation_begins() -> None:
    retention = Retention(EVERY)
    assert retention.enter(3, rank=1, world_size=2, step=7, keep=None).take == part(7, 3, 1)
    assert retention.report() == messages.SnapshotReport(3, -1, 7, False, -1)


def test_it_counts_when_it_is_complete_here_and_the_scheduler_says_so_everywhere() -> None:
    retention = Retention(EVERY)
    retention.enter(1, rank=0, world_size=2, step=0, keep=None)
    retention.at_step(1, word(0, 2))
    assert retention.agreed is None
    retention.completed(part(0))
    assert retention.report().holds(0) and retention.agreed is None
    retention.at_step(2, word(0, 2))
    assert retention.agreed == SnapshotId(1, 0)
    assert retention.report() == messages.SnapshotReport(1, 0, -1, False, -1)


def test_the_named_step_is_taken_and_nothing_is_dropped_before_it_counts(retention: Retention) -> None:
    assert retention.at_step(9, word(0, 2)).take is None
    change = retention.at_step(10, word(0, 2))
    assert change.take == part(10) and change.drop == ()
    assert retention.kept == (part(0), part(10))
    retention.completed(part(10))
    assert retention.at_step(11, word(0, 2)).drop == ()
    assert retention.at_step(12, word(10, 13)).drop == (part(0),)


def test_while_it_does_not_hear_it_takes_no_more(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    retention.completed(part(10))
    for step in range(11, 100):
        change = retention.at_step(step, word(0, 2))
        assert change.take is None and change.drop == ()
    assert retention.kept == (part(0), part(10))
    assert retention.report() == messages.SnapshotReport(1, 0, 10, True, 90)


def test_who_hears_too_late_lets_the_step_pass_and_says_so(retention: Retention) -> None:
    retention.at_step(10, None)
    retention.at_step(20, None)
    retention.at_step(30, word(0, 15))
    assert retention.report() == messages.SnapshotReport(1, 0, -1, False, 30)
    assert retention.at_step(40, word(0, 15)).take is None, "others took 20"


def test_what_lapses_makes_room_for_the_one_that_is_named_next(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    retention.completed(part(10))
    assert retention.at_step(11, word(0, 25)).drop == (part(10),)
    assert retention.at_step(20, word(0, 25)).take is None
    assert retention.at_step(30, word(0, 25)).take == part(30)
    assert retention.kept == (part(0), part(30))


@pytest.mark.parametrize("said", [word(10, 11), word(7, 8), word(0, 2, generation=2), None])
def test_a_word_on_what_it_does_not_have_changes_nothing(
    retention: Retention, said: messages.SnapshotWord
) -> None:
    retention.at_step(5, said)
    assert retention.agreed == SnapshotId(1, 0) and retention.kept == (part(0),)


def test_a_word_of_an_incomplete_one_drops_nothing(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    assert retention.at_step(11, word(10, 11)).drop == ()
    assert retention.agreed == SnapshotId(1, 0)


def test_one_that_fails_is_dropped_and_counts_as_passed(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    assert retention.failed(part(10)).drop == (part(10),)
    assert retention.report() == messages.SnapshotReport(1, 0, -1, False, 10)
    assert retention.failed(part(10)).drop == ()


def test_what_is_complete_does_not_fail_any_more(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    retention.completed(part(10))
    assert retention.failed(part(10)).drop == ()


def test_what_comes_to_be_complete_after_it_has_lapsed_is_not_wanted(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    retention.at_step(11, word(0, 25))
    retention.completed(part(10))
    assert not retention.report().complete


def test_a_new_generation_keeps_what_was_decided_until_one_of_its_own_counts(retention: Retention) -> None:
    retention.at_step(10, word(0, 2))
    change = retention.enter(2, rank=1, world_size=2, step=10, keep=SnapshotId(1, 0))
    assert change.drop == (part(10),) and change.take == part(10, 2, 1)
    assert retention.kept == (part(0), part(10, 2, 1))
    assert retention.report() == messages.SnapshotReport(2, -1, 10, False, -1)
    retention.completed(part(10, 2, 1))
    assert retention.at_step(11, word(10, 12, generation=2)).drop == (part(0),)


def test_a_generation_that_is_entered_again_takes_no_more(retention: Retention) -> None:
    """Steps are redone: a part of step 10 then may be of either time."""
    retention.at_step(10, word(0, 2))
    change = retention.enter(1, rank=0, world_size=2, step=0, keep=SnapshotId(1, 0))
    assert change == RetentionChange(None, (part(10),))
    for step in range(1, 40):
        assert retention.at_step(step, word(0, 2)).take is None
    assert retention.kept == (part(0),)
    assert retention.report() == messages.SnapshotReport(1, 0, -1, False, 30)
    assert retention.enter(2, rank=0, world_size=2, step=5, keep=SnapshotId(1, 0)).take == part(5, 2)


# ---------------------------------------------------------------- others' parts


def test_of_another_rank_the_one_that_counts_for_it_and_one_under_way_are_kept(retention: Retention) -> None:
    for step in (0, 10, 20):
        retention.accept(part(step, rank=1), SnapshotId(1, max(0, step - 10)))
    assert retention.kept == (part(0), part(10, rank=1), part(20, rank=1))


def test_others_parts_go_with_what_counted_before(retention: Retention) -> None:
    retention.accept(part(0, rank=1), None)
    retention.accept(part(10, rank=1), SnapshotId(1, 0))
    retention.at_step(10, word(0, 2))
    retention.completed(part(10))
    assert retention.at_step(11, word(10, 12)).drop == (part(0), part(0, rank=1))


def test_a_part_that_comes_too_late_is_not_kept(retention: Retention) -> None:
    retention.enter(2, rank=0, world_size=2, step=0, keep=SnapshotId(1, 0))
    assert retention.accept(part(10, 1, 1), None).drop == (part(10, 1, 1),)
    assert part(10, 1, 1) not in retention.kept


def test_a_part_of_a_generation_that_this_rank_is_still_to_enter_stays(retention: Retention) -> None:
    assert retention.accept(part(0, 2, 1), SnapshotId(1, 0)).drop == ()
    retention.enter(2, rank=0, world_size=2, step=0, keep=SnapshotId(1, 0))
    assert part(0, 2, 1) in retention.kept


@pytest.mark.parametrize("every", [0, -1])
def test_how_often_must_be_a_count(every: int) -> None:
    with pytest.raises(ValueError, match="every must be 1 or more"):
        Retention(every)
