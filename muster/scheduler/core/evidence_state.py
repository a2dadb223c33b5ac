"""What is gathered of workers' stacks; :mod:`muster.scheduler.core.evidence` decides when."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.scheduler.core import events

GATHER_S = 10.0
"""How long workers have to answer, in seconds."""

INCIDENTS_APART_S = 60.0
"""The shortest time from one hang that is gathered of to the next, in seconds."""


@dataclass(slots=True)
class Gathering:
    """Workers that were asked for their stacks.

    Attributes:
        due: when no answer is waited for any more.
        ticket: of the operator's request; 0: of a hang.
        sentence: why they were asked.
        generation: in which.
        awaited: the node ids of those that have not answered.
        told: the answers, by node id.
        obstacles: why others were not asked.
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
    """The requests for stacks that are under way; begins empty when the scheduler restarts.

    Attributes:
        number: the newest request's.
        givers: the streams of workers that answer such a request.
        open: the requests under way, by number.
        gathered: of the standstill that there is, evidence is gathered already.
        not_before: when evidence of another may be.
    """

    number: int = 0
    givers: set[events.SessionId] = field(default_factory=set)
    open: dict[int, Gathering] = field(default_factory=dict)
    gathered: bool = False
    not_before: float = 0.0

    def due(self) -> float | None:
        """When the first request is over; None: none is under way."""
        return min((each.due for each in self.open.values()), default=None)

    def awaits(self, node_id: str) -> bool:
        """Whether a hang's evidence is still to come from this worker."""
        return any(not each.ticket and node_id in each.awaited for each in self.open.values())
