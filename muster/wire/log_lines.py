"""Log lines of the scheduler and of workers: none is longer than 300 characters, and nothing is lost.

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
    """Puts a head before a text and breaks the line where it would be too long, at a blank if there is one.

    Args:
        head: what each line begins with: time, level.
        text: one or more lines.
        limit: characters of a line at most.

    Returns:
        Lines that all begin with the head; one that goes on another one has ``+`` after it.
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
    """Formats a record as ``time name level text``, on as many lines as it needs.

    Subclasses choose the head and the text of a record.
    """

    def head(self, record: logging.LogRecord) -> str:
        """The prefix of each line."""
        return f"{self.formatTime(record)} {record.name} {record.levelname} "

    def text(self, record: logging.LogRecord) -> str:
        """Returns the message, with the traceback if there is one."""
        text = record.getMessage()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        return bounded(self.head(record), self.text(record))


def one_line(text: str) -> str:
    """Escapes what is not printable, so that nobody forges a second line, or a terminal's command."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


T = TypeVar("T")

OTHERS = ""
"""The caller under which all callers beyond the limit are counted, with one budget."""


@dataclass(slots=True)
class _Window(Generic[T]):
    until_s: float
    written: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    last: T | None = None


@dataclass(frozen=True, slots=True)
class Suppressed(Generic[T]):
    """Events of one caller that were not logged: how many by code, and the last of them."""

    caller: str
    codes: Counter[str]
    last: T


class LogBudget(Generic[T]):
    """Limits how many events of each caller are logged in a window. A window begins with its first event.

    Args:
        lines: events of one caller that are logged in a window.
        window_s: its length, in seconds.
        max_callers: how many have a budget of their own at once; further ones share one budget.
    """

    def __init__(self, *, lines: int, window_s: float, max_callers: int) -> None:
        self.lines = lines
        self.window_s = window_s
        self.max_callers = max_callers
        # In the order of their ends, because all are of one length.
        self._windows: dict[str, _Window[T]] = {}

    def take(self, caller: str, code: str, event: T, now_s: float) -> bool:
        """Whether an event is to be logged now; if not, it is counted. Call :meth:`due` before."""
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
        """Ends the windows that are over; yields what was left suppressed in them.

        The line about it is the first of that caller's next window, which begins at once.
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
        """When :meth:`due` has something to return; None: nothing was suppressed."""
        return next((window.until_s for window in self._windows.values() if window.codes), None)
