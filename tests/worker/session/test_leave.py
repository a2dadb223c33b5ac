"""How long a worker that was asked to leave waits for consent."""

from __future__ import annotations

from muster.worker.session.leave import LoneLeave


def lone_leave(wanted_at: float | None) -> LoneLeave:
    made = LoneLeave(unreachable_s=3.0, unformed_s=5.0, unfinished_s=20.0)
    if wanted_at is not None:
        made.wanted = (wanted_at, "SIGTERM")
    return made


def test_who_was_not_asked_stays() -> None:
    made = lone_leave(None)
    made.note_entering(0.0)
    assert made.obstacle(1e6, away=True, waits=False) == ""


def test_a_lost_scheduler_has_a_while_to_come_back() -> None:
    made = lone_leave(10.0)
    assert made.obstacle(12.9, away=True, waits=False) == ""
    assert made.obstacle(13.0, away=True, waits=False) == "the scheduler cannot be reached"
    assert made.obstacle(1e6, away=False, waits=False) == ""


def test_a_generation_has_a_while_to_form_from_when_leave_is_wanted_and_it_is_waited_for() -> None:
    asked_first, asked_late = lone_leave(10.0), lone_leave(30.0)
    for made in (asked_first, asked_late):
        made.note_entering(20.0)
        made.note_entering(24.0)  # the same wait goes on
    assert asked_first.obstacle(24.9, away=False, waits=False) == ""
    assert (
        asked_first.obstacle(25.0, away=False, waits=False) == "the next generation did not form within 5 s"
    )
    assert asked_late.obstacle(34.9, away=False, waits=False) == ""
    assert asked_late.obstacle(35.0, away=False, waits=False) != ""
    asked_first.note_entered()
    assert asked_first.obstacle(1e6, away=False, waits=False) == ""


def test_others_have_a_while_to_finish_the_step() -> None:
    made = lone_leave(10.0)
    assert made.obstacle(29.9, away=False, waits=True) == ""
    assert made.obstacle(30.0, away=False, waits=True) == "others did not finish the step with it within 20 s"
    assert made.obstacle(1e6, away=False, waits=False) == ""
