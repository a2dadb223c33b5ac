"""Few lines about many events: whoever causes a flood of them must not flood a log. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

OTHERS = ""
"""The caller whose budget those share that are too many to be told apart."""


@dataclass(slots=True)
class _Window(Generic[T]):
    until_s: float
    told: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    last: T | None = None


@dataclass(frozen=True, slots=True)
class Untold(Generic[T]):
    """Events of one caller that were not told: how many by code, and the last of them."""

    caller: str
    codes: Counter[str]
    last: T


class Budget(Generic[T]):
    """How many events of each caller are told at once. A window begins with its first event.

    Args:
        lines: events of one caller that are told in a window.
        window_s: its length, in seconds.
        max_callers: so many are told apart at once; further ones share one budget.
    """

    def __init__(self, *, lines: int, window_s: float, max_callers: int) -> None:
        self.lines = lines
        self.window_s = window_s
        self.max_callers = max_callers
        # In the order of their ends, because all are of one length.
        self._windows: dict[str, _Window[T]] = {}

    def take(self, caller: str, code: str, event: T, now_s: float) -> bool:
        """Whether an event is to be told now; if not, it is counted. Call :meth:`due` before."""
        if caller not in self._windows and len(self._windows) >= self.max_callers:
            caller = OTHERS
        window = self._windows.setdefault(caller, _Window(now_s + self.window_s))
        if window.told < self.lines:
            window.told += 1
            return True
        window.codes[code] += 1
        window.last = event
        return False

    def due(self, now_s: float) -> Iterator[Untold[T]]:
        """Ends the windows that are over; yields what was left untold in them.

        What tells of it is the first line of that caller's next window, which begins at once.
        """
        while self._windows:
            caller, window = next(iter(self._windows.items()))
            if window.until_s > now_s:
                return
            del self._windows[caller]
            if window.last is not None:
                self._windows[caller] = _Window(now_s + self.window_s, told=1)
                yield Untold(caller, window.codes, window.last)

    def next_s(self) -> float | None:
        """When :meth:`due` has something to tell; None: nothing was left untold."""
        return next((window.until_s for window in self._windows.values() if window.codes), None)
