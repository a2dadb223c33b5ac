"""The messages between workers and scheduler as values, and which versions of Muster may exchange them.

Each message of the protocol has one class. All times are in seconds, and ranks count from 0. ``step`` is the
number of steps finished, ``started_step`` the number of steps begun.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from muster.version import __version__

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Marks a decorator for type checkers; does nothing at run time."""
        return lambda cls: cls


ValueT = TypeVar("ValueT", bound="Value")


@dataclass_transform(frozen_default=True)
class Value:
    """Base of immutable values, without generated code: annotations are fields, class attributes defaults.

    A dataclass compiles its methods in every process, which takes about half a millisecond for each class.
    For the fifty kinds of messages and events, that would be a noticeable part of a worker's start.

    Fields are inherited in the order of dataclasses: those of the last base come first.

    Fields named in ``secret_fields`` are left out of the representation.
    """

    secret_fields: ClassVar[tuple[str, ...]] = ()
    _fields: ClassVar[tuple[str, ...]] = ()
    _names: ClassVar[frozenset[str]] = frozenset()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        """Collects the fields from the class's annotations."""
        kinds = [kind for kind in reversed(cls.__mro__) if issubclass(kind, Value)]
        owners = {
            name: kind
            for kind in kinds
            for name, annotation in kind.__annotations__.items()
            if "ClassVar" not in str(annotation)
        }
        cls._fields, cls._names = tuple(owners), frozenset(owners)
        cls._defaults = {name: kind.__dict__[name] for name, kind in owners.items() if name in kind.__dict__}
        cls.secret_fields = tuple(dict.fromkeys(name for kind in kinds for name in kind.secret_fields))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = self._fields
        if not args and kwargs.keys() == self._names:  # as decoders make them, many a second
            self.__dict__.update(kwargs)
            return
        values = {**self._defaults, **dict(zip(fields, args)), **kwargs}  # noqa: B905 - checked below
        if len(values) != len(fields) or len(args) > len(fields) or not values.keys() <= set(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}; it was given {list(values)}.")
        if kwargs and any(name in kwargs for name in fields[: len(args)]):
            raise TypeError(f"{type(self).__name__} was given a field twice.")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Values do not change."""
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed.")

    def __eq__(self, other: object) -> bool:
        """Returns whether both values have the same class and equal fields."""
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        """Returns a hash that is consistent with equality."""
        return hash((type(self), *(self.__dict__[name] for name in self._fields)))

    def __repr__(self) -> str:
        """Returns the value as source code, without its secret fields."""
        shown = (f"{n}={self.__dict__[n]!r}" for n in self._fields if n not in self.secret_fields)
        return f"{type(self).__name__}({', '.join(shown)})"

    def replaced(self: ValueT, **changes: Any) -> ValueT:
        """Returns a copy with some fields changed."""
        return type(self)(**{**self.__dict__, **changes})


# ---------------------------------------------------------------- nouns


class Host(Value):
    """One machine. ``id`` differs between machines even if they have the same name."""

    id: str
    name: str
    address: str
    topology: str = ""


class Device(Value):
    """One device of a host. ``index`` is -1 until the worker has chosen a device."""

    kind: str = "cpu"
    index: int = -1
    pci_bus_id: str = ""
    model: str = ""


class Member(Value):
    """One worker, with its rank in one generation."""

    rank: int
    node_id: str
    incarnation: int
    host: Host
    device: Device
    local_rank: int
    local_world_size: int
    data_address: str = ""


class Collective(Value):
    """The state of one collective on this worker, for hang reports."""

    sequence: int
    name: str
    group: str
    dtype: str
    size_bytes: int
    done: bool


class Candidate(Value):
    """A worker process that asks for a place, as the scheduler's journal keeps it.

    A worker sends ``worker_min`` 0 if it is the same as ``worker_num``.
    """

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


class Profile(Candidate):
    """A worker process in its Join: the candidate, its job, and the address where it answers probes.

    ``last_call_s`` is how long the first group waits for more members than ``worker_min``, in seconds; 0
    stands for MS_TOPO_TIMEOUT. ``gpu_uuid`` is the driver's uuid of its GPU; empty: not known. ``gpu_fault``
    says how that GPU has just failed its check, in which case the worker asks for no place; empty: it has not
    failed.
    """

    job_id: str = "default"
    probe_address: str = ""
    last_call_s: float = 0.0
    gpu_uuid: str = ""
    gpu_fault: str = ""

    def candidate(self) -> Candidate:
        """The part of the profile that the scheduler's journal keeps."""
        return Candidate(**{name: getattr(self, name) for name in Candidate._fields})


