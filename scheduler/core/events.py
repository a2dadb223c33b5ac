"""What goes into the scheduler's state machine, and the decision that comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.scheduler.core.messages import Candidate, Collective, Message, SessionId
from muster.scheduler.core.records import Record


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker asks for a place, or takes up the place it held before its stream broke."""

    session: SessionId
    candidate: Candidate
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0
    probe_address: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat. ``generation`` is the newest that it knows of; it may still be busy in an older one."""

    session: SessionId
    generation: int
    step: int
    started_step: int
    samples_per_s: float
    recent: tuple[Collective, ...] = ()
    entered_generation: int = 0


@dataclass(frozen=True, slots=True)
class UniqueIdsPublished:
    """Rank 0 of a generation hands in its unique ids (secret: never in a repr, record or log)."""

    session: SessionId
    generation: int
    unique_ids: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class BuiltReported:
    """The communicator of the generation stands on this worker."""

    session: SessionId
    generation: int


@dataclass(frozen=True, slots=True)
class QuiescedReported:
    """A worker stops at a step boundary for a planned change."""

    session: SessionId
    generation: int
    last_started_step: int


@dataclass(frozen=True, slots=True)
class PeerSuspected:
    """A worker saw a collective fail on a peer."""

    session: SessionId
    generation: int
    rank: int
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLate:
    """A worker has waited for its peers for so long."""

    session: SessionId
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Probed:
    """A worker has tried to reach others, in the round of this number.

    Attributes:
        unreached: node id and reason of each that it could not reach.
        late: what its training thread waits for is late.
        waits: its training thread waits for other ranks.
        busy: what it does alone; empty: nothing.
        seconds: for how long it has tried, or lived since it last stood still meanwhile.
    """

    session: SessionId
    round: int
    unreached: tuple[tuple[str, str], ...] = ()
    late: bool = False
    waits: bool = False
    busy: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """A worker wants to leave at a step boundary."""

    session: SessionId
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeftCleanly:
    """A worker says goodbye."""

    session: SessionId
    generation: int
    finished: bool
    reason: str
    consequence: bool = False
    """It ends because of what others did: members changed, say, or the job ended."""

    exit_code: int = 0
    """With which its process is about to end; 0: not known."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A worker's stream ended without a goodbye."""

    session: SessionId
    detail: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants this node out at a step boundary."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expel:
    """This worker must go at once (its certificate was revoked, say)."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the deadline that the machine asked for has come, or the driver's pulse."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The scheduler's own process was late by so much: stopped, frozen with its machine, held by the disk.

    It goes before whatever came meanwhile.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class FellBehind:
    """Workers would count as silent whose bytes have arrived, but are not read yet. It goes before a Tick."""

    sessions: tuple[SessionId, ...]


Event = (
    Joined
    | Heard
    | UniqueIdsPublished
    | BuiltReported
    | QuiescedReported
    | PeerSuspected
    | PeerLate
    | Probed
    | LeaveRequested
    | LeftCleanly
    | SessionLost
    | DrainRequested
    | Expel
    | Tick
    | StoodStill
    | FellBehind
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one event.

    The adapter makes ``records`` durable, then sends ``messages`` in order, then logs ``reason``
    if it is not empty. After ``Refused`` or ``Ended`` it closes that session's stream. Records and
    messages are apart so that the order cannot be got wrong (as in etcd raft's ``Ready``).
    """

    records: tuple[Record, ...] = ()
    messages: tuple[tuple[SessionId, Message], ...] = ()
    reason: str = ""
