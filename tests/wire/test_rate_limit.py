"""Nobody's events flood a log, and what is not logged is counted."""

from __future__ import annotations

from collections import Counter

from muster.wire.log_lines import OTHERS, LogBudget, Suppressed


def budget() -> LogBudget[int]:
    return LogBudget(lines=3, window_s=60.0, max_callers=2)


def test_each_caller_has_a_budget_of_his_own() -> None:
    one = budget()
    assert [one.take("a", "full", number, 0.0) for number in range(5)] == [True] * 3 + [False] * 2
    assert one.take("b", "full", 0, 0.0)
    assert one.next_s() == 60.0


def test_a_window_that_is_over_tells_what_it_did_not_let_through() -> None:
    one = budget()
    for number, code in enumerate(["full"] * 3 + ["malformed", "full", "full"]):
        one.take("a", code, number, 1.0)
    one.take("b", "full", 0, 2.0)
    assert list(one.due(60.9)) == []
    assert list(one.due(61.0)) == [Suppressed("a", Counter(full=2, malformed=1), 5)]
    assert one.next_s() is None


def test_the_line_with_the_count_is_the_first_of_the_next_window() -> None:
    one = budget()
    for number in range(4):
        one.take("a", "full", number, 0.0)
    assert len(list(one.due(60.0))) == 1
    assert [one.take("a", "full", number, 61.0) for number in range(3)] == [True, True, False]
    assert len(list(one.due(119.0))) == 0
    assert len(list(one.due(120.0))) == 1


def test_a_quiet_window_makes_a_caller_new_again() -> None:
    one = budget()
    one.take("a", "full", 0, 0.0)
    assert list(one.due(60.0)) == []
    assert [one.take("a", "full", number, 60.0) for number in range(3)] == [True] * 3


def test_callers_beyond_the_most_share_one_budget() -> None:
    one = budget()
    assert one.take("a", "full", 0, 0.0) and one.take("b", "full", 0, 0.0)
    assert [one.take(f"new {number}", "full", number, 0.0) for number in range(5)] == [True] * 3 + [False] * 2
    assert one.take("a", "full", 1, 0.0)
    assert list(one.due(float("inf"))) == [Suppressed(OTHERS, Counter(full=2), 4)]
    assert one.next_s() is None
