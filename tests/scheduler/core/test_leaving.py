"""Whose stream ends: who is lost at once, who has time to come back, who was let go."""

from __future__ import annotations

from dataclasses import replace

from muster.scheduler.core import events, records
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from tests.scheduler.core.scenes import (
    SETTINGS,
    finish,
    history,
    is_removed,
    join,
    loss_after,
    many,
    running,
    three,
)


def test_a_worker_whose_stream_ends_while_it_is_heard_is_lost_at_once() -> None:
    _, decision = loss_after(2.0)
    assert is_removed(decision)
    assert decision.reason.startswith("Rank 1 (node b on host host-b) is lost: its stream ended (reset).")


def test_a_worker_whose_hosts_stream_broke_keeps_its_place_until_node_timeout() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    decision = job.step(events.SessionLost(2, "its host's stream ended", may_return=True), 1.0)
    assert not is_removed(decision)
    assert "it has 4.0 s to come back" in decision.reason
    back = job.step(events.Joined(5, join(5, "b").candidate, held_generation=1, held_rank=1, built=True), 2.0)
    assert not is_removed(back)
    job.step(events.SessionLost(5, "its host's stream ended", may_return=True), 2.5)
    job.step(events.Heard(1, 1, 0, 0, 0.0), 6.0)
    assert is_removed(job.step(events.Tick(), 7.0))


def test_a_worker_whose_stream_ends_in_a_pause_keeps_its_place_until_node_timeout() -> None:
    job, decision = loss_after(3.0)
    assert not is_removed(decision)
    assert decision.reason == (
        "Rank 1 (node b on host host-b) was not heard for 3.0 s when its stream ended (reset); "
        "it has 2.0 s to come back."
    )
    back = job.step(events.Joined(5, join(5, "b").candidate, held_generation=1, held_rank=1, built=True), 4.9)
    assert any(session == 5 and isinstance(message, messages.Welcome) for session, message in back.messages)
    assert not is_removed(back)
    assert not is_removed(job.step(events.Heard(1, 1, 0, 0, 0.0), 4.9)) and not is_removed(
        job.step(events.Tick(), 5.1)
    )


def test_a_worker_that_does_not_come_back_from_its_pause_is_lost_when_its_silence_is_too_long() -> None:
    job, _ = loss_after(3.0)
    job.step(events.Heard(1, 1, 0, 0, 0.0), 4.0)
    deadline = job.deadline()
    assert deadline is not None and deadline <= 5.0
    assert not is_removed(job.step(events.Tick(), 4.9))
    decision = job.step(events.Tick(), 5.0)
    assert is_removed(decision) and "(node b on host host-b) is lost: not heard for 5.0 s" in decision.reason


def test_a_stream_that_ends_when_its_worker_is_overdue_is_put_down_to_the_silence() -> None:
    _, decision = loss_after(5.5)
    assert is_removed(decision)
    assert "is lost: not heard for 5.5 s, until its stream ended (reset)." in decision.reason


def test_a_stream_may_have_broken_until_it_is_looked_again_whether_the_scheduler_is_behind() -> None:
    """Workers that were not heard since they were placed may be silent for longer: a look comes later."""
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"))
    behind_at = next(at / 4 for at in range(100) if job.overdue(at / 4))
    assert behind_at > SETTINGS.node_timeout_s
    job.step(events.ReceiveBacklog((1, 2)), behind_at)
    look_at = next(behind_at + at / 4 for at in range(100) if job.overdue(behind_at + at / 4))
    for session in (1, 2):  # the end of a flood: what waited is read in one go, with the stream's end
        job.step(events.Heard(session, 1, 0, 0, 0.0), look_at)
        assert not is_removed(job.step(events.SessionLost(session, "ping timeout"), look_at))


def test_a_stream_that_ends_unheard_while_the_scheduler_is_behind_leaves_time_to_come_back() -> None:
    """Its last words may be lost with the stream, and its next ones wait where those did."""
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(events.ReceiveBacklog((1, 2)), 5.0)
    job.step(events.Heard(1, 1, 0, 0, 0.0), 9.9)
    decision = job.step(events.SessionLost(2, "ping timeout"), 9.9)
    assert "it may come back" in decision.reason and not is_removed(decision)
    assert not is_removed(job.step(events.Tick(), 10.0))
    job.step(events.Heard(1, 1, 0, 0, 0.0), 14.8)
    assert not is_removed(job.step(events.Tick(), 14.8))
    assert is_removed(job.step(events.Tick(), 14.9))  # dead after all: that time, and no more


def test_ends_of_streams_keep_nobody_who_does_not_speak() -> None:
    """A stream ends once: for another end a worker has to join again."""
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(events.ReceiveBacklog((1, 2)), 5.0)
    job.step(events.SessionLost(2, "reset"), 6.0)
    for at in (7.0, 8.0, 9.0, 10.0):
        job.step(events.Heard(1, 1, 0, 0, 0.0), at)
        job.step(events.SessionLost(2, "reset"), at)
        job.step(events.SessionLost(77, "reset"), at)
        job.step(events.ReceiveBacklog((2,)), at)
    assert not is_removed(job.step(events.Tick(), 10.9))
    assert is_removed(job.step(events.Tick(), 11.0))


def test_a_stream_that_ended_while_nothing_could_be_written_was_that_of_one_that_died() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(events.HeldUp(300.0), 300.0)
    assert is_removed(job.step(events.SessionLost(2, "reset"), 300.0))


def test_who_leaves_as_asked_from_a_suspended_job_is_not_lost_to_those_that_finish() -> None:
    """It may have finished as well: its goodbye is on the way when it is let go."""
    job = three(3)
    history(job, events.LeaveRequested(1, 1, "SIGTERM"))
    history(job, *[events.QuiescedReported(number, 1, 5) for number in (1, 2, 3)])
    assert job.view(0.0).state == "suspended"
    history(job, events.LeaveRequested(2, 1, "SIGTERM"))
    finish(job, 3)
    assert job.outcome == records.JobEnded(True, "All members have completed the training.")


def test_who_leaves_as_asked_before_it_had_a_step_is_not_lost_to_those_that_finish() -> None:
    """Asked while it took the place of another, whose last step was the last of all."""
    job, _ = running(replace(SETTINGS, spares=1))
    spare = join(3, "c")
    spare = spare.replaced(candidate=spare.candidate.replaced(spare=True))
    history(job, spare, events.LeaveRequested(1, 1, "SIGTERM"))
    history(job, *[events.QuiescedReported(number, 1, 5) for number in (1, 2)])
    assert [(each.candidate.node_id, each.rank) for each in job.view(0.0).workers][:2] == [("b", 0), ("c", 1)]
    history(job, events.LeaveRequested(3, 2, "SIGTERM"))
    history(job, events.LeftCleanly(3, 2, finished=False, reason="gives up"))
    finish(job, 2)
    assert job.outcome == records.JobEnded(True, "All members have completed the training.")


def test_a_stream_that_ends_within_two_heartbeats_is_that_of_a_killed_worker_however_rare_they_are() -> None:
    job = many(4, node_timeout_s=6.0, heartbeats_per_s=4 / 1.2)
    assert is_removed(job.step(events.SessionLost(4, "reset"), 3.9))  # without a place, every 2 s
    for session in (1, 2, 3):
        job.step(events.Heard(session, 2, 0, 0, 0.0), 4.0)
    assert not is_removed(job.step(events.SessionLost(3, "reset"), 6.5))
    assert is_removed(job.step(events.SessionLost(2, "reset"), 6.3))