# ---------------------------------------------------------------- messages to the scheduler


class Join(Value):
    """Asks for a place, or (``held_generation`` > 0) resumes the one that this worker held before.

    ``takes_deltas``: an assignment may list only what has changed since the previous assignment on this
    stream. ``gives_stacks``: the worker answers :class:`StacksWanted`.
    """

    profile: Profile
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0
    held_world_size: int = 0
    takes_deltas: bool = False
    gives_stacks: bool = False


class PublishUniqueIds(Value):
    """The unique ids of a generation, sent by its rank 0. Secret."""

    secret_fields = ("unique_ids",)

    generation: int
    unique_ids: tuple[bytes, ...]


class Built(Value):
    """This worker has built the communicator of the generation."""

    generation: int


class SnapshotReport(Value):
    """The snapshots that a worker keeps in its own and its partners' memory, in one generation.

    Attributes:
        generation: the generation in which they were taken.
        agreed: the step of the newest snapshot that the scheduler has reported as complete everywhere; -1:
            none.
        taken: the step of the snapshot taken after that one; -1: none.
        complete: whether this worker's part of ``taken`` is whole here and at its partners.
        passed: the newest step at which a snapshot was due but not taken; -1: none.
        age_s: the age in seconds of the newest snapshot of which this worker's part is whole here and at its
            partners. This field and the following ones are for ``muster status`` only.
        size_bytes: the size in bytes of this worker's part of that snapshot.
        seconds: how long copying and sending that part took.
        partners: the ranks that keep a copy of it.
    """

    generation: int
    agreed: int = -1
    taken: int = -1
    complete: bool = False
    passed: int = -1
    age_s: float = 0.0
    size_bytes: int = 0
    seconds: float = 0.0
    partners: tuple[int, ...] = ()

    def holds(self, step: int) -> bool:
        """Whether this worker's part of the snapshot of ``step`` is whole here and at its partners."""
        return step >= 0 and (step == self.agreed or (self.complete and step == self.taken))

    @property
    def newest(self) -> int:
        """The step of the newest snapshot that is complete here and at its partners; -1: none."""
        return max(self.agreed, self.taken if self.complete else -1)


class CheckpointReport(Value):
    """The last checkpoint that a worker has written to disk: after how many steps, and how long ago."""

    step: int
    age_s: float
    size_bytes: int
    seconds: float


MAX_NUMBERS, MAX_NUMBER_NAME = 16, 40
"""How many numbers of its own a script may report, and how long their names may be, in characters."""


class StepTimes(Value):
    """The time that some of a worker's steps took, by cause.

    Attributes:
        steps: the number of these steps.
        seconds: two durations each for computing, for waiting for others and for waiting for data: the sum
            over all steps and the longest time in one step. The last value is the time for which data could
            not be sent to the rank with the slowest link.
        link: the rank with the slowest link, counted from 1; 0: not known.
    """

    steps: int
    seconds: tuple[float, ...]
    link: int = 0


def step_times_apart_s(members: int) -> float:
    """Returns the interval at which a member reports the time of its steps, in seconds.

    It is longer in a large group, so that reports stay a small part of the cost of heartbeats.
    """
    return min(10.0, max(1.0, members / 200))


class GpuReport(Value):
    """The driver's report on a worker's GPU. A value that the driver does not report is None.

    Attributes:
        state: well, suspect or ill.
        reasons: what is wrong with it, the worst first.
        busy_percent: the share of time in which a kernel ran.
        used_mb, total_mb: its used and total memory, in units of 10^6 bytes.
        clock_mhz: the clock rate of its multiprocessors.
        celsius: its temperature.
        uncorrected_errors: number of uncorrected ECC errors since the driver was loaded.
        nvlink_errors: number of replays and recoveries on all NVLink links since the driver was loaded.
        remapped_rows: number of remapped rows of its memory.
        xids: Xids of critical errors since this worker began to read them, the newest last.
    """

    state: str
    reasons: tuple[str, ...] = ()
    busy_percent: int | None = None
    used_mb: int | None = None
    total_mb: int | None = None
    clock_mhz: int | None = None
    celsius: int | None = None
    uncorrected_errors: int | None = None
    nvlink_errors: int | None = None
    remapped_rows: int | None = None
    xids: tuple[int, ...] = ()


