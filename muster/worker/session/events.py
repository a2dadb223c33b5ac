"""Events and notices: input and output of the worker's membership machine, as plain values.

Events come in, :class:`Effects` go out. All times are seconds on one monotonic clock.
"""

from __future__ import annotations

import enum

from muster.wire.messages import (
    Assignment,
    FirstLoss,
    RefusalCode,
    SchedulerMessage,
    SnapshotReport,
    SnapshotWord,
    Value,
    WorkerMessage,
)
from muster.wire.patience import RETRY_LAST_S


class Timing(Value):
    """Deadlines of the worker, in seconds.

    Attributes:
        topo_timeout_s: how long a worker without a place looks for the scheduler.
        reconnect_timeout_s: how long a change of members may wait for a scheduler that is away. A worker that
            has lost its place may look for another place for the same time.
        waits_without_limit: whether a member waits for the scheduler without limit, because one of several
            schedulers will lead again when etcd has a majority. ``reconnect_timeout_s`` then only limits the
            answers of a connected scheduler, and a worker that has lost its place looks for a scheduler for
            ``topo_timeout_s``.
        verdict_margin_s: how long after the scheduler's node time-out a worker waits for a change of members,
            if its collective failed without naming a peer. A worker that names a peer waits for
            ``reconnect_timeout_s``, because the scheduler then forms a generation in any case. A scheduler
            that was paused, or is behind with reading, may need longer for this than its node time-out.
        goodbye_timeout_s: how long Leave may take. It is long enough for a restart of the scheduler, because
            a worker that ends without Leave would count as lost.
        late_again_s: the pause between two reports to the scheduler that a collective is late.
        report_first_s, report_last_s: the first and the longest pause between two log lines saying that the
            scheduler cannot be reached; each pause is twice the previous one.
        retry_first_s, retry_last_s: shortest and longest pause between two attempts to connect.
        retry_share: the pause is this share of the time that the scheduler has been away.
    """

    topo_timeout_s: float = 1800.0
    reconnect_timeout_s: float = 120.0
    waits_without_limit: bool = False
    verdict_margin_s: float = 2.0
    goodbye_timeout_s: float = 15.0
    late_again_s: float = 10.0
    report_first_s: float = 3.0
    report_last_s: float = 300.0
    retry_first_s: float = 0.005
    retry_last_s: float = RETRY_LAST_S
    retry_share: float = 0.1


# ---------------------------------------------------------------- events


class Started(Value):
    """The worker begins to look for the scheduler."""


class StreamOpened(Value):
    """The stream requested by :class:`Connect` is established; nothing was sent on it yet."""

    stream: int


class StreamLost(Value):
    """The stream could not be opened, or ended without a final message."""

    stream: int
    detail: str


class StreamDenied(Value):
    """TLS or identity failed; ``by_scheduler``: the scheduler refused, so trying again is of no use."""

    stream: int
    sentence: str
    by_scheduler: bool = False


class Received(Value):
    """A message arrived on the stream."""

    stream: int
    message: SchedulerMessage


class UniqueIdsMinted(Value):
    """The answer to :class:`MintUniqueIds`. Secret."""

    secret_fields = ("unique_ids",)

    generation: int
    unique_ids: tuple[bytes, ...]


class EntryRequested(Value):
    """The training thread no longer holds a communicator and wants the newest generation."""


class CommunicatorBuilt(Value):
    """The training thread has built the communicator requested by :class:`Build`."""

    generation: int


class CommunicatorFailed(Value):
    """Building or a collective failed; ``rank`` is the world rank that seems to be at fault, or -1.

    ``timed_out``: nothing failed, but others did not come in time.
    """

    generation: int
    rank: int
    detail: str
    timed_out: bool = False


class CollectivesStuck(Value):
    """Says whether a collective has been in progress for too long. Sent while the scheduler is away."""

    stuck: bool


class PeersLate(Value):
    """The training thread has waited for its peers for too long."""

    seconds: float


class ProbesDone(Value):
    """The answer to :class:`ProbeWanted`; see :class:`~muster.wire.messages.Probed`."""

    round: int
    unreached: tuple[tuple[str, str], ...]
    late: bool
    waits: bool
    busy: str
    seconds: float = 0.0


class StacksTaken(Value):
    """The answer to :class:`TakeStacks`: this process's stacks as text."""

    request: int
    text: str


class StepStarting(Value):
    """The training thread has finished ``step`` steps and wants to begin the next one."""

    step: int


class ProgressReported(Value):
    """The training's progress: the number of steps, and the speed."""

    step: int
    samples_per_s: float
    loss: float | None = None
    learning_rate: float | None = None
    steps: int = 0


class SnapshotChanged(Value):
    """The snapshots that this worker keeps have changed; without ``age_s``, which follows from the time."""

    report: SnapshotReport


class CheckpointWritten(Value):
    """This worker has written a checkpoint to disk."""

    step: int
    size_bytes: int
    seconds: float


class LeaveWanted(Value):
    """This worker should leave at the next step boundary."""

    reason: str


class Goodbye(Value):
    """The training thread has finished or gives up; ``gpu_fault``: because its GPU has failed a check."""

    finished: bool
    reason: str
    consequence: bool = False
    exit_code: int = 0
    gpu_fault: str = ""


