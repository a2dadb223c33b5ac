"""The parts of a job: its ledger, its members as last heard, its deadlines, its probes and its outbox.

Here are its parts and what all that work on them need; :mod:`muster.scheduler.core.machine` says what events
do to it and what follows, :mod:`muster.scheduler.core.probing` who cannot be reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from muster.scheduler.core import events as e
from muster.scheduler.core import records as r
from muster.scheduler.core.ledger import Claim, Ledger, Phase, count, missing, upper_first, who
from muster.wire import messages as m

# ---------------------------------------------------------------- workers as last heard


@dataclass(slots=True)
class Contact:
    """One worker as last heard.

    Attributes:
        session: its stream; None between a restart of the scheduler and the worker's return.
        last_heard: when anything came from it.
        baseline: steps it had finished when the newest generation was formed.
        baseline_started: steps it had begun then.
        has_moved: it has begun or finished a step beyond that, so it holds the state.
        entered: the generation whose group its training thread builds or uses; 0: none, or not known.
        quiesced: steps it had begun when it stopped for a planned change; None: it has not stopped.
        number: how many workers came before it.
        placed: it has been in a generation.
        waits: it has not been heard since, and need not be as often as members.
    """

    session: e.SessionId | None
    last_heard: float
    step: int = 0
    started_step: int = 0
    samples_per_s: float = 0.0
    recent: tuple[m.Collective, ...] = ()
    loss: float | None = None
    pid: int = 0
    learning_rate: float | None = None
    baseline: int = 0
    baseline_started: int = 0
    has_moved: bool = False
    entered: int = 0
    quiesced: int | None = None
    number: int = 0
    placed: bool = False
    waits: bool = True

    def hear(self, event: e.Heard, *, settled: bool) -> bool:
        """Takes a heartbeat in; ``settled``: it is of the newest generation, whose group stands.

        Returns:
            Whether the worker has made progress since the last one.
        """
        # A step may take long, and a script may count none: collectives that come and go are progress too.
        progress = event.step > self.step or event.recent[-1:] != self.recent[-1:]
        self.step = event.step
        self.started_step = event.started_step
        self.samples_per_s = event.samples_per_s
        self.recent = event.recent
        self.loss, self.pid, self.learning_rate = event.loss, event.pid, event.learning_rate
        self.entered = event.entered_generation
        if settled:
            self._see_move()
        return progress

    def quiesce(self, last_started_step: int) -> None:
        """The worker has stopped at a step boundary of the newest generation."""
        self.quiesced = last_started_step
        self.started_step = max(self.started_step, last_started_step)
        self._see_move()

    def _see_move(self) -> None:
        began_step = self.started_step > max(self.baseline_started, self.baseline + 1)
        self.has_moved = self.has_moved or began_step or self.step > self.baseline

    def enter_generation(self) -> None:
        """Notes that a new generation was formed, from which progress counts."""
        self.baseline = self.step
        self.baseline_started = self.started_step
        self.has_moved = False
        self.quiesced = None


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long members, and workers without a place, may be silent, in seconds."""

    member_s: float
    waiting_s: float


