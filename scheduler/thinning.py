"""Few lines about many failures: whoever floods the port must not flood the log. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.handshakes import Failure

INTERVAL_S = 10.0
MAX_HOSTS = 128


@dataclass(frozen=True, slots=True)
class Line:
    """What to log: one failure, or how many more there were."""

    reason: str
    peer: str
    text: str
    count: int = 1


@dataclass(slots=True)
class _Window:
    until_s: float
    counts: Counter[str] = field(default_factory=Counter)
    last: Failure | None = None


class Thinner:
    """Lets the first failure of an address through at once, then one line with a count in each interval."""

    def __init__(self) -> None:
        # In the order of their ends, because all are of one length.
        self._windows: dict[str, _Window] = {}

    def add(self, failure: Failure, now_s: float) -> Line | None:
        """Notes a failure; returns a line if it is to be told now."""
        host = failure.host
        if host not in self._windows and len(self._windows) >= MAX_HOSTS:
            host = ""  # all that are too many
            self._windows.setdefault(host, _Window(now_s + INTERVAL_S))
        window = self._windows.get(host)
        if window is None:
            self._windows[host] = _Window(now_s + INTERVAL_S)
            return _single(failure)
        window.counts[failure.reason] += 1
        window.last = failure
        return None

    def due(self, now_s: float) -> Iterator[Line]:
        """Ends the intervals that are over; yields what was left untold in them."""
        while self._windows:
            host, window = next(iter(self._windows.items()))
            if window.until_s > now_s:
                return
            del self._windows[host]
            if window.last is not None:
                self._windows[host] = _Window(now_s + INTERVAL_S)
                yield _summary(host, window.counts, window.last)

    def all(self) -> Iterator[Line]:
        """Ends all intervals: there will be no more failures."""
        windows, self._windows = self._windows, {}
        for host, window in windows.items():
            if window.last is not None:
                yield _summary(host, window.counts, window.last)

    def next_s(self) -> float | None:
        """When :meth:`due` has something to do."""
        return next((window.until_s for window in self._windows.values()), None)


def _single(failure: Failure) -> Line:
    return Line(failure.reason, failure.peer, failure.text)


def _summary(host: str, counts: Counter[str], last: Failure) -> Line:
    total = sum(counts.values())
    if total == 1:
        return _single(last)
    who = host or "other addresses"
    reasons = ", ".join(f"{count} {code}" for code, count in counts.most_common())
    text = f"TLS handshakes failed: {total} more from {who} within {INTERVAL_S:.0f} s ({reasons})."
    return Line(counts.most_common(1)[0][0], who, text, total)
