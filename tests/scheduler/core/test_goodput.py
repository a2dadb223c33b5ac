"""A job's time by cause, of the class alone and of a job that is suspended and makes steps again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events
from muster.scheduler.core.goodput import Goodput
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from muster.wire.time_by_cause import CHECKPOINTS, DATA, FORMING, REDOING, SUSPENDED, TRAINING
from tests.scheduler.core.scenes import SETTINGS, join


def test_each_second_counts_once_and_data_are_taken_from_training() -> None:
    goodput = Goodput()
    goodput.follow(FORMING, 10.0)
    goodput.follow(TRAINING, 12.0)
    goodput.data_waited(3.0, 22.0)
    goodput.data_waited(99.0, 24.0)  # never more than there is
    goodput.follow("", 30.0)
    spent = dict(goodput.seconds(99.0))
    assert spent == {FORMING: 2.0, TRAINING: 6.0, DATA: 12.0}
    assert sum(spent.values()) == 20.0


def test_steps_below_the_furthest_are_made_again_until_it_is_reached() -> None:
    goodput = Goodput()
    goodput.follow(TRAINING, 0.0)
    goodput.step_heard(100, 10.0, fell=False)
    goodput.step_heard(99, 11.0, fell=False)  # another rank, heard a little later
    goodput.step_heard(90, 20.0, fell=True)
    goodput.step_heard(99, 24.0, fell=False)
    goodput.step_heard(100, 25.0, fell=False)
    goodput.step_heard(101, 30.0, fell=False)
    assert dict(goodput.seconds(30.0)) == {TRAINING: 25.0, REDOING: 5.0}


def test_a_job_that_is_lost_suspended_and_redone() -> None:
    job = Machine("red", replace(SETTINGS, topo_timeout_s=1000.0))
    job.step(join(1, "a"), 0.0)
    job.step(join(2, "b"), 5.0)
    job.step(events.BuiltReported(1, 1), 6.0)
    job.step(events.BuiltReported(2, 1), 7.0)
    job.step(events.Heard(1, 1, 50, 50, 0.0), 8.0)
    job.step(events.SessionLost(2, "reset"), 9.0)
    assert job.view(9.0).state == "suspended"
    job.step(events.Heard(1, 1, 50, 50, 0.0), 12.0)
    job.step(join(3, "b", incarnation=2), 13.0)
    assert job.view(13.0).state == "building"
    job.step(events.BuiltReported(1, 2), 14.0)
    job.step(events.BuiltReported(3, 2), 15.0)
    job.step(events.Heard(1, 2, 40, 40, 0.0), 16.0)
    job.step(events.Heard(3, 2, 50, 50, 0.0), 18.0)
    spent = dict(job.view(20.0).time_by_cause)
    assert spent == pytest.approx({FORMING: 9.0, TRAINING: 5.0, SUSPENDED: 4.0, REDOING: 2.0})


def test_what_members_waited_for_data_is_no_training() -> None:
    job = Machine("red", SETTINGS)
    for session, node_id in ((1, "a"), (2, "b")):
        job.step(join(session, node_id), 0.0)
    for session in (1, 2):
        job.step(events.BuiltReported(session, 1), 0.0)
    times = messages.StepTimes(steps=10, seconds=(0.5, 0.1, 0.0, 0.0, 0.5, 0.1, 0.0))
    for now in (0.0, 1.0, 2.0, 3.0):
        for session in (1, 2):
            beat = events.Heard(session, 1, 10 * int(now), 10 * int(now), 0.0).replaced(times=times)
            job.step(beat, now)
    spent = dict(job.view(4.0).time_by_cause)
    assert spent[DATA] == pytest.approx(1.5, abs=0.6) and spent[TRAINING] + spent[DATA] == pytest.approx(4.0)


def test_checkpoints_count_once_however_many_ranks_stand_still_for_them() -> None:
    goodput = Goodput()
    goodput.follow(TRAINING, 0.0)
    goodput.checkpoints_heard("a", 100.0, 1.0)  # of before this scheduler began
    goodput.checkpoints_heard("b", 0.0, 1.0)
    goodput.checkpoints_heard("a", 103.0, 20.0)
    goodput.checkpoints_heard("b", 2.0, 20.0)
    assert dict(goodput.seconds(20.0)) == {TRAINING: 17.0, CHECKPOINTS: 3.0}
    goodput.checkpoints_heard("b", 6.0, 30.0)  # 6 s in all: 3 more than another has taken
    assert dict(goodput.seconds(30.0))[CHECKPOINTS] == 6.0
    goodput.generation_formed()
    goodput.checkpoints_heard("b", 7.0, 40.0)
    goodput.checkpoints_heard("a", 0.5, 40.0)  # a new process
    assert dict(goodput.seconds(40.0)) == {TRAINING: 33.0, CHECKPOINTS: 7.0}


def test_checkpoints_while_steps_are_made_again_are_no_part_of_that() -> None:
    goodput = Goodput()
    goodput.follow(TRAINING, 0.0)
    goodput.checkpoints_heard("a", 0.0, 0.0)
    goodput.step_heard(100, 1.0, fell=False)
    goodput.step_heard(10, 2.0, fell=True)
    goodput.checkpoints_heard("a", 5.0, 10.0)
    assert dict(goodput.seconds(10.0)) == {REDOING: 5.0, CHECKPOINTS: 5.0}


def test_what_a_member_says_of_checkpoints_and_of_its_own_numbers_is_in_the_view() -> None:
    job = Machine("red", SETTINGS)
    for session, node_id in ((1, "a"), (2, "b")):
        job.step(join(session, node_id), 0.0)
    for session in (1, 2):
        job.step(events.BuiltReported(session, 1), 0.0)
    beat = events.Heard(1, 1, 1, 1, 0.0)
    job.step(beat, 1.0)
    job.step(beat.replaced(checkpoints_s=2.0, numbers=(("accuracy", 0.5), ("lr", 1.0))), 5.0)
    job.step(events.Heard(2, 1, 1, 1, 0.0).replaced(numbers=(("accuracy", 1.0),)), 5.0)
    view = job.view(6.0)
    assert dict(view.time_by_cause) == pytest.approx({TRAINING: 4.0, CHECKPOINTS: 2.0})
    assert view.numbers == (("accuracy", 0.75), ("lr", 1.0))


def test_the_time_that_is_left_follows_from_the_steps_and_their_pace() -> None:
    job = Machine("red", SETTINGS)
    for session, node_id in ((1, "a"), (2, "b")):
        job.step(join(session, node_id), 0.0)
    for session in (1, 2):
        job.step(events.BuiltReported(session, 1), 0.0)
    view = job.view(0.0)
    assert (view.steps, view.remaining_s, view.epoch, view.epochs) == (0, 0.0, 0, 0)
    times = messages.StepTimes(steps=10, seconds=(0.75, 0.1, 0.25, 0.0, 0.0, 0.0, 0.0))
    for now in (0.0, 1.0, 2.0, 3.0):
        for session in (1, 2):
            beat = events.Heard(session, 1, 10 * int(now) + session, 40, 0.0).replaced(
                times=times, steps=1000, epoch=2 + session, epochs=10
            )
            job.step(beat, now)
    view = job.view(4.0)
    assert (view.steps, view.epoch, view.epochs) == (1000, 3, 10)  # as far as all members are
    assert view.remaining_s == pytest.approx((1000 - 31) * 0.1)