@dataclass
class Members:
    """All workers by node id, and their streams.

    Attributes:
        by_node: the workers, in the order in which they came.
        nodes: node ids by stream.
        words: those that are heard as members, in the order in which they were last heard.
        early: those that are heard as workers without a place, in that order.
        lacking: node ids of living newcomers that have not moved.
        quiesced: node ids of living members that have stopped for a planned change.
        came: how many have come.
        turns: how often a worker or its stream has come or gone.
        not_before: silence counts from then on: workers are still to find this scheduler.

    What was heard is noted by the methods here alone, so that all these agree with the contacts.
    """

    by_node: dict[str, Contact] = field(default_factory=dict)
    nodes: dict[e.SessionId, str] = field(default_factory=dict)
    words: OrderedDict[str, Contact] = field(default_factory=OrderedDict)
    early: OrderedDict[str, Contact] = field(default_factory=OrderedDict)
    lacking: set[str] = field(default_factory=set)
    quiesced: set[str] = field(default_factory=set)
    came: int = 0
    turns: int = 0
    not_before: float = 0.0

    def expect(self, node_id: str, now: float, *, placed: bool = False) -> Contact:
        """Begins to wait for a worker that has a claim and no stream."""
        self.came += 1
        heard = max(now, self.not_before)
        contact = Contact(None, heard, number=self.came, placed=placed, waits=not placed)
        self.by_node[node_id] = contact
        (self.words if placed else self.early)[node_id] = contact
        return contact

    def attach(self, node_id: str, session: e.SessionId, now: float) -> Contact:
        """Gives a worker this stream, in place of any older one."""
        contact = self.by_node.get(node_id) or self.expect(node_id, now)
        if contact.session is not None:
            self.nodes.pop(contact.session, None)
        contact.session = session
        contact.quiesced = None
        self.quiesced.discard(node_id)
        self.nodes[session] = node_id
        self.turns += 1
        self.has_spoken(node_id, now)
        return contact

    def has_spoken(self, node_id: str, now: float) -> None:
        """Notes that something came from the worker, from now on as often as its place asks for."""
        contact = self.by_node[node_id]
        contact.last_heard = max(now, self.not_before)
        if contact.placed:
            contact.waits = False
            self.early.pop(node_id, None)
        order = self.words if contact.placed else self.early
        order[node_id] = contact
        order.move_to_end(node_id)

    def hear(self, node_id: str, event: e.Heard, *, settled: bool) -> bool:
        """Takes a heartbeat in, as :meth:`Contact.hear`."""
        contact = self.by_node[node_id]
        progress = contact.hear(event, settled=settled)
        if contact.has_moved:
            self.lacking.discard(node_id)
        return progress

    def quiesce(self, node_id: str, last_started_step: int) -> None:
        """Notes that a living member has stopped at a step boundary of the newest generation."""
        contact = self.by_node[node_id]
        contact.quiesce(last_started_step)
        self.quiesced.add(node_id)
        if contact.has_moved:
            self.lacking.discard(node_id)

    def forget_quiesced(self) -> None:
        """Notes that nobody has stopped: who did so for an earlier change may have gone on since."""
        for node_id in self.quiesced:
            self.by_node[node_id].quiesced = None
        self.quiesced = set()

    def detach(self, session: e.SessionId) -> None:
        """Notes that the stream has ended; the worker is waited for."""
        self.by_node[self.nodes.pop(session)].session = None
        self.turns += 1

    @property
    def all_have_streams(self) -> bool:
        """Whether every worker with a claim has a stream."""
        return len(self.nodes) == len(self.by_node)

    def forget(self, node_id: str) -> None:
        """Forgets a worker whose claim is gone."""
        contact = self.by_node.pop(node_id, None)
        self.words.pop(node_id, None)
        self.early.pop(node_id, None)
        self.lacking.discard(node_id)
        self.quiesced.discard(node_id)
        self.turns += 1
        if contact is not None and contact.session is not None:
            self.nodes.pop(contact.session, None)

    def session_of(self, node_id: str) -> e.SessionId | None:
        """The worker's stream, if it has one."""
        contact = self.by_node.get(node_id)
        return contact.session if contact is not None else None

    def enter_generation(self, members: Iterable[str], newcomers: Iterable[str]) -> None:
        """Notes that a new generation was formed. What members have shown counts beyond a suspension.

        Args:
            members: node ids of its members.
            newcomers: node ids of those of its living members that are to take the state from a survivor.
        """
        self.lacking, self.quiesced = set(newcomers), set()
        for contact in self.by_node.values():
            contact.enter_generation()
        for node_id in members:
            if node_id in self.by_node:
                self.by_node[node_id].placed = True

    def silent(self, now: float, patience: Patience) -> list[str]:
        """Node ids that were not heard for too long, in the order in which they came."""
        found = []
        for words, seconds in ((self.words, patience.member_s), (self.early, patience.waiting_s)):
            for node_id, contact in words.items():
                if now < contact.last_heard + seconds:
                    break
                found.append(node_id)
        return sorted(found, key=lambda node_id: self.by_node[node_id].number)

    def excuse(self, seconds: float, now: float) -> None:
        """Subtracts a time from everybody's silence: the scheduler itself was late."""
        for contact in self.by_node.values():
            # The order stays.
            contact.last_heard = max(contact.last_heard, min(now, contact.last_heard + seconds))

    def next_silence(self, patience: Patience) -> float | None:
        """When the first worker will have been silent for too long."""
        oldest = [
            next(iter(words.values())).last_heard + seconds
            for words, seconds in ((self.words, patience.member_s), (self.early, patience.waiting_s))
            if words
        ]
        return min(oldest, default=None)

    def all_quiesced(self, ledger: Ledger) -> bool:
        """Whether every living member has stopped at a step boundary."""
        return len(self.quiesced) == ledger.living

    def last_started_step(self) -> int:
        """The newest step that a quiesced worker has begun."""
        return max((contact.quiesced or 0 for contact in self.by_node.values()), default=0)

    def stateless(self) -> Set[str]:
        """Node ids of living newcomers that are not known to have received the state, as of now."""
        return self.lacking


