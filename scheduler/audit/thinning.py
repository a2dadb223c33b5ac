"""Few log lines about many failed handshakes: whoever floods the port must not flood the log. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.rendezvous.rate_limit import OTHERS, Budget, Untold
from muster.scheduler.audit.handshakes import Failure

INTERVAL_S = 10.0
MAX_HOSTS = 128


@dataclass(frozen=True, slots=True)
class Line:
    """What to log: one failure, or how many more there were."""

    reason: str
    peer: str
    text: str
    count: int = 1


class Thinner:
    """Lets the first failure of an address through at once, then one line with a count in each interval."""

    def __init__(self) -> None:
        self._budget = Budget[Failure](lines=1, window_s=INTERVAL_S, max_callers=MAX_HOSTS)
        self.next_s = self._budget.next_s

    def add(self, failure: Failure, now_s: float) -> Line | None:
        """Notes a failure; returns a line if it is to be told now. Call :meth:`due` before."""
        told = self._budget.take(failure.host, failure.reason, failure, now_s)
        return _single(failure) if told else None

    def due(self, now_s: float) -> Iterator[Line]:
        """Ends the intervals that are over; yields what was left untold in them."""
        return map(_summary, self._budget.due(now_s))

    def all(self) -> Iterator[Line]:
        """Ends all intervals: there will be no more failures."""
        return self.due(float("inf"))


def _single(failure: Failure) -> Line:
    return Line(failure.reason, failure.peer, failure.text)


def _summary(untold: Untold[Failure]) -> Line:
    total = sum(untold.codes.values())
    if total == 1:
        return _single(untold.last)
    who = "other addresses" if untold.caller == OTHERS else untold.caller
    codes = untold.codes.most_common()
    reasons = ", ".join(f"{count} {code}" for code, count in codes)
    text = f"TLS handshakes failed: {total} more from {who} within {INTERVAL_S:.0f} s ({reasons})."
    return Line(codes[0][0], who, text, total)
