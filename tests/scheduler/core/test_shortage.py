"""When a journal without space is tried again, and what is said of it."""

from __future__ import annotations

from muster.scheduler.core.shortage import LONGEST_PAUSE_S, REPORT_S, Shortage


def test_pauses_grow_and_stay_short_enough_to_go_on_soon_after_there_is_space() -> None:
    shortage = Shortage()
    pauses = [shortage.refused("a", "full.", float(at)) for at in range(1000)]
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE_S <= 5.0


def test_there_is_a_shortage_for_as_long_as_any_call_waits() -> None:
    shortage = Shortage()
    assert not shortage.over("never refused")
    shortage.refused("a", "the disk is full.", 1.0)
    shortage.refused("b", "the disk is full.", 2.0)
    assert not shortage.over("a")
    assert (shortage.why, shortage.since) == ("the disk is full.", 1.0)
    assert shortage.over("b")
    assert shortage.why == ""
    assert shortage.refused("c", "again.", 9.0) == 0.1
    assert shortage.since == 9.0


def test_it_is_logged_at_once_and_then_now_and_then() -> None:
    shortage = Shortage()
    assert not shortage.report_due(0.0)
    logged = []
    for at in range(int(2.5 * REPORT_S)):
        shortage.refused("a", "full.", float(at))
        logged += [at] if shortage.report_due(float(at)) else []
    assert logged == [0, REPORT_S, 2 * REPORT_S]
