"""Which snapshot counts, by what members say that they keep; and what a member can bring about by lying."""

from __future__ import annotations

import pytest

from muster.scheduler.core import events
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.snapshots import LAST_STEP, SnapshotAgreement
from muster.wire import messages
from tests.scheduler.core.scenes import SETTINGS, finish, formed_by, history, join, running, three


def keeps(
    agreed: int = -1, taken: int = -1, *, complete: bool = True, passed: int = -1
) -> messages.SnapshotReport:
    return messages.SnapshotReport(1, agreed, taken, complete and taken >= 0, passed)


def tell(agreement: SnapshotAgreement, **reports: messages.SnapshotReport) -> messages.SnapshotWord | None:
    """What is said when these have told, each at step 12; the last that was said."""
    for node_id, report in reports.items():
        agreement.hear(node_id, report, 12)
    return agreement.word


@pytest.fixture
def three_members() -> SnapshotAgreement:
    """Three that all keep step 0, which counts; the next is named."""
    agreement = SnapshotAgreement(1, "abc")
    assert tell(agreement, a=keeps(taken=0), b=keeps(taken=0), c=keeps(taken=0)) == messages.SnapshotWord(
        1, 0, 13
    )
    tell(agreement, a=keeps(0), b=keeps(0), c=keeps(0))
    return agreement


def test_nothing_counts_before_all_have_told() -> None:
    agreement = SnapshotAgreement(1, "abc")
    assert tell(agreement, a=keeps(taken=5), b=keeps(taken=5)) is None
    assert tell(agreement, c=keeps(taken=5, complete=False)) is None
    assert tell(agreement, c=keeps(taken=5)) == messages.SnapshotWord(1, 5, 13)


def test_it_is_said_when_it_changes_and_not_with_each_report() -> None:
    agreement = SnapshotAgreement(1, "a")
    assert agreement.hear("a", keeps(taken=5), 5) is not None
    assert agreement.hear("a", keeps(taken=5), 6) is None


def test_a_step_that_only_some_have_taken_does_not_count_though_all_have_newer_ones(
    three_members: SnapshotAgreement,
) -> None:
    """The least of the newest is 20, which c let pass: it had not heard yet."""
    word = tell(three_members, a=keeps(0, 20), b=keeps(0, 20), c=keeps(0, 30, passed=20))
    assert word is not None and word.complete == 0


def test_what_one_let_pass_lapses_and_a_step_beyond_all_is_named(three_members: SnapshotAgreement) -> None:
    word = tell(three_members, a=keeps(0, 20), b=keeps(0, 20), c=keeps(0, passed=20))
    assert word == messages.SnapshotWord(1, 0, 22)


def test_each_miss_doubles_the_distance_and_what_counts_halves_it(three_members: SnapshotAgreement) -> None:
    distances = []
    for _ in range(4):
        word = three_members.word
        assert word is not None
        missed = word.next + 10
        word = tell(three_members, c=keeps(0, passed=missed))
        assert word is not None
        distances.append(word.next - missed)
        taken = word.next
    assert distances == [2, 4, 8, 16]
    word = tell(three_members, a=keeps(0, taken), b=keeps(0, taken), c=keeps(0, taken))
    assert word == messages.SnapshotWord(1, taken, taken + 8)


def test_two_that_took_different_ones_both_give_them_up(three_members: SnapshotAgreement) -> None:
    word = tell(three_members, a=keeps(0, 20), b=keeps(0, 30, passed=20))
    assert word is not None and word.next > 30


def test_who_says_nothing_new_does_not_make_it_lapse_again(three_members: SnapshotAgreement) -> None:
    word = tell(three_members, c=keeps(0, passed=20))
    assert tell(three_members, c=keeps(0, passed=20)) == word
    assert tell(three_members, a=keeps(0, passed=20), b=keeps(0, passed=20)) == word


@pytest.mark.parametrize(
    "said",
    [
        {"a": keeps(20), "b": keeps(0, 20), "c": keeps(20)},  # b has not heard yet
        {"a": keeps(20, 30), "b": keeps(0, 20), "c": keeps(20, 30, complete=False)},
    ],
)
def test_after_a_restart_it_learns_again_what_counted(said: dict[str, messages.SnapshotReport]) -> None:
    word = tell(SnapshotAgreement(1, "abc"), **said)
    assert word is not None and word.complete == 20


def test_after_a_restart_what_is_under_way_may_go_on() -> None:
    word = tell(SnapshotAgreement(1, "ab"), a=keeps(20, 30), b=keeps(20, 30, complete=False, passed=29))
    assert word == messages.SnapshotWord(1, 20, 21)
    agreement = SnapshotAgreement(1, "ab")
    word = tell(agreement, a=keeps(20, 30), b=keeps(20, passed=30))
    assert word is not None and word.next > 30, "b let it pass"


