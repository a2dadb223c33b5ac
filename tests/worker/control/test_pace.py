from __future__ import annotations

from muster.worker.control.pace import LEAST_S, Pace


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