class StepShares(Value):
    """The mean time of a worker's last steps, by cause, in seconds."""

    computed: float
    waited: float
    data: float


class Straggler(Value):
    """The rank that slows a job's other ranks down.

    Attributes:
        node_id, rank: the node id and the number of that rank.
        kind: computing, data, link or one-off. A one-off is a single long step, not a straggler.
        since_s: how long it has slowed others down, in seconds.
        excess_s: how much longer a step takes because of it, in seconds; for a one-off, only that one step.
        slowdown: the factor by which a step is longer because of it.
        peer_rank: the rank at the other end of a slow link; otherwise -1.
        sentence: the same facts in words, with a full stop.
    """

    node_id: str
    rank: int
    kind: str
    since_s: float
    excess_s: float
    slowdown: float
    peer_rank: int = -1
    sentence: str = ""


class DrainOrder(Value):
    """An operator's order of a drain.

    Attributes:
        job_id: the job.
        node_ids, hosts: the workers to drain.
        reason: why.
        at_s: when to drain them, in seconds since 1970; 0: now.
        cancel: whether to cancel planned drains: those of these workers or, without node ids and hosts, all.
        preview: whether only to report what the drain would cost.
    """

    job_id: str
    node_ids: tuple[str, ...]
    hosts: tuple[str, ...]
    reason: str
    at_s: float = 0.0
    cancel: bool = False
    preview: bool = False


class PlannedDrain(Value):
    """A drain that is planned for later.

    Attributes:
        number: the plan's number.
        at_s: when it happens, in seconds since 1970.
        node_ids, hosts: the workers that leave.
        reason: why.
    """

    number: int
    at_s: float
    node_ids: tuple[str, ...]
    hosts: tuple[str, ...]
    reason: str


class RefusedGpu(Value):
    """A GPU that has failed a check. No worker on it gets a place until an operator admits the GPU again.

    Attributes:
        gpu: its uuid; if that is not known, its host's name and its index.
        host_name, host_id, address: its host.
        node_id: the node id of the worker that used it.
        device_index: its index among the host's GPUs; -1: not known.
        reason: how it failed the check.
    """

    gpu: str
    host_name: str
    host_id: str
    address: str
    node_id: str
    device_index: int
    reason: str

    def names(self) -> frozenset[str]:
        """The names by which an operator may refer to it."""
        return frozenset((self.gpu, self.node_id, self.host_name, self.host_id, self.address)) - {""}


class JobCopies(Value):
    """The copies from which a job's state could be recovered: in its members' memory, and on disk.

    Attributes:
        snapshot_step: the step of the snapshot that all members keep; None: there is none yet.
        snapshot_age_s: the time since it was taken, in seconds.
        snapshot_bytes: the size of all its parts, in bytes.
        snapshot_seconds: how long copying and sending took the slowest rank, in seconds.
        checkpoint: the newest checkpoint that a worker has reported; None: there is none.
        checkpoint_rank: the rank that wrote it.
    """

    snapshot_step: int | None = None
    snapshot_age_s: float = 0.0
    snapshot_bytes: int = 0
    snapshot_seconds: float = 0.0
    checkpoint: CheckpointReport | None = None
    checkpoint_rank: int = -1


class Heartbeat(Value):
    """Says that this worker is alive, and reports its progress.

    ``generation`` is the newest generation that it knows. ``checkpoints_s`` is the total time in seconds for
    which its training has waited for checkpoints. ``numbers`` are the script's own numbers, by name.
    ``steps`` and ``epochs`` are the totals of the training (0: unknown); ``epoch`` counts from 1.
    """

    generation: int
    step: int
    started_step: int
    samples_per_s: float
    recent: tuple[Collective, ...] = ()
    entered_generation: int = 0
    loss: float | None = None
    pid: int = 0
    learning_rate: float | None = None
    snapshot: SnapshotReport | None = None
    checkpoint: CheckpointReport | None = None
    times: StepTimes | None = None
    gpu: GpuReport | None = None
    checkpoints_s: float = 0.0
    numbers: tuple[tuple[str, float], ...] = ()
    steps: int = 0
    epoch: int = 0
    epochs: int = 0


class Quiesced(Value):
    """Says that this worker begins no step after ``last_started_step`` until it is told where to switch."""

    generation: int
    last_started_step: int


class SuspectPeer(Value):
    """Says that a collective failed because of the peer ``rank`` (-1: unknown); a hint, not a verdict."""

    generation: int
    rank: int
    detail: str


class Late(Value):
    """Says for how many ``seconds`` this worker's training has waited for its peers."""

    generation: int
    seconds: float


class Probed(Value):
    """Answer to :class:`Probe`.

    Attributes:
        unreached: node id and reason of each worker that could not be reached.
        late: whether the training thread has waited for something for too long.
        waits: whether the training thread waits for other ranks.
        busy: what this worker does alone; empty: nothing.
        seconds: for how long it has probed, or has run since it was last paused.
    """

    round: int
    unreached: tuple[tuple[str, str], ...] = ()
    late: bool = False
    waits: bool = False
    busy: str = ""
    seconds: float = 0.0


class Stacks(Value):
    """Answer to :class:`StacksWanted`: this worker's stacks, in lines, without secrets."""

    request: int
    text: str


class RequestLeave(Value):
    """Says that this worker wants to leave at a step boundary."""

    generation: int
    reason: str


class Leave(Value):
    """Says that this worker leaves the job.

    ``consequence``: it ends because of what others did. ``exit_code`` is that of its process; 0: not known.
    ``gpu_fault`` says how its GPU has failed a check, if it leaves for that reason; otherwise empty.
    """

    generation: int
    finished: bool
    reason: str
    consequence: bool = False
    exit_code: int = 0
    gpu_fault: str = ""


WorkerMessage = (
    Join
    | PublishUniqueIds
    | Built
    | Heartbeat
    | Quiesced
    | SuspectPeer
    | Late
    | Probed
    | Stacks
    | RequestLeave
    | Leave
)


# ---------------------------------------------------------------- messages from the scheduler


class RefusalCode(enum.IntEnum):
    """The reason why a worker gets no place; the values are those of the wire."""

    UNSPECIFIED = 0  # a newer scheduler's code, which this version does not know
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
    GPU_FAILED = 11


class Welcome(Value):
    """The first answer to an accepted Join. ``version`` is the scheduler's Muster version; empty for 0.1."""

    heartbeat_interval_s: float
    node_timeout_s: float
    topo_timeout_s: float
    spare: bool = False
    waiting_interval_s: float = 0.0
    version: str = __version__


class Waiting(Value):
    """Says that the receiver has to wait; ``sentence`` says for which workers.

    There are three cases. The group is being formed or built. Or it is established, and ``finished_ranks``
    have finished while the receiver still waits for them. Or the scheduler is ``undecided``; it then repeats
    this message every second.
    """

    present: int
    needed: int
    sentence: str
    finished_ranks: tuple[int, ...] = ()
    undecided: bool = False


class FirstLoss(Value):
    """The first member that was lost since the last group was established, unless another's end caused it.

    ``sentence`` says which member it was, on which host, and how it ended. ``exit_code`` 0: not known.
    """

    node_id: str
    incarnation: int
    sentence: str
    exit_code: int = 0


class Assignment(Value):
    """A generation's membership and the receiver's rank in it.

    Rank -1: the receiver leaves as planned. It finishes step ``switch_after_step`` with the others (-1: it
    stops immediately) and then sends Leave.
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
    """Says that every member has built the communicator of this generation."""

    generation: int


class Suspended(Value):
    """Says that the generation is over, and that too few members are left for a new one.

    ``save``: the receiver has the lowest rank among those that hold the training state, and should save it.
    """

    generation: int
    reason: str
    wait_s: float
    first_loss: FirstLoss | None = None
    save: bool = False


class Quiesce(Value):
    """Asks to begin no further step, because a planned change is coming."""

    generation: int
    reason: str


class Probe(Value):
    """Asks to connect to these workers, given by node id and address, and to report who is unreachable."""

    round: int
    targets: tuple[tuple[str, str], ...]


class StacksWanted(Value):
    """Asks for the stacks of this worker's process, within a limit in bytes. Answered by :class:`Stacks`."""

    request: int
    limit_bytes: int