class WorkerView(NamedTuple):
    """One worker as ``status`` shows it; ``rank`` and ``local_rank`` are -1 while there is none."""

    candidate: m.Candidate
    state: str
    rank: int
    local_rank: int
    silent_s: float
    step: int
    samples_per_s: float
    last_collective: m.Collective | None = None
    loss: float | None = None
    pid: int = 0
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as ``status`` shows it. ``state``: forming, building, running, quiescing, suspended, ended."""

    job_id: str
    state: str
    generation: int
    worker_num: int
    worker_min: int
    workers: tuple[WorkerView, ...]
    missing: tuple[str, ...]
    reason: str


def worker_view(ledger: Ledger, claim: Claim, contact: Contact, now: float, *, awaited: bool) -> WorkerView:
    """One worker; ``awaited``: its group is being built, and it has not reported that it has built it."""
    node_id = claim.candidate.node_id
    rank = ledger.rank_of(node_id)
    local_rank = ledger.formed.members[rank].local_rank if ledger.formed is not None and rank >= 0 else -1
    return WorkerView(
        candidate=claim.candidate,
        state=_state(ledger, claim, contact, rank, awaited=awaited),
        rank=rank,
        local_rank=local_rank,
        silent_s=max(0.0, now - contact.last_heard),
        step=contact.step,
        samples_per_s=contact.samples_per_s,
        last_collective=contact.recent[-1] if contact.recent else None,
        loss=contact.loss,
        pid=contact.pid,
        learning_rate=contact.learning_rate,
    )


def _state(ledger: Ledger, claim: Claim, contact: Contact, rank: int, *, awaited: bool) -> str:
    if contact.session is None:
        return "lost"
    if claim.leaving is not None:
        return "leaving"
    if rank < 0:
        return "spare" if ledger.is_spare(claim) else "waiting"
    return "building" if awaited else "member"


# ---------------------------------------------------------------- rounds of probes

ROUND_S = 15.0
"""How long a round of probes waits for answers, in seconds; a worker gives each probe up before that."""

ROUND_PAUSE_S = 5.0
"""The shortest time from one round of probes to the next, in seconds."""

CALM_PAUSE_S = 60.0
"""What :data:`ROUND_PAUSE_S` grows to while rounds find that all reach each other."""

TOGETHER_S = 1.0
"""Two probes begun within this time count as simultaneous: a process that stood still begins later."""

LONG_S = 2.5
"""A running worker is heard within this time; one that is not while it is probed may stand still."""

CANDIDATES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker that takes part in a round of probes.

    Attributes:
        candidate: who it is.
        targets: whom it probes.
        seated: it has a claim, and is not to earn one.
        place: its number among the seated workers of its host.
    """

    candidate: m.Candidate
    targets: tuple[e.SessionId, ...]
    seated: bool
    place: int = 0


@dataclass(slots=True)
class Round:
    """A round of probes under way; ``awaited``: the workers whose answers it waits for, at least.

    Attributes:
        hosts: the streams of those with a claim that are asked, by the id of their host.
        unreached: why they could not reach whom, by node id, of each that has answered.
        began: since when those that have answered have probed.
        heard: when each worker was last heard.
    """

    number: int
    due: float
    among_members: bool
    asked: dict[e.SessionId, Asked]
    awaited: list[e.SessionId]
    generation: int = 0
    hosts: dict[str, list[e.SessionId]] = field(default_factory=dict)
    answers: dict[e.SessionId, e.Probed] = field(default_factory=dict)
    unreached: dict[e.SessionId, dict[str, str]] = field(default_factory=dict)
    began: dict[e.SessionId, float] = field(default_factory=dict)
    heard: dict[e.SessionId, float] = field(default_factory=dict)

    def target(self, place: int, host_id: str) -> e.SessionId:
        """Whom a worker with this place on its host probes of another host."""
        there = self.hosts[host_id]
        return there[place % len(there)]

    def failed(self, session: e.SessionId, target: e.SessionId) -> str | None:
        """Why one worker could not reach another that it was to probe; "" if it could; None: not known.

        It is not where one of them may have stood still while the other probed it.
        """
        answer = self.answers.get(session)
        if answer is None or target not in self.answers:
            return None
        if answer.seconds >= LONG_S and self.heard.get(target, self.began[session]) < self.began[session]:
            return None
        why = self.unreached[session].get(self.asked[target].candidate.node_id, "")
        together = abs(self.began[session] - self.began[target]) <= TOGETHER_S
        return why if together or not why else None

    def take(self, answer: e.Probed, now: float) -> None:
        """Takes an answer in."""
        self.answers[answer.session] = answer
        self.unreached[answer.session] = dict(answer.unreached)
        self.began[answer.session] = now - answer.seconds


