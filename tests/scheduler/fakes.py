"""Stand-ins for what the driver talks to: a clock that is moved by hand, a machine that follows a script."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from muster.scheduler.core import records
from muster.scheduler.core.events import Decision, Event, SessionId
from muster.scheduler.core.job import as_sent
from muster.scheduler.core.views import JobView, WorkerView
from muster.wire import messages


def candidate(node_id: str = "node-a", **changes: object) -> messages.Candidate:
    """A worker as its Join would describe it."""
    facts: dict[str, object] = {
        "node_id": node_id,
        "incarnation": 7,
        "host": messages.Host("host-id", "host", "10.0.0.1", "rack-1"),
        "device": messages.Device("cpu", 0),
        "worker_num": 2,
        "worker_min": 2,
        "backend": "tcp",
    }
    return messages.Candidate(**(facts | changes))  # type: ignore[arg-type]


def placed(rank: int, node_id: str) -> records.Placed:
    """A member of a generation, as recorded."""
    return records.Placed(rank, rank, 2, candidate(node_id))


def member(rank: int, node_id: str) -> messages.Member:
    """A member of a generation, as sent."""
    return as_sent(placed(rank, node_id))


@dataclass
class _Timer:
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, _Timer]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> _Timer:
        timer = _Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def armed(self) -> list[float]:
        """When the timers are due that were not cancelled."""
        return [when for when, _, timer in self._timers if not timer.cancelled]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.callback()


@dataclass
class FakeJob:
    """A machine that answers each event with what its script says, and remembers what it was asked."""

    script: Callable[[Event], Decision] = lambda event: Decision()
    due: float | None = None
    seen: list[tuple[float, Event]] = field(default_factory=list)
    postponed: list[Event] = field(default_factory=list)
    silent: tuple[SessionId, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    spent: tuple[tuple[str, float], ...] = ()

    def step(self, event: Event, now: float, *, more: bool = False) -> Decision:
        self.seen.append((now, event))
        self.postponed += [event] if more else []
        return self.script(event)

    def deadline(self) -> float | None:
        return self.due

    def overdue(self, now: float) -> Sequence[SessionId]:
        return self.silent

    def view(self, now: float) -> JobView:
        missing = ("2 workers",)
        return JobView("job", "forming", 0, 2, 2, self.workers, missing, "", time_by_cause=self.spent)

    def weigh_drain(self, node_ids: Collection[str], hosts: Collection[str]) -> str:
        return "It costs nothing."

    def events(self) -> Sequence[Event]:
        return [event for _, event in self.seen]