def test_strangers_and_other_generations_are_not_heard() -> None:
    agreement = SnapshotAgreement(2, "a")
    assert agreement.hear("a", keeps(taken=5), 5) is None
    assert agreement.hear("x", messages.SnapshotReport(2, -1, 5, True), 5) is None
    assert agreement.word_for("a") is None


# ---------------------------------------------------------------- liars


def test_a_future_step_of_one_counts_for_nobody(three_members: SnapshotAgreement) -> None:
    before = three_members.word
    assert tell(three_members, c=keeps(taken=LAST_STEP)) == before
    assert tell(three_members, c=keeps(agreed=10**15)) == before
    word = tell(three_members, a=keeps(0, 20), b=keeps(0, 20))
    assert word == before, "it keeps newer ones from counting, and no more"


def test_who_claims_that_one_counts_makes_nobody_drop_what_may() -> None:
    """A scheduler that was started again: b may have heard that 20 counts, and c says it let that pass."""
    agreement = SnapshotAgreement(1, "abc")
    assert tell(agreement, a=keeps(0, 20), b=keeps(20), c=keeps(0, passed=25)) is None
    assert tell(agreement, c=keeps(0, passed=30)) is None


def test_a_lie_about_how_far_one_is_stays_a_step_that_can_be_sent(three_members: SnapshotAgreement) -> None:
    word = tell(three_members, c=keeps(0, passed=LAST_STEP))
    assert word == messages.SnapshotWord(1, 0, LAST_STEP)


# ---------------------------------------------------------------- in a job


def heard(
    job: Machine, session: int, report: messages.SnapshotReport | None, generation: int = 1
) -> list[tuple[int, object]]:
    beat = events.Heard(session, generation, 12, 13, 1.0, (), generation, snapshot=report)
    return [each for each in job.step(beat, 1.0).messages if isinstance(each[1], messages.SnapshotWord)]


def test_all_members_are_told_when_the_last_has_told() -> None:
    job, _ = running()
    assert not heard(job, 1, keeps(taken=0))
    word = messages.SnapshotWord(1, 0, 13)
    assert heard(job, 2, keeps(taken=0)) == [(1, word), (2, word)]
    assert not heard(job, 2, keeps(taken=0))


def test_one_that_takes_none_keeps_the_others_from_being_told() -> None:
    job, _ = running()
    assert not heard(job, 1, keeps(taken=0))
    assert not heard(job, 2, None), "it may know nothing of this message"


def test_who_comes_back_is_told_again() -> None:
    job, _ = running()
    heard(job, 1, keeps(taken=0))
    heard(job, 2, keeps(taken=0))
    again = join(3, "a").replaced(held_generation=1, held_rank=0, built=True)
    assert (3, messages.SnapshotWord(1, 0, 13)) in job.step(again, 2.0).messages


def test_nobody_who_has_told_nothing_is_told_anything_on_a_new_stream() -> None:
    job, _ = running()
    heard(job, 1, keeps(taken=0))
    again = join(3, "b").replaced(held_generation=1, held_rank=1, built=True)
    assert not any(isinstance(told, messages.SnapshotWord) for _, told in job.step(again, 2.0).messages)


def test_a_new_generation_begins_again_and_nothing_is_written_down() -> None:
    job = three(2)
    for session in (1, 2, 3):
        heard(job, session, keeps(taken=0))
    formed_by(job, events.SessionLost(3, "reset"))
    history(job, events.BuiltReported(1, 2), events.BuiltReported(2, 2))
    assert not heard(job, 1, keeps(taken=9), 2), "of the generation before"
    report = messages.SnapshotReport(2, -1, 9, True)
    assert not heard(job, 1, report, 2)
    assert len(heard(job, 2, report, 2)) == 2
    assert not job.step(events.Heard(2, 2, 12, 13, 1.0, (), 2, snapshot=report), 2.0).records


def test_a_recovered_scheduler_hears_it_from_the_members() -> None:
    _, records = running()
    job = Machine.recover("red", SETTINGS, records, 0.0)
    for session, node_id in ((1, "a"), (2, "b")):
        job.step(join(session, node_id).replaced(held_generation=1, held_rank=session - 1, built=True), 0.0)
    heard(job, 1, keeps(7))
    assert len(heard(job, 2, keeps(7))) == 2


def test_who_has_finished_is_still_counted_among_those_that_keep() -> None:
    job = three(1)
    for session in (1, 2, 3):
        heard(job, session, keeps(taken=0))
    finish(job, 3, 1.0)
    assert not heard(job, 1, keeps(0, 20))
    assert not heard(job, 2, keeps(0, 20)), "its copy has gone with it"