@dataclass(frozen=True, slots=True)
class Hang:
    """A member that others wait for: since when, and in which step."""

    since: float
    place: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Calm:
    """Until when no further round is needed, because all members were found to reach each other."""

    generation: int = 0
    until: float = 0.0
    pause_s: float = ROUND_PAUSE_S

    def again(self, generation: int, now: float) -> Calm:
        """The same after another such round; the pause grows within a generation."""
        same = generation == self.generation
        pause_s = min(2 * self.pause_s, CALM_PAUSE_S) if same else ROUND_PAUSE_S
        return Calm(generation, now + pause_s, pause_s)


PartyName = tuple[str, str]
"""The id of a host, and the node id of a worker on it, or "" for all of them."""

BrokenPair = frozenset[PartyName]


@dataclass(slots=True)
class Rounds:
    """The rounds of probes of a job and what they found; begins empty when the scheduler restarts.

    Attributes:
        current: the round under way.
        number: the newest round's.
        not_before: when the next one may begin.
        wanted: the members are to be asked.
        calm: they have been found to reach each other.
        hangs: the members that others wait for.
        awaited: those that were named as awaited, busy ones too, and in which step each was then.
        said: what was said last, so that it is not said at every round.
        broken: pairs that could not reach each other while neither was apart from anyone else.
        barred: why, by the id of a host, or by a worker's node id.
        outside: joins of those that are barred.
        taken_in: those of them that have just been proven to be reached.
        addresses: where workers answer probes.
    """

    current: Round | None = None
    number: int = 0
    not_before: float = 0.0
    wanted: bool = False
    calm: Calm = Calm()
    hangs: dict[str, Hang] = field(default_factory=dict)
    awaited: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    said: str = ""
    broken: frozenset[BrokenPair] = frozenset()
    barred: dict[str, str] = field(default_factory=dict)
    outside: dict[e.SessionId, e.Joined] = field(default_factory=dict)
    taken_in: list[e.Joined] = field(default_factory=list)
    addresses: dict[e.SessionId, str] = field(default_factory=dict)

    def bars(self, candidate: m.Candidate) -> bool:
        """Whether this worker, or its host, was expelled because it could not be reached."""
        return candidate.host.id in self.barred or candidate.node_id in self.barred

    def due(self, hang_timeout_s: float) -> float | None:
        """The time at which a round has to end or to begin; None: no round is wanted."""
        if self.current is not None:
            return self.current.due
        times = [self.not_before] if self.outside or self.wanted else []
        times += [self.hang_due(hang_timeout_s)] if self.hangs else []
        return max(min(times), self.not_before) if times else None

    def hang_due(self, hang_timeout_s: float) -> float:
        """The time at which the first member has been waited for too long."""
        return min(hang.since for hang in self.hangs.values()) + hang_timeout_s

    def repeat(self) -> None:
        """Has the round under way asked again: what was answered in it may be true no more."""
        current, self.current = self.current, None
        self.wanted = self.wanted or (current is not None and current.among_members)

    def forget_waits(self) -> None:
        """Training goes on: what is waited for next is something new."""
        self.awaited, self.said, self.calm = {}, "", Calm()

    def take_in(self) -> list[e.Joined]:
        """Takes and returns the Joins of workers that were just found to reach all members."""
        joins, self.taken_in = self.taken_in, []
        return joins

    def forget(self, session: e.SessionId) -> None:
        """Takes a stream that ends out of all rounds."""
        self.addresses.pop(session, None)
        self.outside.pop(session, None)


# ---------------------------------------------------------------- the job


