"""Formats durations, times of day, numbers and bytes for people."""

from __future__ import annotations

import datetime as dt
import math

DAY_S = 86_400.0


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size_s, unit, next_s, next_unit in (
        (DAY_S, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size_s:
            many, rest = divmod(whole, int(size_s))
            rest //= next_s
            return f"{many} {unit} {rest} {next_unit}" if rest else f"{many} {unit}"
    return f"{whole} s"


def clock(time_s: float) -> str:
    """The time of day here, ``14:03:09``."""
    return dt.datetime.fromtimestamp(time_s).strftime("%H:%M:%S")


def day(time_s: float) -> str:
    """The day here, ``2026-01-31``."""
    return dt.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d")


def moment(time_s: float) -> str:
    """Day and time here, for ``<time datetime>``."""
    return dt.datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")


def days(seconds: float) -> str:
    """``89 days``; below two days in hours."""
    if seconds <= 0:
        return "ended"
    return f"{seconds / DAY_S:,.0f} days" if seconds >= 2 * DAY_S else f"{seconds / 3600:.0f} hours"


def number(value: float | None) -> str:
    """Four digits that count, with commas: ``12,345``, ``12.35``, ``1.2e-05``; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(size_bytes: int) -> str:
    """``512 B``, ``1.5 MB``."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError
