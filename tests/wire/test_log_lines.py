"""No log line is longer than 300 characters, of neither side, and nothing is lost."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from muster.scheduler.audit.logs import JournalFormatter, LineFormatter
from muster.wire.log_lines import MAX_LINE, MORE, BoundedFormatter, bounded

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
