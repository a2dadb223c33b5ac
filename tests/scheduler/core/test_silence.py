"""Silence of workers, and of the scheduler itself: what counts, and what is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.machine import Machine
from tests.scheduler.core.scenes import SETTINGS, history, is_removed, join, many, running


def test_silence_does_not_count_while_the_event_loop_is_late() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    for second in range(1, 6):  # busy, 0.3 s in each
        job.step(events.ProcessPaused(0.3), float(second))
    assert not is_removed(job.step(events.Tick(), 6.4))
    assert is_removed(job.step(events.Tick(), 6.5))


def test_late_turns_of_the_event_loop_add_up_until_streams_may_have_broken() -> None:
    def loss_after(*late: float) -> bool:
        job, _ = running(replace(SETTINGS, worker_min=1))
        for at in late:
            job.step(events.ProcessPaused(0.9), at)
        job.step(events.Heard(2, 1, 0, 0, 0.0), 9.0)  # read just before its stream's end, which is as old
        return is_removed(job.step(events.SessionLost(2, "ping timeout"), 9.0))

    assert not loss_after(7.0, 8.0, 9.0)
    assert loss_after(3.0, 6.0, 9.0)  # each long over when the next came


def test_silence_does_not_count_while_what_a_worker_sent_is_unread() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(events.Heard(1, 1, 0, 0, 0.0), 4.0)
    assert (job.overdue(4.9), job.overdue(5.0)) == ((), (2,))
    decision = job.step(events.ReceiveBacklog((2,)), 5.0)
    assert decision.reason.startswith("The scheduler is behind: what 1 worker sent is not read yet;")
    assert job.overdue(5.0) == () and not is_removed(job.step(events.Tick(), 5.0))
    # Its own side may have given the stream up meanwhile.
    assert not is_removed(job.step(events.SessionLost(1, "reset"), 9.9))
    assert not is_removed(job.step(events.Joined(5, join(5, "a").candidate, held_generation=1), 9.9))
    decision = job.step(events.Tick(), 10.0)
    assert is_removed(decision) and "(node b on host host-b) is lost: not heard for 5.0 s" in decision.reason


def test_what_was_due_while_the_scheduler_stood_still_gets_that_time_again() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"))
    job.step(events.ProcessPaused(29.0), 29.0)
    assert job.step(events.Tick(), 31.0).records == ()  # MS_TOPO_TIMEOUT, 30 s, has not run meanwhile
    job, _ = running(replace(SETTINGS, node_timeout_s=20.0, stall_timeout_s=10.0))
    job.step(events.Heard(1, 1, 4, 5, 1.0, ()), 0.0)
    job.step(events.PeerSuspected(1, 1, 1, "reset"), 0.0)
    job.step(events.ProcessPaused(25.0), 25.0)
    decision = job.step(events.Tick(), 26.0)
    assert decision.records == () and "No progress" not in decision.reason


def test_while_nothing_can_be_written_no_silence_counts_and_no_wait_runs_out() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"))
    job.step(events.HeldUp(300.0), 300.0)
    assert job.step(events.Tick(), 302.0).records == ()  # MS_TOPO_TIMEOUT, 30 s, has not run meanwhile
    job, _ = running(replace(SETTINGS, worker_min=1))
    job.step(events.HeldUp(300.0), 300.0)
    assert not is_removed(job.step(events.Tick(), 304.9))
    assert is_removed(job.step(events.Tick(), 305.0))


def test_what_the_scheduler_did_not_read_costs_the_group_no_time_to_be_built() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"))
    for behind_at in (15.0, 20.0, 25.0):
        job.step(events.ReceiveBacklog((1, 2)), behind_at)
        job.step(events.Heard(1, 1, 0, 0, 0.0), behind_at)
    due = job.deadline()
    assert due is not None and due <= 30.0
    for session in (1, 2):
        job.step(events.Heard(session, 1, 0, 0, 0.0), 29.0)
    assert not job.step(events.Tick(), 31.0).records
    for session in (1, 2):
        job.step(events.Heard(session, 1, 0, 0, 0.0), 44.0)
    assert not job.step(events.Tick(), 44.9).records
    [ended] = job.step(events.Tick(), 45.0).records
    assert isinstance(ended, records.JobEnded) and "was not built in time" in ended.reason


def test_who_is_heard_less_often_is_waited_for_that_much_longer() -> None:
    """A pause of the node timeout may begin just before a heartbeat."""
    job = many(4, node_timeout_s=6.0, heartbeats_per_s=4 / 1.2)  # members every 1.2 s, others every 2 s
    job.step(events.Heard(1, 1, 0, 0, 0.0), 1.0)
    assert job.overdue(7.2) == ()
    assert job.overdue(7.4) == (1,)  # heard as a member since 1.0; the others not since 0.0, without a place
    assert job.overdue(7.5) == (1, 2, 3, 4)
    assert job.deadline() == pytest.approx(7.3)
