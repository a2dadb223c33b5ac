"""Input and output of the scheduler's state machine: settings, events, decisions.

What a worker has sent goes in as the message itself, with the number of the stream that it came on.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.scheduler.core.records import Record
from muster.wire import messages
from muster.wire.messages import SchedulerMessage, Value
from muster.wire.rank_table import RankTable

SessionId = int
"""Number of one worker stream, given by the adapter; never reused within a scheduler process."""


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """Drain who makes steps ``slowdown`` times as long for ``seconds``, where a spare waits."""

    slowdown: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core must know of the scheduler's settings.

    ``worker_num`` 0 means: the first worker that joins this job says it. ``recovered_timeout_s`` is how long
    workers may take to find a scheduler that was just recovered; None: ``node_timeout_s``.
    ``breaking_pause_s`` is how long the scheduler may stand still before a worker leaves its stream for that;
    None: a third of ``node_timeout_s``.
    ``heartbeat_interval_s`` is the shortest: it grows where all members would be heard more than
    ``heartbeats_per_s`` times a second. ``drain_stragglers`` None: they stay.
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
    recovered_timeout_s: float | None = None
    breaking_pause_s: float | None = None
    ranks_per_unique_id: int = 128
    rank_table: RankTable | None = None
    heartbeats_per_s: float = 1000.0
    drain_stragglers: DrainPolicy | None = None


class OfSession(Value):
    """Base of the events that come on a worker's stream."""

    session: SessionId


class Joined(OfSession):
    """A worker asks for a place, or takes up the place it held before its stream broke."""

    candidate: messages.Candidate
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0
    probe_address: str = ""
    held_world_size: int = 0
    last_call_s: float = 0.0
    gives_stacks: bool = False


class Heard(messages.Heartbeat, OfSession):
    """A worker's heartbeat; it may still be busy in an older generation than the newest that it knows of."""


class UniqueIdsPublished(messages.PublishUniqueIds, OfSession):
    """Rank 0 of a generation hands in its unique ids."""


class BuiltReported(messages.Built, OfSession):
    """A worker has built its communicator."""


class QuiescedReported(messages.Quiesced, OfSession):
    """A worker stops at a step boundary for a planned change."""


class PeerSuspected(messages.SuspectPeer, OfSession):
    """A worker saw a collective fail on a peer."""


class PeerLate(messages.Late, OfSession):
    """A worker waits for its peers."""


class ProbeAnswered(messages.Probed, OfSession):
    """A worker has tried to reach others."""


class StacksTold(messages.Stacks, OfSession):
    """A worker says where its process stands."""


class LeaveRequested(messages.RequestLeave, OfSession):
    """A worker wants to leave at a step boundary."""


class LeftCleanly(messages.Leave, OfSession):
    """A worker says goodbye."""


class SessionLost(OfSession):
    """A worker's stream ended without a goodbye.

    ``may_return``: that says nothing of the worker, whose host's stream broke, say.
    """

    detail: str
    may_return: bool = False


class DrainRequested(Value):
    """An operator wants this node out at a step boundary."""

    node_id: str
    reason: str


class DrainAsked(Value):
    """An operator wants workers out at a step boundary, all by one change, now or at a time of day.

    Attributes:
        node_ids, hosts: whose; hosts by name, id or address.
        reason: why.
        unix_s: the time of day now, in seconds since 1970.
        at_s: when; in the past: now.
    """

    node_ids: tuple[str, ...]
    hosts: tuple[str, ...]
    reason: str
    unix_s: float
    at_s: float = 0.0


class DrainCalledOff(Value):
    """An operator undoes planned drains of these node ids and hosts; with neither, all."""

    node_ids: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class TimeOfDay(Value):
    """What the clock on the wall shows, in seconds since 1970."""

    unix_s: float


class StacksRequested(Value):
    """An operator asks where workers stand: one, or with no node id all.

    ``ticket``: a number from 1 by which the answer is known, a :class:`Bundle`.
    """

    ticket: int
    node_id: str = ""


class EndRequested(Value):
    """An operator wants the job to end."""

    reason: str


class Expel(Value):
    """This worker must go at once (its certificate was revoked, say)."""

    node_id: str
    reason: str


class ProcessEnded(Value):
    """The launcher of this incarnation has collected its process; ``detail`` says how it ended.

    Whose word it was the adapter has checked: the certificate allows this node.
    """

    node_id: str
    incarnation: int
    detail: str


class Tick(Value):
    """Time has passed: the deadline that the machine asked for has come, or the driver's pulse."""


class ProcessPaused(Value):
    """The scheduler's own process did not run for ``seconds``: stopped, or frozen.

    It goes before whatever came in that time.
    """

    seconds: float


class HeldUp(Value):
    """Nothing could be written for ``seconds``, so nothing was stepped; streams were served.

    It goes before whatever came in that time.
    """

    seconds: float


class ReceiveBacklog(Value):
    """The scheduler has unread bytes of workers that would count as silent. Comes before a Tick."""

    sessions: tuple[SessionId, ...]


Event = (
    Joined
    | Heard
    | UniqueIdsPublished
    | BuiltReported
    | QuiescedReported
    | PeerSuspected
    | PeerLate
    | ProbeAnswered
    | StacksTold
    | StacksRequested
    | LeaveRequested
    | LeftCleanly
    | SessionLost
    | DrainRequested
    | DrainAsked
    | DrainCalledOff
    | TimeOfDay
    | EndRequested
    | Expel
    | ProcessEnded
    | Tick
    | ProcessPaused
    | HeldUp
    | ReceiveBacklog
)


class RankEvidence(Value):
    """What is known of one worker when its job stands still.

    Attributes:
        candidate, rank: who it is.
        step, started_step: steps finished, and begun.
        recent: its last collectives, as its newest heartbeat has them.
        stacks: where its process stands, in its own words; empty: it was not asked, or nothing came.
        obstacle: why nothing came, in words; empty: it was not asked.
    """

    candidate: messages.Candidate
    rank: int
    step: int = 0
    started_step: int = 0
    recent: tuple[messages.Collective, ...] = ()
    stacks: str = ""
    obstacle: str = ""


class Bundle(Value):
    """What was gathered of a standstill, or for an operator.

    Attributes:
        ticket: of the operator's request; 0: it is evidence of a hang, to be kept.
        sentence: what was asked for, or why it was gathered.
        generation: in which.
        ranks: the workers, members first.
    """

    ticket: int
    sentence: str
    generation: int
    ranks: tuple[RankEvidence, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one event.

    The adapter makes ``records`` durable, then sends ``messages`` in order, then logs ``reason``
    if it is not empty. After ``Refused`` or ``Ended`` it closes that session's stream. Records and
    messages are apart so that the order cannot be got wrong (as in etcd raft's ``Ready``). ``bundles`` are
    kept beside the journal, or handed to who has asked; nothing depends on that.
    """

    records: tuple[Record, ...] = ()
    messages: tuple[tuple[SessionId, SchedulerMessage], ...] = ()
    reason: str = ""
    bundles: tuple[Bundle, ...] = ()
