"""Where the time of a worker's steps goes."""

from __future__ import annotations

from typing import Any

import pytest

from muster.communicators.fault_aware import FlightRecorder
from muster.wire.messages import StepTimes
from muster.worker.session.step_clock import StepClock


class Machine:
    """A clock that is set, and a clock of steps by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits = FlightRecorder(lambda: self.now)
        self.sent = {1: 5.0, 3: 7.0}
        self.clock = StepClock(self.waits, lambda: self.now, lambda: self.sent)

    def step(self, computed_s: float, waited_s: float, data_s: float = 0.0) -> None:
        self.now += computed_s + data_s
        self.clock.note_data(data_s)
        self.waits.await_device()
        self.now += waited_s
        self.waits.settle()
        self.clock.end_step()


def test_sum_maximum_and_count_of_what_steps_were_spent_on_since_the_last_heartbeat() -> None:
    machine = Machine()
    machine.clock.begin()
    machine.step(1.0, 0.5, 0.25)
    machine.step(2.0, 0.125)
    assert machine.clock.take() == StepTimes(2, (3.0, 2.0, 0.625, 0.5, 0.25, 0.25, 0.0), 2)
    assert machine.clock.take() is None
    machine.step(1.0, 0.0)
    times = machine.clock.take()
    assert times is not None
    assert times.seconds[:2] == (1.0, 1.0)


def test_the_link_on_which_data_wait_longest_goes_with_it() -> None:
    machine = Machine()
    machine.clock.begin()
    machine.sent = {1: 5.5, 3: 9.0, 4: 1.0}
    machine.step(1.0, 0.0)
    times = machine.clock.take()
    assert times is not None
    assert (times.link, times.seconds[6]) == (4, 2.0)


def test_neither_a_change_of_members_nor_what_is_done_alone_counts_as_computed() -> None:
    machine = Machine()
    machine.clock.begin()
    machine.step(1.0, 0.0)
    machine.now += 50.0  # the next generation forms
    machine.clock.begin()
    machine.now += 30.0
    machine.clock.excuse(30.0)
    machine.step(1.0, 0.0)
    assert machine.clock.take() == StepTimes(1, (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 2)


def test_steps_before_there_is_a_group_are_not_timed() -> None:
    machine = Machine()
    machine.clock.end_step()
    assert machine.clock.take() is None


def test_members_of_a_large_group_report_seldom_by_turns_and_lose_no_step() -> None:
    machine = Machine()
    machine.clock.begin(members=1000, rank=400)
    reports = []
    for second in range(1, 13):
        machine.step(0.75, 0.25)
        times = machine.clock.take()
        if times is not None:
            reports.append((second, times.steps))
    assert reports == [(2, 2), (7, 5), (12, 5)]


class Gpu:
    """Tells what its stream waited, once after each step that it measured."""

    def __init__(self) -> None:
        self.measured: float | None = None

    def take(self) -> float | None:
        measured, self.measured = self.measured, None
        return measured


def test_of_what_the_host_waits_for_its_gpu_only_what_the_gpu_waits_for_others_is_waiting() -> None:
    machine, gpu = Machine(), Gpu()
    machine.waits.measure_waits(gpu.take)
    gpu.measured = 0.25  # of a step before this group stood
    machine.clock.begin()
    machine.step(0.5, 2.0)  # what ran on the CPU alone: nothing is measured
    gpu.measured = 0.125
    machine.step(0.5, 2.0, 0.25)
    gpu.measured = 9.0  # more than the step took: it is the measure of a longer one
    machine.step(0.5, 1.0)
    times = machine.clock.take()
    assert times is not None
    assert times.seconds[:6] == (0.5 + 2.375 + 0.0, 2.375, 2.0 + 0.125 + 1.5, 2.0, 0.25, 0.25)


def test_a_model_that_is_gone_measures_nothing() -> None:
    machine, gpu = Machine(), Gpu()
    machine.waits.measure_waits(gpu.take)
    gpu.measured = 0.125
    machine.clock.begin()
    gpu.measured = 0.125
    del gpu
    machine.step(0.5, 2.0)
    times = machine.clock.take()
    assert times is not None
    assert times.seconds[:4] == (0.5, 0.5, 2.0, 2.0)


def test_standing_still_for_checkpoints_is_summed_up_and_no_part_of_a_step() -> None:
    machine = Machine()
    machine.clock.begin()
    machine.now += 2.5
    machine.clock.excuse(0.5)
    machine.clock.excuse(2.0, for_checkpoint=True)
    machine.step(1.0, 0.0)
    machine.clock.excuse(1.0, for_checkpoint=True)
    times = machine.clock.take()
    assert times is not None and times.seconds[0] == 1.0
    assert machine.clock.checkpoints_s == 3.0


def test_steps_that_a_program_has_timed_itself_take_the_place_of_those_noted_here() -> None:
    machine = Machine()
    machine.clock.begin()
    machine.step(9.0, 0.0)
    machine.clock.add(2, (1.0, 0.75, 0.5, 0.5, 0.25, 0.25))
    machine.step(9.0, 0.0)
    machine.clock.add(1, (1.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    assert machine.clock.take() == StepTimes(3, (2.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.0), 2)
    machine.clock.begin()
    machine.now += 5.0
    machine.step(9.0, 0.0)
    times = machine.clock.take()
    assert times is not None and times.steps == 1


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        (0, (1.0,) * 6),
        (1, (1.0,) * 5),
        (1, (-1.0,) * 6),
        (1, (float("nan"),) * 6),
        (1, (1e9,) * 6),
        (1 << 40, (1.0,) * 6),
        ("1", (1.0,) * 6),
        (1, ("x",) * 6),
    ],
)
def test_what_a_program_says_must_be_times_that_can_be_sent(steps: Any, seconds: Any) -> None:
    machine = Machine()
    machine.clock.begin()
    with pytest.raises((TypeError, ValueError)):
        machine.clock.add(steps, seconds)
    machine.step(1.0, 0.0)
    times = machine.clock.take()
    assert times is not None and times.steps == 1