@dataclass(slots=True)
class Outbox:
    """The result of one event: records, messages, remarks.

    Attributes:
        records: what has to be durable before any of the messages leaves.
        messages: what goes to which stream, in order.
        remarks: what happened, in sentences.
    """

    records: list[r.Record] = field(default_factory=list)
    messages: list[tuple[e.SessionId, m.SchedulerMessage]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def send(self, session: e.SessionId, message: m.SchedulerMessage) -> None:
        """Adds a message for a stream."""
        self.messages.append((session, message))

    def mention(self, sentence: str) -> None:
        """Adds a sentence to the log without changing the reason that ``status`` shows."""
        self.remarks.append(sentence)

    def decision(self) -> e.Decision:
        """Returns everything as a decision."""
        return e.Decision(tuple(self.records), tuple(self.messages), " ".join(self.remarks))


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A report that collectives failed on a peer; unless it is lost by ``due``, the group is built anew."""

    due: float
    sentence: str


@dataclass(slots=True)
class Deadlines:
    """Start times and due times of a job's phases. All begin anew when the scheduler is started again.

    Attributes:
        phase_since: since when the phase lasts.
        formed_at: when the newest generation was formed, or ended.
        progress_since: when training was last seen to go on.
        stalled: that it stands still has been said.
        stall_report: when that is said again.
        report: when it is said again who is missing.
        spares_fill_in: when spares may take the places of ordinary workers; 0: those are not complete.
        last_call_s: how long the first group waits for more than it needs; 0: as long as for those.
        last_call: when that is over; 0: it lacks some that it needs.
        hand_over: when a member that leaves waits no longer for another that takes the state.
        holders_return: when a suspended job waits no longer for those that held the state; 0: too few are in.
        suspicion: when a group whose collectives failed is built anew.
        forgiving_until: a stream that ends before that may have broken while the scheduler stood still.
        late_s, late_at: by how much turns were late lately, and when that was counted.
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
        """Clears what was due in the last generation."""
        self.suspicion, self.hand_over, self.stalled = None, None, False
        self.formed_at = self.progress_since = now

    def excuse(self, seconds: float) -> None:
        """Adds a time to all waits: the scheduler itself was late."""
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
class Current:
    """The part of the newest generation's state that is not durable.

    Attributes:
        unique_ids: what its rank 0 handed in, until the group stands. Secret.
        built: node ids of the members that have built it.
        sent: its members as they are sent; one tuple for all receivers: they share its bytes.
        change: why it was formed, without remarks.
        plan: why its members are to change at a step boundary; None: they are not.
        broken: why the step before a planned switch to it cannot be finished.
        puzzled: node ids of members whose collective failed, they cannot say on whom.
    """

    unique_ids: tuple[bytes, ...] = field(default=(), repr=False)
    built: set[str] = field(default_factory=set)
    sent: tuple[m.Member, ...] = ()
    change: str = ""
    plan: str | None = None
    broken: str | None = None
    puzzled: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Door:
    """What a job remembers of Joins: those held back, who was admitted, which warnings were given.

    Attributes:
        held_back: joins that wait until it is clear who comes back after a restart.
        tried: how far the records, and the coming and going of workers, were when they were tried last.
        arrived: who has just been admitted.
        remarked: what was warned of.
        machines: the machine that was first seen under a host name.
        labels: the topology label that was first seen of a host.
    """

    held_back: dict[e.SessionId, e.Joined] = field(default_factory=dict)
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
        deadlines: what is due.
        outbox: what the event that is dealt with brings about.
        current: the newest generation.
        rounds: who has been found to reach whom.
        records: how many records it has taken in.
        trained: ranks in the generation that stood last, by node id.
        now: when the event that is dealt with happened.
        matters: conclusions are to be drawn from it.
        phase_seen: the phase whose beginning was noted.
        reason: what the job's state is put down to.
        first_loss: the first member to go since a group last stood.
    """

    job_id: str
    settings: e.Settings
    ledger: Ledger = field(default_factory=Ledger)
    members: Members = field(default_factory=Members)
    deadlines: Deadlines = field(default_factory=Deadlines)
    outbox: Outbox = field(default_factory=Outbox)
    current: Current = field(default_factory=Current)
    door: Door = field(default_factory=Door)
    rounds: Rounds = field(default_factory=Rounds)
    records: int = 0
    trained: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    matters: bool = False
    phase_seen: Phase = Phase.FORMING
    reason: str = ""
    first_loss: m.FirstLoss | None = None

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        durable = self.ledger.phase
        return Phase.QUIESCING if durable is Phase.RUNNING and self.current.plan is not None else durable

    @property
    def needed(self) -> int:
        """The number of workers to wait for; 0: not known yet."""
        opened = self.ledger.opened
        return opened.worker_num if opened is not None else self.settings.worker_num

    @property
    def heartbeat_interval_s(self) -> float:
        """The time between a member's heartbeats: a full job sends ``heartbeats_per_s`` in all at most."""
        settings = self.settings
        shared_s = min(self.needed / settings.heartbeats_per_s, settings.node_timeout_s / 5)
        return max(settings.heartbeat_interval_s, shared_s)

    @property
    def waiting_interval_s(self) -> float:
        """The time between heartbeats of a worker without a place."""
        return max(self.heartbeat_interval_s, self.settings.node_timeout_s / 3)

    @property
    def patience(self) -> Patience:
        """How long workers may be silent: ``node_timeout_s`` and the time between two heartbeats."""
        least, node_timeout_s = self.settings.heartbeat_interval_s, self.settings.node_timeout_s
        return Patience(
            node_timeout_s + 1.5 * (self.heartbeat_interval_s - least),
            node_timeout_s + 1.5 * (self.waiting_interval_s - least),
        )

    @property
    def unique_id_count(self) -> int:
        """How many unique ids the newest generation takes."""
        return -(-len(self.ledger.ranks) // self.settings.ranks_per_unique_id)

    @property
    def switches_by_steps(self) -> bool:
        """Whether members still train in the generation before, until the step at which to switch."""
        formed = self.ledger.formed
        return self.phase is Phase.BUILDING and formed is not None and formed.switch_after_step >= 0

    def present(self) -> list[m.Candidate]:
        """The workers that would make up the next generation."""
        return self.ledger.choose(self.settings) if self.ledger.opened is not None else []

    def seated(self) -> list[m.Candidate]:
        """The workers that have a place, or get one; before the first group, spares wait for others first."""
        forming = self.phase is Phase.FORMING
        return [candidate for candidate in self.present() if not (forming and candidate.spare)]

    def missing(self) -> tuple[str, ...]:
        """Names the missing workers."""
        if self.phase is Phase.ENDED:
            return ()
        staying = sum(claim.leaving is None for claim in self.ledger.living_members())
        if staying >= self.needed and self.phase is not Phase.FORMING:
            return ()  # as the choice below would find, at each look at a job
        return missing(self.seated(), self.needed, self.settings.rank_table)

    def size(self) -> str:
        """``4 members``."""
        return count(len(self.ledger.ranks), "member")

    def stateless(self) -> frozenset[str]:
        """Node ids of newcomers that are not known to have received the state."""
        return frozenset(self.members.stateless())

    def leaves_now(self, claim: Claim) -> bool:
        """Whether a worker goes by the planned change that is being made; those that went before do not."""
        node_id, stood = claim.candidate.node_id, self.ledger.stood
        return self.ledger.rank_of(node_id) < 0 < claim.since <= stood and node_id in self.trained

    def name(self, node_id: str) -> str:
        """A worker in words, with its rank if it has one."""
        return who(self.ledger.claims[node_id].candidate, self.ledger.rank_of(node_id))

    # ------------------------------------------------------------ changes

    def apply(self, record: r.Record) -> None:
        """Takes a durable record in: the only way in which durable state changes, here and in recovery."""
        self.ledger.apply(record)
        self.records += 1
        if isinstance(record, r.Snapshot):  # of a generation that stands
            for formed in record.formed:
                sent = tuple(map(as_sent, formed.members))
                self.current = Current(sent=sent, change=formed.reason)
            self.trained = dict(self.ledger.ranks)
            self.members.enter_generation(
                self.ledger.ranks,
                (
                    node_id
                    for node_id, claim in self.ledger.claims.items()
                    if claim.newcomer and self.ledger.rank_of(node_id) >= 0
                ),
            )
        elif isinstance(record, r.Removed):
            self.members.forget(record.node_id)
            self.current.built.discard(record.node_id)
            self.current.puzzled.discard(record.node_id)
        elif isinstance(record, r.GenerationFormed):
            sent = tuple(map(as_sent, record.members))
            self.current = Current(sent=sent, change=record.reason)
            self.deadlines.begin_generation(self.now)
            self.rounds.awaited = {}
            members = record.members
            self.members.enter_generation(
                self.ledger.ranks, (members[rank].candidate.node_id for rank in record.newcomer_ranks)
            )
        elif isinstance(record, r.GenerationEnded):
            self.current = Current(sent=self.current.sent, change=self.current.change)
            self.deadlines.begin_generation(self.now)
            self.rounds.awaited = {}
        elif isinstance(record, r.GroupEstablished):
            self.current.unique_ids = ()
            self.deadlines.suspicion, self.deadlines.stalled = None, False
            self.first_loss = None  # the others have gone on
            self.trained = dict(self.ledger.ranks)

    def commit(self, record: r.Record) -> None:
        """Changes durable state: the record goes out, to be written down."""
        self.apply(record)
        self.outbox.records.append(record)

    def send(self, node_id: str, message: m.SchedulerMessage) -> None:
        """Sends a message to a worker, if it has a stream."""
        session = self.members.session_of(node_id)
        if session is not None:
            self.outbox.send(session, message)

    def send_to_members(self, message: m.SchedulerMessage) -> None:
        """Sends a message to all members."""
        for claim in self.ledger.living_members():
            self.send(claim.candidate.node_id, message)

    def tell_members(self, sentence: str, *, wait: bool = True) -> None:
        """Sends members whose group stands why they wait; ``wait`` False: that they need not any more."""
        number = len(self.ledger.ranks)
        self.send_to_members(
            m.Waiting(number - (max(len(self.rounds.awaited), 1) if wait else 0), number, sentence)
        )

    def say(self, sentence: str) -> None:
        """Logs a sentence and makes it the reason that ``status`` shows."""
        self.outbox.mention(sentence)
        self.reason = sentence

    def remove(self, node_id: str, reason: str, *, finished: bool = False) -> None:
        """Takes a worker's claim away."""
        claim = self.ledger.claims[node_id]
        self.commit(r.Removed(node_id, claim.candidate.incarnation, reason, finished))

    def dismiss(self, claim: Claim, message: m.Ended, reason: str) -> None:
        """Sends a worker its last message and takes its claim away."""
        self.send(claim.candidate.node_id, message)
        self.remove(claim.candidate.node_id, f"{who(claim.candidate)} {reason}")

    def lose(self, node_id: str, what: str, code: m.RefusalCode | None = None) -> None:
        """Removes a worker that is lost; with a code, its stream, if it still has one, gets a refusal."""
        claim = self.ledger.claims[node_id]
        sentence = f"{self.name(node_id)} {what}"
        if code is not None:
            self.send(node_id, m.Refused(code, f"{upper_first(sentence)}."))
        if self.switches_by_steps and self.leaves_now(claim):
            self.current.broken = sentence  # the others may be in a step that it was to finish with them
        self.note_loss(node_id, sentence)
        self.remove(node_id, sentence)
        self.say(f"{upper_first(sentence)}.")

    def note_loss(self, node_id: str, sentence: str, *, exit_code: int = 0) -> None:
        """Remembers the first member that goes without having been asked to, before it is removed.

        Later questions why the job ended are answered with that one, not with those that ended because of it.
        A scheduler that is started again does not know it any more.
        """
        claim = self.ledger.claims[node_id]
        is_member = self.ledger.rank_of(node_id) >= 0
        if self.first_loss is None and is_member and claim.leaving is None:
            self.first_loss = m.FirstLoss(node_id, claim.candidate.incarnation, sentence, exit_code)

    def assignment(self, rank: int, lost: tuple[str, ...] = ()) -> m.Assignment:
        """The newest generation's Assignment for a rank; -1: for a worker that leaves."""
        formed = self.ledger.formed
        assert formed is not None
        return m.Assignment(
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
    def farewell(reason: str) -> m.Ended:
        """The last message to a worker that leaves as asked without a next generation."""
        return m.Ended(True, f"This worker leaves the job: {reason}.", leave=True)


def as_sent(placed: r.Placed) -> m.Member:
    """One member of a generation as Assignments show it."""
    one = placed.candidate
    return m.Member(
        rank=placed.rank,
        node_id=one.node_id,
        incarnation=one.incarnation,
        host=one.host,
        device=one.device,
        local_rank=placed.local_rank,
        local_world_size=placed.local_world_size,
        data_address=one.data_address,
    )
