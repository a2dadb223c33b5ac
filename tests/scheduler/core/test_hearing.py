"""What members say: when they come to build, and on whom their collectives failed."""

from __future__ import annotations

import pytest

from muster.scheduler.core import events, records
from muster.wire import messages
from tests.scheduler.core.scenes import EARLY, finish, formed_by, switching, three


@pytest.mark.parametrize("heard", [True, False], ids=["heartbeat first", "built before its next heartbeat"])
def test_a_member_that_comes_late_to_build_gives_all_their_time(heard: bool) -> None:
    """One that was busy alone, with an evaluation, is waited for; the others build when it has come."""
    job = three(2, node_timeout_s=1000.0)
    job.step(events.SessionLost(3, "reset"), 1.0)
    job.step(events.Heard(1, 2, 4, 5, 1.0, (), 2), 2.0)  # a has come, b evaluates
    job.step(events.Heard(2, 2, 4, 5, 1.0, (), 1), 30.5)
    if heard:
        job.step(events.Heard(2, 2, 4, 5, 1.0, (), 2), 30.9)
    assert not job.step(events.BuiltReported(2, 2), 31.1).records
    assert not job.step(events.Tick(), 32.0).records
    [established] = job.step(events.BuiltReported(1, 2), 33.0).records
    assert isinstance(established, records.GroupEstablished)


def test_what_fails_among_those_who_switched_too_early_breaks_no_step() -> None:
    """Only a failure in the generation that stands shows that its last step cannot be finished."""
    job = switching()
    formed_by(job, events.LeftCleanly(3, 3, False, "gives up"))
    late = events.PeerSuspected(
        1, 3, 1, "connection reset"
    )  # a was about to build generation 3 with the newcomer
    assert not job.step(late, 0.0).records
    assert formed_by(job, events.PeerSuspected(1, 2, 0, "connection reset")).switch_after_step == -1


def test_who_cannot_say_on_whom_a_collective_failed_is_answered_who_has_finished() -> None:
    job = three(1)
    failed = events.PeerSuspected(1, 1, -1, "all_reduce failed in NCCL")
    assert not job.step(failed, 0.0).messages
    answers = finish(job, 2).messages, job.step(failed, 0.0).messages  # whichever is heard first
    for answer in [told for received in answers for session, told in received if session == 1]:
        assert isinstance(answer, messages.Waiting) and answer.finished_ranks == (1,)
        assert answer.sentence.startswith(EARLY.replace("rank", "Rank"))
    assert [len(received) for received in answers] == [2, 1]
    assert not job.step(events.Tick(), 4.9).records, "the generation stands"
