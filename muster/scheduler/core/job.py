"""A job: its ledger, its members as last heard, its deadlines, its probes and its outbox.

This module has what all functions on a job need. :mod:`muster.scheduler.core.machine` handles events, and
:mod:`muster.scheduler.core.probing` finds members that cannot be reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from muster.scheduler.core import events, records
from muster.scheduler.core.evidence_state import Evidence
from muster.scheduler.core.goodput import Goodput
from muster.scheduler.core.ledger import (
    Claim,
    Ledger,
    Phase,
    count,
    missing,
    named_first,
    sizes,
    upper_first,
    who,
)
from muster.scheduler.core.members import Members, Patience
from muster.scheduler.core.probing_state import Probing
from muster.scheduler.core.records import Record
from muster.scheduler.core.snapshots import SnapshotAgreement
from muster.scheduler.core.stragglers import Seat, StragglerWatch
from muster.wire import messages
from muster.wire.messages import SchedulerMessage


@dataclass(slots=True)
class Outbox:
    """The result of one event: records, messages, remarks.

    Attributes:
        records: what must be durable before any message is sent.
        messages: messages with their streams, in order.
        remarks: sentences on what happened.
        bundles: gathered stacks of workers.
    """

    records: list[Record] = field(default_factory=list)
    messages: list[tuple[events.SessionId, SchedulerMessage]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    bundles: list[events.Bundle] = field(default_factory=list)

    def send(self, session: events.SessionId, message: SchedulerMessage) -> None:
        """Adds a message for a stream."""
        self.messages.append((session, message))

    def mention(self, sentence: str) -> None:
        """Adds a sentence to the log without changing the reason that ``status`` shows."""
        self.remarks.append(sentence)

    def decision(self) -> events.Decision:
        """Returns the records, messages, remarks and bundles as a decision."""
        return events.Decision(
            tuple(self.records), tuple(self.messages), " ".join(self.remarks), tuple(self.bundles)
        )


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A report that collectives failed on a peer.

    Unless that peer is lost by ``due``, the group is built again.
    """

    due: float
    sentence: str


@dataclass(slots=True)
class Deadlines:
    """Start times and due times of a job's phases. All start again when the scheduler restarts.

    Attributes:
        phase_since: when the phase began.
        formed_at: when the newest generation was formed, or ended.
        progress_since: when training last made progress.
        stalled: a stall has been reported.
        stall_report: when that stall is reported again.
        report: when the missing workers are reported again.
        spares_fill_in: when spares may take the places of missing ordinary workers; 0 if there are still too
            few workers for that.
        last_call_s: how long the first group waits for more members than it needs, in seconds. 0: as long as
            it waits for the needed members.
        last_call: when that wait ends; 0 while needed members are missing.
        hand_over: when a leaving member stops waiting for another member to take the state.
        holders_return: when a suspended job stops waiting for members that held the state; 0 while too few
            workers are in.
        suspicion: when a group whose collectives failed is built again.
        forgiving_until: a stream that ends before this time may have broken while the scheduler was paused.
        late_s, late_at: by how much the driver's turns were late recently, and when that was measured.
    """

    phase_since: float = 0.0
    formed_at: float = 0.0
    progress_since: float = 0.0
    stalled: bool = False
    stall_report: float = 0.0
    report: float = 0.0
    spares_fill_in: float = 0.0
    last_call_s: float = 0.0
    last_call: float = 0.0
    hand_over: float | None = None
    holders_return: float = 0.0
    suspicion: Suspicion | None = None
    forgiving_until: float = 0.0
    late_s: float = 0.0
    late_at: float = 0.0

    def begin_generation(self, now: float) -> None:
        """Clears the deadlines of the previous generation."""
        self.suspicion, self.hand_over, self.stalled = None, None, False
        self.formed_at = self.progress_since = now

    def excuse(self, seconds: float) -> None:
        """Extends all waits by a time during which the scheduler itself did not run."""
        self.phase_since += seconds
        self.formed_at += seconds
        self.progress_since += seconds
        if self.spares_fill_in:
            self.spares_fill_in += seconds
        if self.last_call:
            self.last_call += seconds
        if self.suspicion is not None:
            self.suspicion = replace(self.suspicion, due=self.suspicion.due + seconds)