class SnapshotWord(Value):
    """Tells a worker which snapshot is complete, and from which step on the next one is taken.

    Attributes:
        generation: the generation.
        complete: the step of the newest snapshot of which each member's part is kept by the member and by its
            partners; -1: none.
        next: the step from which on the next snapshot is taken, as soon as one is due. Older incomplete
            snapshots are given up.
    """

    generation: int
    complete: int
    next: int


class Refused(Value):
    """Says that this worker gets no place. Final: the scheduler closes the stream after it."""

    code: RefusalCode
    sentence: str


class Ended(Value):
    """Says that the job is over, or answers a Leave. Final: the scheduler closes the stream after it.

    ``leave``: only the receiver is meant, which leaves as asked and immediately; the job may go on.
    """

    ok: bool
    reason: str
    leave: bool = False
    first_loss: FirstLoss | None = None


SchedulerMessage = (
    Welcome
    | Waiting
    | Assignment
    | UniqueIds
    | GroupBuilt
    | Suspended
    | Quiesce
    | Probe
    | StacksWanted
    | SnapshotWord
    | Refused
    | Ended
)


# ---------------------------------------------------------------- which versions may exchange them

# docs/upgrading.md explains these rules. A version is MAJOR.MINOR.PATCH, and its series is MAJOR.MINOR. All
# workers of one job must be of the same series. A scheduler serves workers of its own series and of the
# previous one, because messages and fields are only ever added.

VERSION_FACT = "muster"
"""The name of the fact with a worker's version of Muster."""

NCCL_VERSION_FACT = "nccl"
"""The name of the fact with NCCL's version, where NCCL runs in the worker's own process."""

NCCL_FACT = "nccl_traffic"
"""The name of the fact that says how NCCL's traffic between hosts is protected."""

SEALED, PLAIN = "sealed", "plain"
NCCL_WORDS = {SEALED: "sealed by Muster's plug-in (AES-128-GCM)", PLAIN: "plain"}
"""The values of that fact, in words for people."""

NCCL_NET = "MusterSealed"
"""The plug-in's network, by the name that NCCL knows."""

BEFORE_VERSIONS = "0.1"
"""The version series of a scheduler whose Welcome has no version."""

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:[.+a-z-].*)?", re.ASCII | re.DOTALL)


def series_of(version: str) -> tuple[int, int] | None:
    """Returns the major and the minor number; None if the text is not a version."""
    found = _VERSION.fullmatch(version)
    return (int(found[1]), int(found[2])) if found else None


def is_same_series(one: str, other: str) -> bool:
    """Whether two versions are equal or differ only in the patch number."""
    return one == other or (series_of(one) is not None and series_of(one) == series_of(other))


def is_later_series(one: str, other: str) -> bool:
    """Whether a version's series is later than another's; False for text that is no version."""
    first, second = series_of(one), series_of(other)
    return first is not None and second is not None and first > second


def version_obstacle(*, scheduler: str, worker: str) -> str:
    """Returns why these versions may not be used together, with a remedy; empty if they may.

    Args:
        scheduler: the scheduler's version; "" if its Welcome names none.
        worker: the worker's version.
    """
    theirs, own = series_of(scheduler or BEFORE_VERSIONS), series_of(worker)
    said = scheduler or f"{BEFORE_VERSIONS} or older"
    if theirs is None or own is None:
        return (
            f"The scheduler has Muster {said[:40]!a} and the worker {worker[:40]!a}: not both are versions."
        )
    if own > theirs:
        return (
            f"The scheduler has Muster {said}, and the worker {worker}, which is newer:"
            " upgrade the scheduler first, or install its version here."
        )
    if own != theirs and not (own[0] == theirs[0] and own[1] == theirs[1] - 1):
        return (
            f"The scheduler has Muster {said}, and the worker {worker}, which is too old: a scheduler"
            " serves workers of its own minor version and of the one before. Upgrade the worker."
        )
    return ""
