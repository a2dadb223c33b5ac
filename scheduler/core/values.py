"""What the scheduler's state machine reads and writes: values only.

Events come in, a :class:`Decision` goes out. Records are to be made durable *before* messages are sent;
they are apart so that the order cannot be got wrong (as in etcd raft's ``Ready``).
All times are seconds on one monotonic clock, all steps count from 0, all ranks from 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler.core.nouns import Candidate as Candidate
from scheduler.core.nouns import Collective as Collective
from scheduler.core.nouns import Device as Device
from scheduler.core.nouns import Host as Host
from scheduler.core.nouns import Member as Member
from scheduler.core.nouns import RankTable as RankTable
from scheduler.core.nouns import RankTableEntry as RankTableEntry
from scheduler.core.nouns import Settings as Settings

SessionId = int
"""Number of one worker stream, given by the adapter; never reused within a scheduler process."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker asks for a place, or takes up the place it held before its stream broke."""

    session: SessionId
    candidate: Candidate
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0


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
    """The deadline that the machine asked for has come."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The scheduler's own process was late by so much: stopped, frozen with its machine, held by the disk.

    It goes before whatever came meanwhile.
    """

    seconds: float


Event = (
    Joined
    | Heard
    | UniqueIdsPublished
    | BuiltReported
    | QuiescedReported
    | PeerSuspected
    | LeaveRequested
    | LeftCleanly
    | SessionLost
    | DrainRequested
    | Expel
    | Tick
    | StoodStill
)


# ---------------------------------------------------------------- messages to workers


class RefusalCode(enum.IntEnum):
    """Why a worker has no place; values are those of the wire."""

    SETTINGS_DIFFER = 1
    JOB_FULL = 2
    NODE_ID_TAKEN = 3
    NOT_IN_RANK_TABLE = 4
    SUPERSEDED = 5
    JOB_ENDED = 6
    TOPO_TIMEOUT = 7
    MALFORMED = 8
    NOT_PERMITTED = 9
    EXPELLED = 10


@dataclass(frozen=True, slots=True)
class Welcome:
    """First answer to an accepted Join."""

    heartbeat_interval_s: float
    node_timeout_s: float
    topo_timeout_s: float
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Formation is under way."""

    present: int
    needed: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """A generation's membership and the receiver's rank in it.

    ``rank`` -1 goes to a worker that leaves as planned: it finishes ``switch_after_step`` with the others
    (-1: stops at once), then says goodbye.
    """

    generation: int
    rank: int
    members: tuple[Member, ...]
    state_source_rank: int
    newcomer_ranks: tuple[int, ...]
    unique_id_count: int
    reason: str
    switch_after_step: int = -1
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UniqueIds:
    """The generation's unique ids (secret)."""

    generation: int
    unique_ids: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GroupBuilt:
    """Every member has built the communicator of this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Suspended:
    """The generation is over and too few members are left for a new one."""

    generation: int
    reason: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Quiesce:
    """A planned change is coming: begin no further step."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """No place for this worker. Final: the adapter closes the stream after it."""

    code: RefusalCode
    sentence: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over, or the answer to a goodbye. Final: the adapter closes the stream after it.

    ``leave``: only for the receiver, which leaves as asked and at once; the job may go on.
    """

    ok: bool
    reason: str
    leave: bool = False


Message = Welcome | Waiting | Assignment | UniqueIds | GroupBuilt | Suspended | Quiesce | Refused | Ended


# ---------------------------------------------------------------- durable records


@dataclass(frozen=True, slots=True)
class JobOpened:
    """The job's sizes, once known; again when the scheduler is restarted with another ``worker_min``."""

    job_id: str
    worker_num: int
    worker_min: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker process has a claim on a place (incarnations are durable, heartbeats are not)."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class LeavePlanned:
    """This worker is to leave at the next step boundary: it asked to, or an operator drains it."""

    node_id: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A worker process has lost its claim: finished, left, dead, superseded, expelled.

    Who has been a member never comes back under this incarnation.
    """

    node_id: str
    incarnation: int
    reason: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """The membership of a generation, in order of rank."""

    generation: int
    members: tuple[Member, ...]
    state_source_rank: int
    newcomer_ranks: tuple[int, ...]
    reason: str
    switch_after_step: int = -1


@dataclass(frozen=True, slots=True)
class GroupEstablished:
    """All members of the generation have built their communicator."""

    generation: int


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """Too few members are left; the job is suspended."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Nobody may join any more."""

    ok: bool
    reason: str


Record = (
    JobOpened
    | Admitted
    | LeavePlanned
    | Removed
    | GenerationFormed
    | GroupEstablished
    | GenerationEnded
    | JobEnded
)


# ---------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one event.

    The adapter makes ``records`` durable, then sends ``messages`` in order, then logs ``reason``
    if it is not empty. After ``Refused`` or ``Ended`` it closes that session's stream.
    """

    records: tuple[Record, ...] = ()
    messages: tuple[tuple[SessionId, Message], ...] = ()
    reason: str = ""


# ---------------------------------------------------------------- status


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as ``status`` shows it; ``rank`` and ``local_rank`` are -1 while there is none."""

    candidate: Candidate
    state: str
    rank: int
    local_rank: int
    silent_s: float
    step: int
    samples_per_s: float
    last_collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as ``status`` shows it. ``state``: forming, building, running, quiescing, suspended, ended."""

    job_id: str
    state: str
    generation: int
    worker_num: int
    worker_min: int
    workers: tuple[WorkerView, ...]
    missing: tuple[str, ...]
    reason: str
