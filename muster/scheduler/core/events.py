"""Input and output of the scheduler's state machine: settings, events, decisions.

What a worker sends is passed in as the message itself, with the number of its stream.
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
    """Drain a rank that makes steps ``slowdown`` times as long for ``seconds``, if a spare is waiting."""

    slowdown: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The settings of the scheduler that the core needs.

    ``worker_num`` 0 means that the first worker to join determines it. ``recovered_timeout_s`` is how long
    workers may take to reconnect to a scheduler that was just recovered; None means ``node_timeout_s``.
    ``breaking_pause_s`` is how long the scheduler's process may be paused before a worker gives up its
    stream; None means a third of ``node_timeout_s``. ``heartbeat_interval_s`` is the shortest interval: it
    grows so that all members together send at most ``heartbeats_per_s`` heartbeats a second. With
    ``drain_stragglers`` None, stragglers are not drained.
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
    """A worker asks for a place, or for the place that it held before its stream broke."""

    candidate: messages.Candidate
    held_generation: int = 0
    held_rank: int = -1
    built: bool = False
    step: int = 0
    probe_address: str = ""
    held_world_size: int = 0
    last_call_s: float = 0.0
    gives_stacks: bool = False
    gpu_uuid: str = ""
    gpu_fault: str = ""


class Heard(messages.Heartbeat, OfSession):
    """A worker's heartbeat. The worker may still be busy in an older generation than its newest one."""


class UniqueIdsPublished(messages.PublishUniqueIds, OfSession):
    """Rank 0 of a generation has sent its unique ids."""


class BuiltReported(messages.Built, OfSession):
    """A worker has built its communicator."""


class QuiescedReported(messages.Quiesced, OfSession):
    """A worker has stopped at a step boundary for a planned change."""


class PeerSuspected(messages.SuspectPeer, OfSession):
    """A worker saw a collective fail, and suspects a peer."""


class PeerLate(messages.Late, OfSession):
    """A worker is waiting for its peers longer than usual."""


class ProbeAnswered(messages.Probed, OfSession):
    """A worker has tried to reach others."""


class StacksTold(messages.Stacks, OfSession):
    """A worker has sent the stacks of its process."""


class LeaveRequested(messages.RequestLeave, OfSession):
    """A worker wants to leave at a step boundary."""


class LeftCleanly(messages.Leave, OfSession):
    """A worker has sent Leave, and ends its stream."""


class SessionLost(OfSession):
    """A worker's stream ended without Leave.

    ``may_return``: the end of the stream says nothing about the worker itself, for example because the stream
    of its whole host broke.
    """

    detail: str
    may_return: bool = False


class DrainRequested(Value):
    """An operator drains this node at the next step boundary."""

    node_id: str
    reason: str


class DrainAsked(Value):
    """An operator drains workers at a step boundary, all in one change, now or at a time of day.

    Attributes:
        node_ids, hosts: the workers to drain; hosts by name, id or address.
        reason: the operator's reason.
        unix_s: the time of day now, in seconds since 1970.
        at_s: when to drain; a time in the past means now.
    """

    node_ids: tuple[str, ...]
    hosts: tuple[str, ...]
    reason: str
    unix_s: float
    at_s: float = 0.0


class DrainCalledOff(Value):
    """An operator cancels planned drains of these node ids and hosts; with neither, all planned drains."""

    node_ids: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class AdmitAsked(Value):
    """An operator lets refused GPUs in again: those of a host or node, or one by name."""

    name: str


class TimeOfDay(Value):
    """The wall-clock time, in seconds since 1970."""

    unix_s: float


class StacksRequested(Value):
    """An operator asks for the stacks of one worker, or with an empty node id of all workers.

    ``ticket``: a number from 1, which the answer (a :class:`Bundle`) repeats.
    """

    ticket: int
    node_id: str = ""


class EndRequested(Value):
    """An operator ends the job."""

    reason: str


class Expel(Value):
    """This worker must go at once, for example because its certificate was revoked."""

    node_id: str
    reason: str


class ProcessEnded(Value):
    """The launcher of this incarnation has reaped its process; ``detail`` says how it ended.

    The adapter has checked that the sender's certificate allows reports about this node.
    """

    node_id: str
    incarnation: int
    detail: str


class Tick(Value):
    """Time has passed: the machine's deadline has been reached, or the driver's periodic tick."""


class ProcessPaused(Value):
    """The scheduler's own process did not run for ``seconds``: it was stopped or frozen.

    Passed in before any event that arrived in that time.
    """

    seconds: float


class HeldUp(Value):
    """The journal could not be written for ``seconds``: no event was stepped, but streams were served.

    Passed in before any event that arrived in that time.
    """

    seconds: float


class ReceiveBacklog(Value):
    """The scheduler has not yet read bytes from workers that would count as silent.

    Passed in before a Tick.
    """

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
    | AdmitAsked
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
    """The facts about one worker when its job makes no progress.

    Attributes:
        candidate, rank: the worker and its rank.
        step, started_step: steps finished and steps begun.
        recent: its last collectives, according to its newest heartbeat.
        stacks: the stacks of its process; empty if it was not asked or did not answer.
        obstacle: why it did not answer, as a sentence; empty if it was not asked.
    """

    candidate: messages.Candidate
    rank: int
    step: int = 0
    started_step: int = 0
    recent: tuple[messages.Collective, ...] = ()
    stacks: str = ""
    obstacle: str = ""


class Bundle(Value):
    """Evidence that was gathered for a hang, or for an operator's request.

    Attributes:
        ticket: number of the operator's request; 0 for evidence of a hang, which is to be kept.
        sentence: what was asked for, or why the evidence was gathered.
        generation: the generation it is about.
        ranks: the workers, members first.
    """

    ticket: int
    sentence: str
    generation: int
    ranks: tuple[RankEvidence, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of one event.

    The adapter makes ``records`` durable, then sends ``messages`` in order, then logs ``reason`` if it is not
    empty. After ``Refused`` or ``Ended`` it closes that session's stream. Records and messages are separate
    fields so that the order cannot be confused (as in etcd raft's ``Ready``). ``bundles`` are kept next to
    the journal, or returned to the operator who asked; nothing depends on them.
    """

    records: tuple[Record, ...] = ()
    messages: tuple[tuple[SessionId, SchedulerMessage], ...] = ()
    reason: str = ""
    bundles: tuple[Bundle, ...] = ()
