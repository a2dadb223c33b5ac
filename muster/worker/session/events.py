"""Events and notices: input and output of the worker's membership machine. Values only.

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
        topo_timeout_s: how long a worker without a place goes on looking for the scheduler.
        reconnect_timeout_s: how long a change of members may wait for a scheduler that is away, or a worker
            that has lost its place may look for one that gives it a new one.
        waits_without_limit: a member waits for a scheduler however long it is away: one of several leads
            again when etcd has a majority. ``reconnect_timeout_s`` then bounds only what one that is there
            owes, and a worker that has lost its place looks for ``topo_timeout_s``.
        verdict_margin_s: how long past the scheduler's node time-out a worker whose collective failed, it
            cannot say on which, waits to hear that the membership changed. One that names a peer waits
            for ``reconnect_timeout_s``: the scheduler then forms a generation in any case, which takes one
            that stood still, or is behind with reading, longer than its node time-out.
        goodbye_timeout_s: how long a goodbye may take; long enough for a scheduler to be started again, which
            would count a worker that ended without one as lost.
        late_again_s: the pause between two words to the scheduler that a collective is late.
        report_first_s, report_last_s: the first and the longest pause between two lines that say that the
            scheduler cannot be reached; each is twice the one before.
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
    """The stream asked for by :class:`Connect` stands; nothing was sent on it yet."""

    stream: int


class StreamLost(Value):
    """The stream could not be opened, or ended without a final message."""

    stream: int
    detail: str


class StreamDenied(Value):
    """TLS or identity failed; ``by_scheduler``: it said so itself, so that trying again is of no use."""

    stream: int
    sentence: str
    by_scheduler: bool = False


class Received(Value):
    """A message came on the stream."""

    stream: int
    message: SchedulerMessage


class UniqueIdsMinted(Value):
    """Answer to :class:`MintUniqueIds`. Secret."""

    secret_fields = ("unique_ids",)

    generation: int
    unique_ids: tuple[bytes, ...]


class EntryRequested(Value):
    """The training thread holds no communicator any more and wants the newest generation."""


class CommunicatorBuilt(Value):
    """The training thread has built what :class:`Build` asked for."""

    generation: int


class CommunicatorFailed(Value):
    """Building or a collective failed; ``rank`` is the world rank that seems to be at fault, or -1.

    ``timed_out``: nothing broke, others did not come in time.
    """

    generation: int
    rank: int
    detail: str
    timed_out: bool = False


class CollectivesStuck(Value):
    """Whether a collective has been under way for long. Sent while the scheduler is away."""

    stuck: bool


class PeersLate(Value):
    """The training thread has waited for its peers for too long."""

    seconds: float


class ProbesDone(Value):
    """Answer to :class:`ProbeWanted`; see :class:`~muster.wire.messages.Probed`."""

    round: int
    unreached: tuple[tuple[str, str], ...]
    late: bool
    waits: bool
    busy: str
    seconds: float = 0.0


class StacksTaken(Value):
    """Answer to :class:`TakeStacks`: where this process stands, in lines."""

    request: int
    text: str


class StepStarting(Value):
    """The training thread has finished ``step`` steps and would begin the next."""

    step: int


class ProgressReported(Value):
    """How far and how fast the training is."""

    step: int
    samples_per_s: float
    loss: float | None = None
    learning_rate: float | None = None


class SnapshotChanged(Value):
    """What this worker keeps of snapshots has changed; without ``age_s``, which follows from the time."""

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
    """The training thread is done, or gives up."""

    finished: bool
    reason: str
    consequence: bool = False
    exit_code: int = 0


class Renewed(Value):
    """After having lost its place, the process asks for another one, under a new incarnation."""

    incarnation: int
    data_address: str


class DeadlineReached(Value):
    """The deadline that the machine asked for has come."""


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
    | DeadlineReached
)


# ---------------------------------------------------------------- notices to the adapter and the session


class Connect(Value):
    """Open a stream to the scheduler under this number; any older one is dead."""

    stream: int


class Disconnect(Value):
    """Close the stream of this number."""

    stream: int


class LogLine(Value):
    """Log this line.

    ``waits``: it says for what this worker waits; otherwise, that it need not any more.
    """

    sentence: str
    waits: bool = True


class MintUniqueIds(Value):
    """This worker is rank 0 of the generation: mint its ids, answer UniqueIdsMinted."""

    generation: int
    count: int


class Build(Value):
    """Answer to EntryRequested: build the communicator of this generation. The ids are secret."""

    secret_fields = ("unique_ids",)

    assignment: Assignment
    unique_ids: tuple[bytes, ...]


class Running(Value):
    """All members have built the communicator: collectives may be called."""

    generation: int


class Over(Value):
    """The generation is over. Not ``planned``: abort its communicators, whatever is going on in them.

    ``save``: the job cannot go on for now, and this worker should save the training state.
    """

    generation: int
    reason: str
    lost: tuple[str, ...] = ()
    planned: bool = False
    save: bool = False


class Dismissed(Value):
    """This worker leaves as asked: it has no place in the next generation and should say goodbye.

    Attributes:
        reason: why, in words.
        alone: nobody in the next generation holds the training state: this worker should save it.
    """

    reason: str
    alone: bool = False


class StepGranted(Value):
    """Answer to StepStarting: go on."""


class StepHeld(Value):
    """Answer to StepStarting: ask again when the next notice comes."""


class GateChanged(Value):
    """A held step may be asked for again."""


class ChangePending(Value):
    """A planned change of members comes after ``after_step`` steps (-1: not yet known)."""

    generation: int
    reason: str
    after_step: int


class ChangePutOff(Value):
    """The planned change of members does not come, or not yet."""


class ProbeWanted(Value):
    """Try to reach these workers, by node id and address; answer ProbesDone."""

    round: int
    targets: tuple[tuple[str, str], ...]


class TakeStacks(Value):
    """Look where this process stands; answer StacksTaken, of at most so many bytes."""

    request: int
    limit_bytes: int


class NoVerdict(Value):
    """A collective of the generation failed, but the scheduler sees no change of members.

    ``finished_rank`` has finished while this worker still waited, as ``sentence`` says; -1: none has.
    """

    generation: int
    finished_rank: int = -1
    sentence: str = ""


class FailureKind(enum.Enum):
    """What ended this worker's membership."""

    REFUSED = "refused"
    SECURITY = "security"
    UNREACHABLE = "unreachable"
    FORMATION_TIMEOUT = "formation timeout"
    JOB_ENDED = "job ended"
    LEAVE = "leave granted"  # as asked, but at once: there is no step boundary to leave at


class Failed(Value):
    """The membership is over for good. ``ok``: because the whole job finished well."""

    kind: FailureKind
    sentence: str
    code: RefusalCode = RefusalCode.UNSPECIFIED
    ok: bool = False


class LossKnown(Value):
    """The scheduler says who was the first to go; comes before what follows from it."""

    loss: FirstLoss


class SnapshotWordCame(Value):
    """The scheduler says which snapshot counts, and which is to be taken next."""

    word: SnapshotWord


class Left(Value):
    """The goodbye is done. ``heard``: the scheduler has confirmed it."""

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
    """What follows from one event.

    The adapter carries out ``notices`` in order and sends ``messages`` in order on the open stream;
    ``reason`` is logged if it is not empty.
    """

    messages: tuple[WorkerMessage, ...] = ()
    notices: tuple[Notice, ...] = ()
    reason: str = ""
