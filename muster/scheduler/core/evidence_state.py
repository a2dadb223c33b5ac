"""The state of requests for workers' stacks; :mod:`muster.scheduler.core.evidence` has the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.scheduler.core import events

GATHER_S = 10.0
"""How long workers have to answer, in seconds."""

INCIDENTS_APART_S = 60.0
"""The shortest time between two hangs for which evidence is gathered, in seconds."""


@dataclass(slots=True)
class Gathering:
    """One request for stacks, and the answers so far.

    Attributes:
        due: when the request times out.
        ticket: number of the operator's request; 0 for a hang.
        sentence: why the workers were asked.
        generation: the generation at the time.
        awaited: the node ids of those that have not answered.
        told: the answers, by node id.
        obstacles: why the other workers were not asked, by node id.
    """

    due: float
    ticket: int
    sentence: str
    generation: int
    awaited: set[str] = field(default_factory=set)
    told: dict[str, str] = field(default_factory=dict)
    obstacles: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Evidence:
    """All requests for stacks in progress; empty after a restart of the scheduler.

    Attributes:
        number: number of the newest request.
        givers: the streams of workers that answer such a request.
        open: the requests in progress, by number.
        gathered: evidence of the present hang has been requested already.
        not_before: the earliest time for evidence of another hang.
    """

    number: int = 0
    givers: set[events.SessionId] = field(default_factory=set)
    open: dict[int, Gathering] = field(default_factory=dict)
    gathered: bool = False
    not_before: float = 0.0

    def due(self) -> float | None:
        """When the first request times out; None if there are none."""
        return min((each.due for each in self.open.values()), default=None)

    def awaits(self, node_id: str) -> bool:
        """Whether this worker still has to answer for evidence of a hang."""
        return any(not each.ticket and node_id in each.awaited for each in self.open.values())
