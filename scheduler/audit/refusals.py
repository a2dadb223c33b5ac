"""An audit log that one caller cannot flood: a few of his refusals are written, and how many more came."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from pathlib import Path

from muster.rendezvous.rate_limit import OTHERS, Budget
from muster.scheduler.audit.logs import AuditLog
from muster.scheduler.jobs.driver import Clock, Timer

WINDOW_S = 60.0
LINES = 20
"""Refusals of one caller that are written in a window."""

MAX_CALLERS = 1024

_WHO = ("certificate", "identity", "peer")

Facts = Mapping[str, object]


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
        wall_clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        super().__init__(path, wall_clock)
        self._clock = clock
        self._budget = Budget[Facts](lines=LINES, window_s=WINDOW_S, max_callers=MAX_CALLERS)
        self._timer: Timer | None = None

    def write(self, event: str, facts: Facts) -> None:
        """Appends one event, unless it is a refusal beyond its caller's budget."""
        if event not in ("refused", "denied") or facts.get("call") == "handshake":
            super().write(event, facts)
            return
        now_s = self._clock.time()
        self._tell(now_s)
        if self._budget.take(caller_of(facts), str(facts.get("code", "")), facts, now_s):
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
            known = untold.caller != OTHERS
            who = {key: untold.last[key] for key in _WHO if known and key in untold.last}
            codes = untold.codes.most_common()
            count, whose = untold.codes.total(), "of this caller" if known else "of other callers"
            shares = ", ".join(f"{number} {code}" for code, number in codes)
            text = f"{count} more refusals {whose} within {WINDOW_S:g} s were not written ({shares})."
            super().write("refused", {"code": codes[0][0], "count": count, **who, "text": text})
