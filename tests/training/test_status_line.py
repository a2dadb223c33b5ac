from __future__ import annotations

import io
import os
import shutil
from typing import Any

import pytest

from muster.training.status_line import Progress, Throughput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 20)))
    return Terminal()


def test_off_a_terminal_only_lines_are_written() -> None:
    stream = io.StringIO()
    with Progress(stream) as out:
        out.show(1, 2, "working")
        out.line("done")
    assert stream.getvalue() == "done\n"


def test_the_status_line_is_overwritten_and_taken_away(terminal: Terminal) -> None:
    with Progress(terminal) as out:
        out.show(1, 4, "a")
        out.show(4, 4, "b")
    assert terminal.getvalue() == "[#####...............] 1/4 a\r\x1b[K[####################] 4/4 b\r\x1b[K"


def test_lines_go_above_the_status_line(terminal: Terminal) -> None:
    out = Progress(terminal)
    out.show(0, 0, "a")
    out.line("stays")
    assert terminal.getvalue().endswith("\r\x1b[Kstays\n[....................] 0/0 a")


def test_the_status_line_never_wraps(terminal: Terminal) -> None:
    Progress(terminal).show(1, 2, "x" * 100)
    assert len(terminal.getvalue()) == 39


def test_an_error_takes_the_status_line_away_too(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="broken"), Progress(terminal) as out:
        out.show(1, 2, "a")
        raise ValueError("broken")
    assert terminal.getvalue().endswith("\r\x1b[K")


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
