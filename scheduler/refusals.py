"""An audit log that one caller cannot flood: of his refusals a few are written, and how many more there were.

:class:`Budget` decides and does no I/O; :class:`ThinnedAuditLog` writes.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.driver import Clock, Timer
from scheduler.logs import AuditLog

WINDOW_S = 60.0
LINES = 20
"""Refusals of one caller that are written in a window."""

MAX_CALLERS = 1024
"""So many are told apart at once; further ones share one budget."""

_WHO = ("certificate", "identity", "peer")

Facts = Mapping[str, object]


@dataclass(slots=True)
class _Window:
    until_s: float
    written: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    who: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Untold:
    """Refusals of one caller that were not written: how many by code, and who was refused last."""

    codes: Counter[str]
    who: Facts


class Budget:
    """How many refusals of each caller are written. A window begins with the first one."""

    def __init__(self) -> None:
        # In the order of their ends, because all are of one length.
        self._windows: dict[str, _Window] = {}

    def take(self, facts: Facts, now_s: float) -> bool:
        """Whether a refusal is to be written; if not, it is counted. Call :meth:`due` before."""
        caller = caller_of(facts)
        if caller not in self._windows and len(self._windows) >= MAX_CALLERS:
            caller = ""
        window = self._windows.setdefault(caller, _Window(now_s + WINDOW_S))
        if window.written < LINES:
            window.written += 1
            return True
        window.codes[str(facts.get("code", ""))] += 1
        window.who = {key: facts[key] for key in _WHO if key in facts} if caller else {}
        return False

    def due(self, now_s: float) -> Iterator[Untold]:
        """Ends the windows that are over; yields what was left untold in them."""
        while self._windows:
            caller, window = next(iter(self._windows.items()))
            if window.until_s > now_s:
                return
            del self._windows[caller]
            if window.codes:
                yield Untold(window.codes, window.who)

    def next_s(self) -> float | None:
        """When :meth:`due` has something to tell; None: nothing was left untold."""
        return next((window.until_s for window in self._windows.values() if window.codes), None)


def caller_of(facts: Facts) -> str:
    """Who was refused: a certificate wherever it comes from, or else an address with any port."""
    return str(facts.get("certificate") or str(facts.get("peer", "")).rpartition(":")[0])


class ThinnedAuditLog(AuditLog):
    """An audit log in which the refusals of each caller have a budget.

    Failed handshakes pass: whoever reports them has thinned them, and does so from another thread.

    Args:
        path: the file.
        clock: tells the time and calls back; the event loop, from whose thread refusals come.
        wall_clock: the time of day.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        wall_clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.timezone.utc),
    ) -> None:
        super().__init__(path, wall_clock)
        self._clock = clock
        self._budget = Budget()
        self._timer: Timer | None = None

    def write(self, event: str, facts: Facts) -> None:
        """Appends one event, unless it is a refusal beyond its caller's budget."""
        if event not in ("refused", "denied") or facts.get("call") == "handshake":
            super().write(event, facts)
            return
        now_s = self._clock.time()
        self._tell(now_s)
        if self._budget.take(facts, now_s):
            super().write(event, facts)
        elif self._timer is None:
            self._wait()

    def close(self) -> None:
        """Tells what is untold, and closes the file."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell(float("inf"))
        super().close()

    def _wait(self) -> None:
        due_s = self._budget.next_s()
        self._timer = None if due_s is None else self._clock.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._tell(self._clock.time())
        self._wait()

    def _tell(self, now_s: float) -> None:
        for untold in self._budget.due(now_s):
            codes = untold.codes.most_common()
            count, whose = untold.codes.total(), "of this caller" if untold.who else "of other callers"
            shares = ", ".join(f"{number} {code}" for code, number in codes)
            text = f"{count} more refusals {whose} within {WINDOW_S:g} s were not written ({shares})."
            super().write("refused", {"code": codes[0][0], "count": count, **untold.who, "text": text})
