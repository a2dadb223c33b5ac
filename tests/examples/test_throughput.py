from __future__ import annotations

from typing import Any

import pytest

from examples.throughput import Throughput


class Clock:
    """Seconds, moved on by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(done: Throughput, clock: Clock, seconds: list[float], **options: Any) -> None:
    for each in seconds:
        clock.now += each
        done.add(64, **({"generation": 1} | options))


def test_the_speed_is_that_of_all_steps_but_the_first_of_a_generation(clock: Clock) -> None:
    done = Throughput(clock)
    train(done, clock, [30.0, 0.5, 0.5])  # compiles, and waits for the others
    assert done.samples_per_s == pytest.approx(128) and done.steps == 3
    train(done, clock, [60.0, 0.5], generation=2)  # a member was lost, and its place taken
    assert done.samples_per_s == pytest.approx(128) and done.steps == 5


def test_a_step_that_captures_counts_but_is_not_timed(clock: Clock) -> None:
    done = Throughput(clock)
    train(done, clock, [30.0, 1.0, 1.0])
    train(done, clock, [9.0], captured=True, timed=False)
    train(done, clock, [0.5] * 4, captured=True)
    assert (done.captured, done.steps) == (5, 8)
    assert done.samples_per_s == pytest.approx(6 * 64 / 4)  # two eager steps and four captured ones


def test_what_was_waited_for_in_a_pause_is_not_timed(clock: Clock) -> None:
    done = Throughput(clock)
    train(done, clock, [30.0, 0.5])
    done.pause()
    train(done, clock, [7.0, 0.5])
    assert done.samples_per_s == pytest.approx(128) and done.steps == 4


def test_without_a_timed_step_there_is_no_speed(clock: Clock) -> None:
    done = Throughput(clock)
    assert done.samples_per_s is None
    train(done, clock, [30.0])
    assert done.samples_per_s is None and done.steps == 1


def test_a_replaced_rank_0_takes_what_the_longest_lived_one_has_counted(clock: Clock) -> None:
    lived, came_later = Throughput(clock), Throughput(clock)
    train(lived, clock, [30.0, 0.5, 0.5])
    for done in (lived, came_later):
        train(done, clock, [0.0], generation=2)
    came_later.take([came_later.row(), lived.row()])
    assert came_later.row() == lived.row() == [4, 0, 128, 1_000_000]


def test_steps_that_a_change_of_members_undid_count_once(clock: Clock) -> None:
    done = Throughput(clock)
    for number in range(1, 21):
        train(done, clock, [0.5], number=number, captured=True)
    for number in (19, 20):  # both broke, and are redone eagerly
        train(done, clock, [0.5], number=number, generation=2)
    train(done, clock, [0.5], number=21, generation=2, captured=True)
    assert (done.steps, done.captured) == (21, 19)
