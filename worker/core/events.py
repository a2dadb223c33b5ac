"""What drives the worker's membership machine, and what it answers: values only.

Events come in, a :class:`Decision` goes out. All times are seconds on one monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from worker.core.messages import Assignment, Incoming, Outgoing, RefusalCode


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of the worker, in seconds.

    Attributes:
        topo_timeout_s: how long a worker without a place goes on looking for the scheduler.
        reconnect_timeout_s: how long a change of members may wait for a scheduler that is away.
        verdict_margin_s: how long past the scheduler's node time-out a worker whose collective failed
            waits to be told that the membership changed.
        leave_timeout_s: how long a goodbye may take.
        report_interval_s: how often a line tells that the scheduler cannot be reached.
        retry_first_s, retry_last_s: shortest and longest pause between two attempts to connect.
        retry_share: the pause is this share of the time that the scheduler has been away.
    """

    topo_timeout_s: float = 1800.0
    reconnect_timeout_s: float = 120.0
    verdict_margin_s: float = 2.0
    leave_timeout_s: float = 5.0
    report_interval_s: float = 10.0
    retry_first_s: float = 0.005
    retry_last_s: float = 2.0
    retry_share: float = 0.1


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The worker begins to look for the scheduler."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The stream asked for by :class:`Connect` stands; nothing was sent on it yet."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream could not be opened, or ended without a final message."""

    stream: int
    detail: str


@dataclass(frozen=True, slots=True)
class StreamDenied:
    """TLS or identity failed; ``by_scheduler``: it said so itself, so that trying again is of no use."""

    stream: int
    sentence: str
    by_scheduler: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A message came on the stream."""

    stream: int
    message: Incoming


@dataclass(frozen=True, slots=True)
class UniqueIdsMinted:
    """Answer to :class:`MintUniqueIds`. Secret."""

    generation: int
    unique_ids: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class EntryRequested:
    """The training thread holds no communicator any more and wants the newest generation."""


@dataclass(frozen=True, slots=True)
class CommunicatorBuilt:
    """The training thread has built what :class:`Build` asked for."""

    generation: int


@dataclass(frozen=True, slots=True)
class CommunicatorFailed:
    """Building or a collective failed; ``rank`` is the world rank that seems to be at fault, or -1."""

    generation: int
    rank: int
    detail: str


@dataclass(frozen=True, slots=True)
class StepStarting:
    """The training thread has finished ``step`` steps and would begin the next."""

    step: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far and how fast the training is."""

    step: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """This worker should leave at the next step boundary."""

    reason: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The training thread is done, or gives up."""

    finished: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """After having lost its place, the process asks for one anew under a new incarnation."""

    incarnation: int
    data_address: str


@dataclass(frozen=True, slots=True)
class Tick:
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
    | StepStarting
    | Progress
    | LeaveRequested
    | Goodbye
    | Renewed
    | Tick
)


# ---------------------------------------------------------------- notices to the adapter and the session


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream to the scheduler under this number; any older one is dead."""

    stream: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for the person who watches this worker."""

    sentence: str


@dataclass(frozen=True, slots=True)
class MintUniqueIds:
    """This worker is rank 0 of the generation: mint its ids, answer UniqueIdsMinted."""

    generation: int
    count: int


@dataclass(frozen=True, slots=True)
class Build:
    """Answer to EntryRequested: build the communicator of this generation. The ids are secret."""

    assignment: Assignment
    unique_ids: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Running:
    """Every member stands: collectives may be called."""

    generation: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The generation is over. Not ``planned``: abort its communicators, whatever is going on in them."""

    generation: int
    reason: str
    lost: tuple[str, ...] = ()
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This worker leaves as asked: it has no place in the next generation and should say goodbye."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepGranted:
    """Answer to StepStarting: go on."""


@dataclass(frozen=True, slots=True)
class StepHeld:
    """Answer to StepStarting: ask again when the next notice comes."""


@dataclass(frozen=True, slots=True)
class GateChanged:
    """A held step may be asked for again."""


@dataclass(frozen=True, slots=True)
class ChangePending:
    """A planned change of members will happen after ``after_step`` steps (-1: not yet known)."""

    generation: int
    reason: str
    after_step: int


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """A collective of the generation failed, but the scheduler sees no change of members."""

    generation: int


class FailureKind(enum.Enum):
    """What ended this worker's membership."""

    REFUSED = "refused"
    SECURITY = "security"
    UNREACHABLE = "unreachable"
    FORMATION_TIMEOUT = "formation timeout"
    JOB_ENDED = "job ended"


@dataclass(frozen=True, slots=True)
class Failed:
    """The membership is over for good. ``ok``: because the whole job finished well."""

    kind: FailureKind
    sentence: str
    code: RefusalCode = RefusalCode.UNSPECIFIED
    ok: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """The goodbye is done. ``heard``: the scheduler has confirmed it."""

    heard: bool


Notice = (
    Connect
    | Disconnect
    | Tell
    | MintUniqueIds
    | Build
    | Running
    | Interrupt
    | Dismissed
    | StepGranted
    | StepHeld
    | GateChanged
    | ChangePending
    | NoVerdict
    | Failed
    | Left
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one event.

    The adapter carries out ``notices`` in order and sends ``messages`` in order on the open stream;
    ``reason`` is logged if it is not empty.
    """

    messages: tuple[Outgoing, ...] = ()
    notices: tuple[Notice, ...] = ()
    reason: str = ""
