"""What the worker and the scheduler tell each other, as values.

All times are seconds, ranks count from 0, ``step`` is a number of steps finished, ``started_step`` a
number of steps begun.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

# ---------------------------------------------------------------- nouns


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. ``id`` tells hosts apart even where two share a name."""

    id: str
    name: str
    address: str
    topology: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a host; ``index`` is -1 while the worker has not chosen one."""

    kind: str = "cpu"
    index: int = -1
    pci_bus_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker with its place in one generation."""

    rank: int
    node_id: str
    incarnation: int
    host: Host
    device: Device
    local_rank: int
    local_world_size: int
    data_address: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as this worker last saw it: for hang reports."""

    sequence: int
    name: str
    group: str
    dtype: str
    size_bytes: int
    done: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Who this worker process is and what it asks for. ``worker_min`` 0: same as ``worker_num``."""

    job_id: str
    node_id: str
    incarnation: int
    worker_num: int
    worker_min: int
    host: Host
    device: Device
    backend: str
    local_index: int = -1
    data_address: str = ""
    spare: bool = False
    facts: tuple[tuple[str, str], ...] = ()


# ---------------------------------------------------------------- messages to the scheduler


@dataclass(frozen=True, slots=True)
class Join:
    """Asks for a place, or (``held_generation`` > 0) takes up again the place held before."""

    profile: Profile
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class PublishUniqueIds:
    """From rank 0 of a generation. Secret."""

    generation: int
    unique_ids: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Built:
    """The communicator of the generation stands on this worker."""

    generation: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """This worker lives, and how far it is."""

    generation: int
    step: int
    started_step: int
    samples_per_s: float
    recent: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class Quiesced:
    """This worker begins no step after ``last_started_step`` until told where to switch."""

    generation: int
    last_started_step: int


@dataclass(frozen=True, slots=True)
class SuspectPeer:
    """A collective failed on a peer: a hint."""

    generation: int
    rank: int
    detail: str


@dataclass(frozen=True, slots=True)
class RequestLeave:
    """This worker wants to leave at a step boundary."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Goodbye."""

    generation: int
    finished: bool
    reason: str


Outgoing = Join | PublishUniqueIds | Built | Heartbeat | Quiesced | SuspectPeer | RequestLeave | Leave


# ---------------------------------------------------------------- messages from the scheduler


class RefusalCode(enum.IntEnum):
    """Why a worker has no place; values are those of the wire."""

    UNSPECIFIED = 0
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
    """A generation's membership and this worker's rank in it.

    ``rank`` -1: this worker leaves as asked; it finishes ``switch_after_step`` with the others (-1: stops
    at once), then says goodbye.
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
    """The generation's unique ids. Secret."""

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
    """No place for this worker. Final."""

    code: RefusalCode
    sentence: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over, or the answer to a goodbye. Final."""

    ok: bool
    reason: str


Incoming = Welcome | Waiting | Assignment | UniqueIds | GroupBuilt | Suspended | Quiesce | Refused | Ended
