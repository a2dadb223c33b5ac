"""What the scheduler says to workers, and the values that messages, records and events share."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

SessionId = int
"""Number of one worker stream, given by the adapter; never reused within a scheduler process."""


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
class Candidate:
    """A worker process that asks for a place, as its Join message tells."""

    node_id: str
    incarnation: int
    host: Host
    device: Device
    worker_num: int
    worker_min: int
    backend: str
    local_index: int = -1
    data_address: str = ""
    spare: bool = False
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A candidate with its place in one generation."""

    rank: int
    local_rank: int
    local_world_size: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as a worker last saw it."""

    sequence: int
    name: str
    group: str
    dtype: str
    size_bytes: int
    done: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core must know of the scheduler's settings.

    ``worker_num`` 0 means: the first worker that joins this job says it.
    """

    worker_num: int
    worker_min: int
    spares: int
    topo_timeout_s: float
    node_timeout_s: float
    heartbeat_interval_s: float
    waiting_report_interval_s: float = 10.0
    stall_timeout_s: float = 60.0
    hang_timeout_s: float = 600.0
    ranks_per_unique_id: int = 128
    rank_table: RankTable | None = None


@dataclass(frozen=True, slots=True)
class RankTableEntry:
    """One line of a rank table: this device of this server has this rank."""

    rank: int
    server_id: str
    device_index: int


@dataclass(frozen=True, slots=True)
class RankTable:
    """Fixed ranks by host and device; entries in order of rank, ranks dense from 0."""

    entries: tuple[RankTableEntry, ...]


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
    """The group is formed or built: who is awaited."""

    present: int
    needed: int
    sentence: str


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """The first member to go since a group last stood, and not because of others.

    Attributes:
        sentence: who, where and how, as in the log.
        exit_code: with which its process was about to end; 0: not known.
    """

    node_id: str
    incarnation: int
    sentence: str
    exit_code: int = 0


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
    launch: int = 0
    first_loss: FirstLoss | None = None


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
    """The generation is over and too few members are left for a new one.

    ``save``: the receiver is the lowest-ranked that holds the training state, and should save it.
    """

    generation: int
    reason: str
    wait_s: float
    first_loss: FirstLoss | None = None
    save: bool = False


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
    first_loss: FirstLoss | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Connect to each of these workers, by node id and address, and answer who cannot be reached."""

    round: int
    targets: tuple[tuple[str, str], ...]


Message = (
    Welcome | Waiting | Assignment | UniqueIds | GroupBuilt | Suspended | Quiesce | Probe | Refused | Ended
)
