"""Formats log lines of scheduler and workers: long texts are broken into lines of at most 300 characters.

:class:`LogBudget` limits the lines about frequent events, so that a caller cannot flood a log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_LINE = 300
MORE = "+ "


def bounded(head: str, text: str, limit: int = MAX_LINE) -> str:
    """Puts a head before each line of a text, and breaks lines that are too long, at a blank if there is one.

    Args:
        head: the beginning of each line, such as time and level.
        text: one or more lines.
        limit: the largest number of characters of a line.

    Returns:
        Lines that all begin with the head. In a line that continues the previous one, ``+`` follows the head.
    """
    lines = []
    for line in text.split("\n"):
        begin = head
        while len(line) > (room := max(limit - len(begin), 2)):
            cut = line.rfind(" ", room // 2, room + 1)
            cut = room if cut < 0 else cut
            lines.append(begin + line[:cut])
            begin, line = head + MORE, line[cut:].removeprefix(" ")
        lines.append(begin + line)
    return "\n".join(lines)


class BoundedFormatter(logging.Formatter):
    """Formats a record as ``time name level text``, on as many lines as necessary.

    Subclasses choose the head and the text of a record.
    """

    def head(self, record: logging.LogRecord) -> str:
        """Returns the beginning of each line."""
        return f"{self.formatTime(record)} {record.name} {record.levelname} "

    def text(self, record: logging.LogRecord) -> str:
        """Returns the message, with the traceback if there is one."""
        text = record.getMessage()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        return bounded(self.head(record), self.text(record))


def one_line(text: str) -> str:
    """Escapes characters that are not printable, so that nobody can forge a log line or terminal command."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


T = TypeVar("T")

OTHERS = ""
"""The name under which all callers beyond the limit are counted; they share one budget."""


@dataclass(slots=True)
class _Window(Generic[T]):
    until_s: float
    written: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    last: T | None = None


@dataclass(frozen=True, slots=True)
class Suppressed(Generic[T]):
    """Events of one caller that were not logged: their number by code, and the last event."""

    caller: str
    codes: Counter[str]
    last: T


class LogBudget(Generic[T]):
    """Limits how many events of each caller are logged in a window. A window begins with its first event.

    Args:
        lines: how many events of one caller are logged in a window.
        window_s: the length of a window, in seconds.
        max_callers: how many callers have a budget of their own at the same time; the others share one.
    """

    def __init__(self, *, lines: int, window_s: float, max_callers: int) -> None:
        self.lines = lines
        self.window_s = window_s
        self.max_callers = max_callers
        # The windows are in the order of their ends, because all have the same length.
        self._windows: dict[str, _Window[T]] = {}

    def take(self, caller: str, code: str, event: T, now_s: float) -> bool:
        """Returns whether to log an event now; counts it if not. Call :meth:`due` first."""
        if caller not in self._windows and len(self._windows) >= self.max_callers:
            caller = OTHERS
        window = self._windows.setdefault(caller, _Window(now_s + self.window_s))
        if window.written < self.lines:
            window.written += 1
            return True
        window.codes[code] += 1
        window.last = event
        return False

    def due(self, now_s: float) -> Iterator[Suppressed[T]]:
        """Ends the windows that are over; yields the events that were suppressed in them.

        The caller's next window begins immediately, and the line about the suppressed events counts as its
        first.
        """
        while self._windows:
            caller, window = next(iter(self._windows.items()))
            if window.until_s > now_s:
                return
            del self._windows[caller]
            if window.last is not None:
                self._windows[caller] = _Window(now_s + self.window_s, written=1)
                yield Suppressed(caller, window.codes, window.last)

    def next_s(self) -> float | None:
        """Returns when :meth:`due` will yield something, in seconds; None if nothing was suppressed."""
        return next((window.until_s for window in self._windows.values() if window.codes), None)