class Renewed(Value):
    """After losing its place, the process asks for another one under a new incarnation."""

    incarnation: int
    data_address: str


class GpuFailed(Value):
    """The GPU of this worker has failed its check before the join; ``fault`` says how."""

    fault: str


class DeadlineReached(Value):
    """The machine's deadline has been reached."""


Event = (
    Started
    | StreamOpened
    | StreamLost
    | StreamDenied
    | Received
    | UniqueIdsMinted
    | EntryRequested
    | CommunicatorBuilt
    | CommunicatorFailed
    | CollectivesStuck
    | PeersLate
    | ProbesDone
    | StacksTaken
    | StepStarting
    | ProgressReported
    | SnapshotChanged
    | CheckpointWritten
    | LeaveWanted
    | Goodbye
    | Renewed
    | GpuFailed
    | DeadlineReached
)


# ---------------------------------------------------------------- notices to the client and the session


class Connect(Value):
    """Open a stream to the scheduler with this number; older streams no longer count."""

    stream: int


class Disconnect(Value):
    """Close the stream with this number."""

    stream: int


class LogLine(Value):
    """Log this line.

    ``waits``: whether the line says what this worker waits for, rather than that it no longer has to wait.
    """

    sentence: str
    waits: bool = True


class MintUniqueIds(Value):
    """Create the generation's unique ids, because this worker is its rank 0; answer with UniqueIdsMinted."""

    generation: int
    count: int


class Build(Value):
    """The answer to EntryRequested: build the communicator of this generation. The ids are secret."""

    secret_fields = ("unique_ids",)

    assignment: Assignment
    unique_ids: tuple[bytes, ...]


class Running(Value):
    """All members have built the communicator: collectives may be called."""

    generation: int


class Over(Value):
    """The generation is over.

    Attributes:
        planned: whether the change was planned. If not, abort the generation's communicators, no matter what
            they are doing.
        save: whether the job cannot continue for now, and this worker should save the training state.
    """

    generation: int
    reason: str
    lost: tuple[str, ...] = ()
    planned: bool = False
    save: bool = False


class Dismissed(Value):
    """This worker leaves as asked: it has no place in the next generation, and should send Leave.

    Attributes:
        reason: the reason, as text.
        alone: nobody in the next generation holds the training state, so this worker should save it.
    """

    reason: str
    alone: bool = False


class StepGranted(Value):
    """The answer to StepStarting: begin the step."""


class StepHeld(Value):
    """The answer to StepStarting: ask again when the next notice comes."""


class GateChanged(Value):
    """The training thread may ask again for a step that was held."""


class ChangePending(Value):
    """A planned change of members comes after ``after_step`` steps (-1: not yet known)."""

    generation: int
    reason: str
    after_step: int


class ChangePutOff(Value):
    """The planned change of members is cancelled or postponed."""


class ProbeWanted(Value):
    """Try to reach these workers, by node id and address; answer with ProbesDone."""

    round: int
    targets: tuple[tuple[str, str], ...]


class TakeStacks(Value):
    """Take this process's stacks; answer with StacksTaken, within the limit in bytes."""

    request: int
    limit_bytes: int


class NoVerdict(Value):
    """A collective of the generation failed, but the scheduler sees no change of members.

    ``finished_rank`` is a rank that has finished while this worker still waited for it, as ``sentence`` says;
    -1 if there is none.
    """

    generation: int
    finished_rank: int = -1
    sentence: str = ""


class FailureKind(enum.Enum):
    """The kind of event that ended this worker's membership."""

    REFUSED = "refused"
    SECURITY = "security"
    UNREACHABLE = "unreachable"
    FORMATION_TIMEOUT = "formation timeout"
    JOB_ENDED = "job ended"
    LEAVE = "leave granted"  # The worker leaves as asked, but immediately, not at a step boundary.


class Failed(Value):
    """The membership is over for good. ``ok``: whether the reason is that the whole job finished well."""

    kind: FailureKind
    sentence: str
    code: RefusalCode = RefusalCode.UNSPECIFIED
    ok: bool = False


class LossKnown(Value):
    """The scheduler reports which member was lost first; comes before the notices of the consequences."""

    loss: FirstLoss


class SnapshotWordCame(Value):
    """The scheduler reports which snapshot counts, and which one is to be taken next."""

    word: SnapshotWord


class Left(Value):
    """The worker has left. ``heard``: whether the scheduler has confirmed it."""

    heard: bool


Notice = (
    Connect
    | Disconnect
    | LogLine
    | MintUniqueIds
    | Build
    | Running
    | Over
    | Dismissed
    | StepGranted
    | StepHeld
    | GateChanged
    | ChangePending
    | ChangePutOff
    | ProbeWanted
    | TakeStacks
    | NoVerdict
    | Failed
    | LossKnown
    | SnapshotWordCame
    | Left
)


class Effects(Value):
    """The result of one event.

    The client carries out ``notices`` in order, and then sends ``messages`` in order on the open stream. It
    logs ``reason`` if that is not empty.
    """

    messages: tuple[WorkerMessage, ...] = ()
    notices: tuple[Notice, ...] = ()
    reason: str = ""