@dataclass(slots=True)
class GenerationState:
    """The part of the newest generation's state that is not durable.

    Attributes:
        unique_ids: the unique ids from its rank 0, until the group is established. Secret.
        built: node ids of the members that have built its group.
        sent: its members in the form in which they are sent; one tuple for all receivers, so that they share
            its bytes.
        change: the reason for forming it, without remarks.
        plan: why its members will change at a step boundary; None if no change is planned.
        broken: why the step before a planned switch to it cannot be finished.
        puzzled: node ids of members whose collective failed without naming a peer.
    """

    unique_ids: tuple[bytes, ...] = field(default=(), repr=False)
    built: set[str] = field(default_factory=set)
    sent: tuple[messages.Member, ...] = ()
    change: str = ""
    plan: str | None = None
    broken: str | None = None
    puzzled: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Admissions:
    """A job's memory of Joins: those held back, the newly admitted workers, and the warnings given.

    Attributes:
        held_back: Joins that wait until it is clear which workers come back after a restart.
        tried: the state (of records, and of arrivals and departures) at which they were last retried.
        arrived: the workers that have just been admitted.
        remarked: the warnings already given.
        machines: the machine first seen under each host name.
        labels: the topology label first seen for each host.
    """

    held_back: dict[events.SessionId, events.Joined] = field(default_factory=dict)
    tried: tuple[int, int] = (0, 0)
    arrived: str | None = None
    remarked: set[str] = field(default_factory=set)
    machines: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """One training job, from the first Join to its end.

    Attributes:
        ledger: what survives a crash; changed by :meth:`commit` and, in recovery, :meth:`apply` alone.
        members: all workers as last heard.
        deadlines: start times and due times of its phases.
        outbox: the results of the event being handled.
        current: the newest generation.
        probing: rounds of probes, and which workers reach which others.
        evidence: requests for stacks in progress.
        snapshots: the agreement on which snapshot in the members' memory counts.
        stragglers: finds ranks that hold up the others.
        told_gpus: workers whose GPU's fault has been logged, with the state that was logged and when.
        told_stragglers: the stragglers that have been reported, with the kind of each.
        records: how many records have been applied.
        trained: ranks in the last established generation, by node id.
        now: the time of the event being handled.
        needs_advance: the event may change the phase; conclusions are drawn after it.
        phase_seen: the phase whose beginning was noted.
        reason: the reason for the job's state, for ``status``.
        first_loss: the first member that was lost since a group was last established.
        unix_offset_s: the time of day minus the time of events; None if not known.
        goodput: its time by cause.
        last_change_s: seconds from the forming of the last generation until it was established, not counting
            the first generation; None if not known.
    """

    job_id: str
    settings: events.CoreSettings
    ledger: Ledger = field(default_factory=Ledger)
    members: Members = field(default_factory=Members)
    deadlines: Deadlines = field(default_factory=Deadlines)
    outbox: Outbox = field(default_factory=Outbox)
    current: GenerationState = field(default_factory=GenerationState)
    admissions: Admissions = field(default_factory=Admissions)
    probing: Probing = field(default_factory=Probing)
    evidence: Evidence = field(default_factory=Evidence)
    snapshots: SnapshotAgreement = field(default_factory=SnapshotAgreement)
    stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    told_gpus: dict[str, tuple[str, float]] = field(default_factory=dict)
    told_stragglers: dict[str, str] = field(default_factory=dict)
    records: int = 0
    trained: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    needs_advance: bool = False
    phase_seen: Phase = Phase.FORMING
    reason: str = ""
    first_loss: messages.FirstLoss | None = None
    unix_offset_s: float | None = None
    last_change_s: float | None = None
    goodput: Goodput = field(default_factory=Goodput)

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> Phase:
        """The job's phase."""
        durable = self.ledger.phase
        return Phase.QUIESCING if durable is Phase.RUNNING and self.current.plan is not None else durable

    @property
    def needed(self) -> int:
        """The number of workers to wait for; 0: not known yet."""
        opened = self.ledger.opened
        return opened.worker_num if opened is not None else self.settings.worker_num

    @property
    def heartbeat_interval_s(self) -> float:
        """A member's heartbeat interval: a full job sends at most ``heartbeats_per_s`` in total."""
        settings = self.settings
        shared_s = min(self.needed / settings.heartbeats_per_s, settings.node_timeout_s / 5)
        return max(settings.heartbeat_interval_s, shared_s)

    @property
    def waiting_interval_s(self) -> float:
        """The time between heartbeats of a worker without a place."""
        return max(self.heartbeat_interval_s, self.settings.node_timeout_s / 3)

    @property
    def patience(self) -> Patience:
        """The time for which workers may be silent: ``node_timeout_s``, and the interval of heartbeats."""
        least, node_timeout_s = self.settings.heartbeat_interval_s, self.settings.node_timeout_s
        return Patience(
            node_timeout_s + 1.5 * (self.heartbeat_interval_s - least),
            node_timeout_s + 1.5 * (self.waiting_interval_s - least),
        )

    @property
    def unique_id_count(self) -> int:
        """Number of unique ids that the newest generation needs."""
        return -(-len(self.ledger.ranks) // self.settings.ranks_per_unique_id)

    @property
    def switches_by_steps(self) -> bool:
        """Whether members still train in the previous generation, until the step of the planned switch."""
        formed = self.ledger.formed
        return self.phase is Phase.BUILDING and formed is not None and formed.switch_after_step >= 0

    def present(self) -> list[messages.Candidate]:
        """The workers that would make up the next generation."""
        return self.ledger.choose(self.settings) if self.ledger.opened is not None else []

    def seated(self) -> list[messages.Candidate]:
        """The workers that have or will get a place.

        Before the first group is formed, spares are left out.
        """
        forming = self.phase is Phase.FORMING
        return [candidate for candidate in self.present() if not (forming and candidate.spare)]

    def missing(self) -> tuple[str, ...]:
        """Names the missing workers."""
        if self.phase is Phase.ENDED:
            return ()
        staying = sum(claim.leaving is None for claim in self.ledger.living_members())
        if staying >= self.needed and self.phase is not Phase.FORMING:
            return ()  # The choice below has the same result, and is too slow for each request of the status.
        return missing(self.seated(), self.needed, self.settings.rank_table)

    def size(self) -> str:
        """``4 members``."""
        return count(len(self.ledger.ranks), "member")

    def stateless(self) -> frozenset[str]:
        """Node ids of newcomers that are not known to have received the state."""
        return frozenset(self.members.stateless())

    def leaves_now(self, claim: Claim) -> bool:
        """Whether a worker leaves by the planned change in progress, and not by an earlier one."""
        node_id, stood = claim.candidate.node_id, self.ledger.stood
        return self.ledger.rank_of(node_id) < 0 < claim.since <= stood and node_id in self.trained

    def rank_of(self, node_id: str) -> int:
        """The rank of a living member of the newest generation; -1 for any other worker."""
        return self.ledger.rank_of(node_id)

    def name(self, node_id: str) -> str:
        """A worker's name for messages, with its rank if it has one."""
        return who(self.ledger.claims[node_id].candidate, self.ledger.rank_of(node_id))

    def sender(self, session: events.SessionId) -> Claim | None:
        """The claim of the worker on this stream, which counts as heard; None if the stream has none."""
        node_id = self.members.nodes.get(session)
        if node_id is None:
            return None
        self.members.has_spoken(node_id, self.now)
        return self.ledger.claims[node_id]

    def member_behind(self, session: events.SessionId, generation: int) -> str | None:
        """The sender's node id, if it is a member of the newest generation and its message is about that."""
        claim = self.sender(session)
        if claim is None or generation != self.ledger.generation or self.phase is Phase.ENDED:
            return None
        node_id = claim.candidate.node_id
        return node_id if self.ledger.rank_of(node_id) >= 0 else None

    # ------------------------------------------------------------ changes

    def apply(self, record: Record) -> None:
        """Applies a durable record. Durable state changes only here, in operation and in recovery."""
        self.ledger.apply(record)
        self.records += 1
        if isinstance(record, records.Snapshot):  # Of an established generation.
            for formed in record.formed:
                sent = tuple(map(as_sent, formed.members))
                self.current = GenerationState(sent=sent, change=formed.reason)
            self.trained = dict(self.ledger.ranks)
            self.stragglers = self._straggler_watch()
            self.snapshots = SnapshotAgreement(self.ledger.generation, self.ledger.ranks)
            self.members.enter_generation(
                self.ledger.ranks,
                (
                    node_id
                    for node_id, claim in self.ledger.claims.items()
                    if claim.newcomer and self.ledger.rank_of(node_id) >= 0
                ),
            )
        elif isinstance(record, records.Removed):
            self.members.forget(record.node_id)
            self.goodput.left(record.node_id)
            self.current.built.discard(record.node_id)
            self.current.puzzled.discard(record.node_id)
            self.told_gpus.pop(record.node_id, None)
        elif isinstance(record, records.GenerationFormed):
            sent = tuple(map(as_sent, record.members))
            self.current = GenerationState(sent=sent, change=record.reason)
            self.deadlines.begin_generation(self.now)
            self.goodput.generation_formed()
            self.probing.awaited = {}
            self.snapshots = SnapshotAgreement(record.generation, self.ledger.ranks)
            members = record.members
            self.members.enter_generation(
                self.ledger.ranks, (members[rank].candidate.node_id for rank in record.newcomer_ranks)
            )
        elif isinstance(record, records.GenerationEnded):
            self.current = GenerationState(sent=self.current.sent, change=self.current.change)
            self.stragglers = StragglerWatch()
            self.deadlines.begin_generation(self.now)
            self.probing.awaited = {}
        elif isinstance(record, records.GroupEstablished):
            if record.generation > 1 and self.now:
                self.last_change_s = self.now - self.deadlines.formed_at
            self.current.unique_ids = ()
            self.deadlines.suspicion, self.deadlines.stalled = None, False
            self.first_loss = None  # The others have gone on without it.
            self.evidence.gathered = False
            self.trained = dict(self.ledger.ranks)
            self.stragglers = self._straggler_watch()

    def _straggler_watch(self) -> StragglerWatch:
        """Returns a new watch over the step times of the newest generation's members."""
        claims = self.ledger.claims
        return StragglerWatch(
            {
                node_id: Seat(rank, claims[node_id].candidate.host.id)
                for node_id, rank in self.ledger.ranks.items()
                if node_id in claims
            }
        )

    def commit(self, record: Record) -> None:
        """Changes durable state: applies the record and adds it to the records to be journaled."""
        self.apply(record)
        self.outbox.records.append(record)

    # ------------------------------------------------------------ who comes and goes

    def admit(self, event: events.Joined) -> None:
        """Admits a new worker, and sends it what it has to know."""
        candidate = event.candidate
        if self.ledger.opened is None:
            self.commit(records.JobOpened(self.job_id, *sizes(self.settings, candidate)))
        self.commit(records.Admitted(candidate))
        contact = self.members.attach(candidate.node_id, event.session, self.now)
        contact.step = contact.baseline = event.step
        contact.gpu_uuid = event.gpu_uuid
        self.greet(candidate.node_id, event.session)
        self.say(f"{named_first(candidate)} has joined.")

    def take_back(self, event: events.Joined) -> None:
        """Accepts a worker that opens its stream again, and repeats what it may have missed.

        Of two streams, the one with the higher number is the worker's: a Join may arrive late on a stream
        that the worker has given up.
        """
        node_id = event.candidate.node_id
        other = self.members.session_of(node_id)
        if other is not None and other != event.session:
            sentence = f"{named_first(event.candidate)} has opened a newer stream."
            refused = messages.Refused(messages.RefusalCode.SUPERSEDED, sentence)
            self.outbox.send(min(other, event.session), refused)
            if event.session < other:
                return
        contact = self.members.attach(node_id, event.session, self.now)
        contact.step = max(contact.step, event.step)
        contact.gpu_uuid = event.gpu_uuid
        if event.built and event.held_generation == self.ledger.generation:
            self.mark_built(node_id)
        self.greet(node_id, event.session)
        self.outbox.mention(f"{upper_first(self.name(node_id))} is back.")

    def mark_built(self, node_id: str) -> None:
        """Notes that a worker has built the newest generation's group."""
        if self.phase is Phase.BUILDING and self.ledger.rank_of(node_id) >= 0:
            self.current.built.add(node_id)

    def greet(self, node_id: str, session: events.SessionId) -> None:
        """Sends a worker on its new stream everything that it needs to know."""
        claim, phase = self.ledger.claims[node_id], self.phase
        self.outbox.send(session, self.welcome(spare=self.ledger.waits_as_spare(claim)))
        if phase in (Phase.FORMING, Phase.ENDED):
            return
        rank, generation = self.ledger.rank_of(node_id), self.ledger.generation
        if phase is Phase.SUSPENDED:
            if rank >= 0:
                wait_s = max(0.0, self.deadlines.phase_since + self.settings.topo_timeout_s - self.now)
                why = self.ledger.suspended or ""
                self.outbox.send(session, messages.Suspended(generation, why, wait_s, self.first_loss))
            return
        if rank >= 0 or (claim.leaving is not None and claim.since):
            self.outbox.send(session, self.assignment(rank))
        if rank >= 0:
            self._send_rest(node_id, session, generation, phase)

    def _send_rest(self, node_id: str, session: events.SessionId, generation: int, phase: Phase) -> None:
        """Sends what a member needs besides its Assignment."""
        if phase is Phase.BUILDING and self.current.unique_ids:
            self.outbox.send(session, messages.UniqueIds(generation, self.current.unique_ids))
        if phase is not Phase.BUILDING:
            self.outbox.send(session, messages.GroupBuilt(generation))
        if phase is Phase.QUIESCING:
            self.outbox.send(session, messages.Quiesce(generation, self.current.plan or ""))
        word = self.snapshots.word_for(node_id)
        if word is not None:
            self.outbox.send(session, word)

    def remove(self, node_id: str, reason: str, *, finished: bool = False) -> None:
        """Takes a worker's claim away."""
        claim = self.ledger.claims[node_id]
        self.commit(records.Removed(node_id, claim.candidate.incarnation, reason, finished))

    def dismiss(self, claim: Claim, message: messages.Ended, reason: str) -> None:
        """Sends a worker its last message and takes its claim away."""
        self.send(claim.candidate.node_id, message)
        self.remove(claim.candidate.node_id, f"{who(claim.candidate)} {reason}")

    def lose(self, node_id: str, what: str, code: messages.RefusalCode | None = None) -> None:
        """Removes a lost worker. With a code, its stream, if it still has one, gets a refusal."""
        claim = self.ledger.claims[node_id]
        sentence = f"{self.name(node_id)} {what}"
        if code is not None:
            self.send(node_id, messages.Refused(code, f"{upper_first(sentence)}."))
        if self.switches_by_steps and self.leaves_now(claim):
            self.current.broken = sentence  # The others may be in a step that they cannot finish without it.
        self.note_loss(node_id, sentence)
        self.remove(node_id, sentence)
        self.say(f"{upper_first(sentence)}.")

    def note_loss(self, node_id: str, sentence: str, *, exit_code: int = 0) -> None:
        """Remembers the first member that goes without being asked to, before it is removed.

        It is later given as the cause of the job's end, instead of members that ended because of it. A
        restarted scheduler no longer knows it.
        """
        claim = self.ledger.claims[node_id]
        is_member = self.ledger.rank_of(node_id) >= 0
        if self.first_loss is None and is_member and claim.leaving is None:
            self.first_loss = messages.FirstLoss(node_id, claim.candidate.incarnation, sentence, exit_code)

    def forget(self, session: events.SessionId) -> None:
        """Forgets a stream that has ended."""
        self.probing.forget(session)
        self.evidence.givers.discard(session)

    # ------------------------------------------------------------ messages

    def send(self, node_id: str, message: SchedulerMessage) -> None:
        """Sends a message to a worker, if it has a stream."""
        session = self.members.session_of(node_id)
        if session is not None:
            self.outbox.send(session, message)

    def send_to_members(self, message: SchedulerMessage) -> None:
        """Sends a message to all members."""
        for claim in self.ledger.living_members():
            self.send(claim.candidate.node_id, message)

    def tell_members(self, sentence: str, *, wait: bool = True) -> None:
        """Tells members of an established group why they wait.

        With ``wait`` False, tells them that they no longer have to wait.
        """
        number = len(self.ledger.ranks)
        self.send_to_members(
            messages.Waiting(number - (max(len(self.probing.awaited), 1) if wait else 0), number, sentence)
        )

    def say(self, sentence: str) -> None:
        """Logs a sentence and makes it the reason that ``status`` shows."""
        self.outbox.mention(sentence)
        self.reason = sentence

    def welcome(self, *, spare: bool = False) -> messages.Welcome:
        """The first message to a worker; ``spare``: it waits for a place to become free."""
        return messages.Welcome(
            self.heartbeat_interval_s,
            self.patience.member_s,
            self.settings.topo_timeout_s,
            spare,
            self.waiting_interval_s,
        )

    def assignment(self, rank: int, lost: tuple[str, ...] = ()) -> messages.Assignment:
        """The newest generation's Assignment for a rank; -1: for a worker that leaves."""
        formed = self.ledger.formed
        assert formed is not None
        return messages.Assignment(
            generation=formed.generation,
            rank=rank,
            members=self.current.sent,
            state_source_rank=formed.state_source_rank,
            newcomer_ranks=formed.newcomer_ranks,
            unique_id_count=self.unique_id_count,
            reason=formed.reason,
            switch_after_step=formed.switch_after_step,
            lost=lost,
            launch=self.ledger.launch,
            first_loss=self.first_loss,
        )

    @staticmethod
    def farewell(reason: str) -> messages.Ended:
        """The last message to a worker that leaves as asked without a next generation."""
        return messages.Ended(True, f"This worker leaves the job: {reason}.", leave=True)


def as_sent(placed: records.Placed) -> messages.Member:
    """One member of a generation as Assignments show it."""
    one = placed.candidate
    return messages.Member(
        rank=placed.rank,
        node_id=one.node_id,
        incarnation=one.incarnation,
        host=one.host,
        device=one.device,
        local_rank=placed.local_rank,
        local_world_size=placed.local_world_size,
        data_address=one.data_address,
    )
