"""How long a collective may take."""

from __future__ import annotations

from muster.worker.session.pace import LEAST_S, Pace


def test_a_collective_is_late_after_five_median_steps_and_at_least_ten_seconds() -> None:
    pace = Pace()
    assert pace.limit_s == LEAST_S == 10.0
    for step in range(20):
        pace.note_step(step, 4.0 * step + (300.0 if step == 19 else 0.0))
    assert pace.limit_s == 20.0, "one slow step does not count for much"
    for step in range(20, 60):
        pace.note_step(step, 1000.0 + 0.1 * step)
    assert pace.limit_s == 10.0


def test_a_step_that_is_redone_is_no_step_more() -> None:
    pace = Pace()
    pace.note_step(3, 100.0)
    pace.note_step(3, 500.0)
    pace.note_step(7, 900.0)
    assert pace.limit_s == 10.0


def test_a_script_that_counts_no_steps_is_measured_by_its_waits() -> None:
    pace = Pace()
    pace.note_wait(30.0)
    assert pace.limit_s == 150.0


def test_a_long_wait_in_a_step_that_is_counted_counts_once() -> None:
    """Else two steps of which one waited for a busy rank would say that steps are long."""
    told_before, told_after = Pace(), Pace()
    for pace in (told_before, told_after):
        pace.note_step(0, 0.0)
        pace.note_step(1, 0.5)
    told_before.note_wait(12.5)
    told_before.note_step(2, 15.0)
    told_after.note_step(2, 15.0)
    told_after.note_wait(12.5)
    assert told_before.limit_s == told_after.limit_s == 10.0


def test_what_was_before_the_first_step_is_no_step() -> None:
    pace = Pace()
    pace.note_step(0, 1e6)
    assert pace.limit_s == 10.0
    pace.note_step(1, 1e6 + 1.0)
    assert pace.limit_s == 10.0


def test_one_long_step_of_two_does_not_say_how_long_a_step_is() -> None:
    """It waited for a rank that was busy alone, say; who hangs in the next one is not waited for as long."""
    pace = Pace()
    for step, now in enumerate((0.0, 0.5, 20.5)):
        pace.note_step(step, now)
    assert pace.limit_s == 10.0
