"""No log line is longer than 300 characters, nobody floods a log, and what is left out is counted."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.scheduler.audit.logs import JournalFormatter, LineFormatter
from muster.wire.log_lines import (
    MAX_LINE,
    MORE,
    OTHERS,
    BoundedFormatter,
    LogBudget,
    Suppressed,
    bounded,
    one_line,
)

LONG = " ".join(f"word{number}" for number in range(200))


def record(text: str, *, traceback: bool = False) -> logging.LogRecord:
    exc_info = None
    if traceback:
        try:
            raise ValueError(LONG)
        except ValueError:
            exc_info = sys.exc_info()
    return logging.LogRecord("muster.worker", logging.WARNING, __file__, 1, "%s", (text,), exc_info)


@pytest.mark.parametrize("formatter", [BoundedFormatter(), LineFormatter(), JournalFormatter()])
@pytest.mark.parametrize("traceback", [False, True])
def test_each_line_is_bounded_has_its_head_and_nothing_is_lost(
    formatter: BoundedFormatter, traceback: bool
) -> None:
    entry = record(LONG, traceback=traceback)
    lines = formatter.format(entry).split("\n")
    assert max(map(len, lines)) <= MAX_LINE
    head = formatter.head(entry)
    assert all(line.startswith(head) for line in lines)
    told = " ".join(line.removeprefix(head).removeprefix(MORE) for line in lines)
    assert set(LONG.split()) <= set(re.split(r"[ \n]", told))
    assert lines[1].startswith(head + MORE)


def test_a_short_line_stays_as_it_is() -> None:
    assert LineFormatter().format(record("all is well")).endswith("Z WARNING all is well")
    assert BoundedFormatter().format(record("all is well")).endswith(" muster.worker WARNING all is well")


def test_a_text_without_blanks_is_cut_and_a_head_without_room_ends() -> None:
    assert bounded("a ", "x" * 21, 10) == "a " + "\na + ".join(["x" * 8, "x" * 6, "x" * 6, "x"])
    assert bounded("head that is too long ", "abcd", 10).count("\n") == 1


def test_what_a_peer_sends_forges_no_line_of_the_scheduler() -> None:
    forged = LineFormatter().format(record("x\n2026-01-31T12:00:00.123Z INFO forged"))
    assert "\n" not in forged and "\\n2026" in forged


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


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_free_text_always_fits_one_log_line(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


def test_what_is_escaped_can_be_told_from_what_was_sent() -> None:
    assert one_line("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
