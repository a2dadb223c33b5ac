"""Times of day that ``muster drain --at`` takes, and whom it means."""

from __future__ import annotations

import argparse
import datetime as dt

import pytest

from muster.scheduler.cli.drain import moment_of

ZONE = dt.timezone(dt.timedelta(hours=2))
NOW = dt.datetime(2026, 1, 31, 22, 30, tzinfo=ZONE)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("23:00", dt.datetime(2026, 1, 31, 23, 0, tzinfo=ZONE)),
        ("02:00", dt.datetime(2026, 2, 1, 2, 0, tzinfo=ZONE)),
        ("22:30", dt.datetime(2026, 2, 1, 22, 30, tzinfo=ZONE)),
        ("2:00:30", dt.datetime(2026, 2, 1, 2, 0, 30, tzinfo=ZONE)),
        ("2026-02-03T02:00", dt.datetime(2026, 2, 3, 2, 0, tzinfo=ZONE)),
        ("2026-02-03T02:00+00:00", dt.datetime(2026, 2, 3, 2, 0, tzinfo=dt.UTC)),
    ],
)
def test_a_time_is_the_next_such_one(text: str, moment: dt.datetime) -> None:
    assert moment_of(text, NOW) == moment.timestamp()


@pytest.mark.parametrize("text", ["", "24:00", "noon", "2026-01-31T22:29", "9" * 99, "0001-01-01T00:00"])
def test_what_is_no_time_or_is_over_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        moment_of(text, NOW)
