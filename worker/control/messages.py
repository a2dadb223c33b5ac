"""What the worker and the scheduler tell each other, as values.

All times are seconds, ranks count from 0, ``step`` is a number of steps finished, ``started_step`` a
number of steps begun.
"""

from __future__ import annotations

import enum

from muster.rendezvous.value import Value

# ---------------------------------------------------------------- nouns


class Host(Value):
    """One machine. ``id`` tells hosts apart even where two share a name."""

    id: str
    name: str
    address: str
    topology: str = ""


class Device(Value):
    """One device of a host; ``index`` is -1 while the worker has not chosen one."""

    kind: str = "cpu"
    index: int = -1
    pci_bus_id: str = ""
    model: str = ""


class Member(Value):
    """One worker with its place in one generation."""

    rank: int
    node_id: str
    incarnation: int
    host: Host
    device: Device
    local_rank: int
    local_world_size: int
    data_address: str = ""


class Collective(Value):
    """One collective as this worker last saw it: for hang reports."""

    sequence: int
    name: str
    group: str
    dtype: str
    size_bytes: int
    done: bool


class Profile(Value):
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
    probe_address: str = ""
    spare: bool = False
    facts: tuple[tuple[str, str], ...] = ()


# ---------------------------------------------------------------- messages to the scheduler


class Join(Value):
    """Asks for a place, or (``held_generation`` > 0) takes up again the place held before."""

    profile: Profile
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0


class PublishUniqueIds(Value):
    """From rank 0 of a generation. Secret."""

    secret_fields = ("unique_ids",)

    generation: int
    unique_ids: tuple[bytes, ...]


class Built(Value):
    """The communicator of the generation stands on this worker."""

    generation: int


class Heartbeat(Value):
    """This worker lives, and how far it is. ``generation`` is the newest it knows of."""

    generation: int
    step: int
    started_step: int
    samples_per_s: float
    recent: tuple[Collective, ...] = ()
    entered_generation: int = 0


class Quiesced(Value):
    """This worker begins no step after ``last_started_step`` until told where to switch."""

    generation: int
    last_started_step: int


class SuspectPeer(Value):
    """A collective failed on a peer: a hint."""

    generation: int
    rank: int
    detail: str


class Late(Value):
    """This worker has waited for its peers for so long."""

    generation: int
    seconds: float


class Probed(Value):
    """Answer to :class:`Probe`.

    Attributes:
        unreached: node id and reason of each worker that could not be reached.
        late: what the training thread waits for is late.
        waits: the training thread waits for other ranks.
        busy: what this worker does alone; empty: nothing.
        seconds: for how long it has probed, or lived since it last stood still meanwhile.
    """

    round: int
    unreached: tuple[tuple[str, str], ...] = ()
    late: bool = False
    waits: bool = False
    busy: str = ""
    seconds: float = 0.0


class RequestLeave(Value):
    """This worker wants to leave at a step boundary."""

    generation: int
    reason: str


class Leave(Value):
    """Goodbye.

    ``consequence``: it ends because of what others did. ``exit_code``: of its process; 0: not known.
    """

    generation: int
    finished: bool
    reason: str
    consequence: bool = False
    exit_code: int = 0


Outgoing = (
    Join
    | PublishUniqueIds
    | Built
    | Heartbeat
    | Quiesced
    | SuspectPeer
    | Late
    | Probed
    | RequestLeave
    | Leave
)


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


class Welcome(Value):
    """First answer to an accepted Join."""

    heartbeat_interval_s: float
    node_timeout_s: float
    topo_timeout_s: float
    spare: bool = False


class Waiting(Value):
    """The group is formed or built: who is awaited."""

    present: int
    needed: int
    sentence: str


class FirstLoss(Value):
    """The first member to go since a group last stood, and not because of others.

    ``sentence`` says who, where and how; ``exit_code`` 0: not known.
    """

    node_id: str
    incarnation: int
    sentence: str
    exit_code: int = 0


class Assignment(Value):
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
    launch: int = 0
    first_loss: FirstLoss | None = None


class UniqueIds(Value):
    """The generation's unique ids. Secret."""

    secret_fields = ("unique_ids",)

    generation: int
    unique_ids: tuple[bytes, ...]


class GroupBuilt(Value):
    """Every member has built the communicator of this generation."""

    generation: int


class Suspended(Value):
    """The generation is over and too few members are left for a new one.

    ``save``: this worker is the lowest-ranked that holds the training state, and should save it.
    """

    generation: int
    reason: str
    wait_s: float
    first_loss: FirstLoss | None = None
    save: bool = False


class Quiesce(Value):
    """A planned change is coming: begin no further step."""

    generation: int
    reason: str


class Probe(Value):
    """Connect to each of these workers, by node id and address, and answer who cannot be reached."""

    round: int
    targets: tuple[tuple[str, str], ...]


class Refused(Value):
    """No place for this worker. Final."""

    code: RefusalCode
    sentence: str


class Ended(Value):
    """The job is over, or the answer to a goodbye. Final.

    ``leave``: only for this worker, which leaves as asked and at once; the job may go on.
    """

    ok: bool
    reason: str
    leave: bool = False
    first_loss: FirstLoss | None = None


Incoming = (
    Welcome | Waiting | Assignment | UniqueIds | GroupBuilt | Suspended | Quiesce | Probe | Refused | Ended
)
