"""What others learn of the thread that trains."""

from __future__ import annotations

import pytest

from muster.worker.session.leave import LoneLeave
from muster.worker.session.training_thread import HANG_S, TrainingThread


class Calls:
    """Collectives whose times a test sets."""

    hanging = late = 0.0
    blocked = False

    def hanging_s(self) -> float:
        return self.hanging

    def late_s(self) -> float:
        return self.late

    def waits(self) -> bool:
        return self.blocked

    def recent(self, *, last_only: bool = False) -> tuple[()]:
        return ()


class Stage:
    """A thread, its clock, and which generations are over."""

    def __init__(self) -> None:
        self.now = 100.0
        self.over_up_to = 0
        self.calls = Calls()
        self.thread = TrainingThread(
            self.calls, LoneLeave(unfinished_s=20.0), over=self.over, clock=lambda: self.now
        )

    def over(self, generation: int) -> Exception | None:
        return Exception("over") if 0 < generation <= self.over_up_to else None


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_who_waits_for_a_generation_waits_for_others_until_it_is_in_it(stage: Stage) -> None:
    thread = stage.thread
    assert not thread.waits()
    thread.note_entering()
    assert thread.waits()
    thread.note_building(1)
    assert thread.waits()
    thread.note_entered()
    assert not thread.waits()


def test_a_build_that_takes_long_is_late_and_no_more_once_all_are_there(stage: Stage) -> None:
    thread = stage.thread
    thread.note_entering()
    stage.now += 50.0
    assert thread.late_s() == 0.0, "a generation may take as long as it likes to form"
    thread.note_building(1)
    stage.now += 7.0
    assert thread.late_s() == 7.0
    stage.calls.late = 9.0
    assert thread.late_s() == 9.0
    stage.calls.late = 0.0
    thread.note_entered()
    assert thread.late_s() == 0.0


def test_who_was_cut_off_from_a_generation_lets_others_wait(stage: Stage) -> None:
    thread = stage.thread
    thread.note_entering()
    thread.note_building(1)
    stage.calls.late, stage.over_up_to = 9.0, 1
    stage.now += 50.0
    assert thread.late_s() == 0.0
    assert not thread.waits()
    thread.note_entering()
    assert thread.waits()


def test_who_is_held_at_a_step_boundary_or_blocked_in_a_collective_waits_for_others(stage: Stage) -> None:
    stage.thread.is_held = True
    assert stage.thread.waits()
    stage.thread.is_held = False
    stage.calls.blocked = True
    assert stage.thread.waits()


def test_a_collective_hangs_after_a_while(stage: Stage) -> None:
    stage.calls.hanging = HANG_S
    assert not stage.thread.is_hanging
    stage.calls.hanging = HANG_S + 0.1
    assert stage.thread.is_hanging


def test_all_that_it_does_alone_is_told(stage: Stage) -> None:
    thread = stage.thread
    assert thread.busy == ""
    thread.begin_busy("evaluation")
    thread.begin_busy("upload")
    assert thread.busy == "evaluation, upload"
    thread.end_busy("evaluation")
    assert thread.busy == "upload"
