"""The workers of a job as last heard: their streams, their steps, and how long they may be silent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from muster.scheduler.core import events
from muster.scheduler.core.ledger import Ledger
from muster.wire import messages


@dataclass(slots=True)
class Contact:
    """One worker as last heard.

    Attributes:
        session: its stream; None after a restart of the scheduler until the worker has returned.
        last_heard: when anything came from it.
        baseline: steps it had finished when the newest generation was formed.
        baseline_started: steps it had begun then.
        has_moved: it has begun or finished a step since then, so it holds the state.
        gpu_uuid: uuid of its GPU from its Join; empty if not known.
        gpu, gpu_at: its last report on its GPU, and the time of it.
        entered: the generation whose group its training thread builds or uses; 0 if none, or not known.
        quiesced: steps it had begun when it stopped for a planned change; None if it has not stopped.
        number: how many workers came before it.
        placed: it has been in a generation.
        waits: it has no place and is heard less often than members.
    """

    session: events.SessionId | None
    last_heard: float
    step: int = 0
    started_step: int = 0
    samples_per_s: float = 0.0
    recent: tuple[messages.Collective, ...] = ()
    loss: float | None = None
    pid: int = 0
    learning_rate: float | None = None
    snapshot: messages.SnapshotReport | None = None
    checkpoint: messages.CheckpointReport | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    steps: int = 0
    epoch: int = 0
    epochs: int = 0
    gpu_uuid: str = ""
    gpu: messages.GpuReport | None = None
    gpu_at: float = 0.0
    baseline: int = 0
    baseline_started: int = 0
    has_moved: bool = False
    entered: int = 0
    quiesced: int | None = None
    number: int = 0
    placed: bool = False
    waits: bool = True

    def hear(self, event: events.Heard, *, settled: bool) -> bool:
        """Applies a heartbeat; ``settled``: it is about the newest generation, whose group is established.

        Returns:
            Whether the worker has made progress since the last one.
        """
        # A step may take long, and a script may count no steps: new collectives count as progress too.
        progress = event.step > self.step or event.recent[-1:] != self.recent[-1:]
        self.step = event.step
        self.started_step = event.started_step
        self.samples_per_s = event.samples_per_s
        self.recent = event.recent
        self.loss, self.pid, self.learning_rate = event.loss, event.pid, event.learning_rate
        self.snapshot, self.checkpoint, self.numbers = event.snapshot, event.checkpoint, event.numbers
        self.steps, self.epoch, self.epochs = event.steps, event.epoch, event.epochs
        self.entered = event.entered_generation
        if settled:
            self._see_move()
        return progress

    def quiesce(self, last_started_step: int) -> None:
        """Records that the worker has stopped at a step boundary of the newest generation."""
        self.quiesced = last_started_step
        self.started_step = max(self.started_step, last_started_step)
        self._see_move()

    def _see_move(self) -> None:
        began_step = self.started_step > max(self.baseline_started, self.baseline + 1)
        self.has_moved = self.has_moved or began_step or self.step > self.baseline

    def enter_generation(self) -> None:
        """Records that a new generation was formed; progress is counted from here."""
        self.baseline = self.step
        self.baseline_started = self.started_step
        self.has_moved = False
        self.quiesced = None


@dataclass(frozen=True, slots=True)
class Patience:
    """The times for which members, and workers without a place, may be silent, in seconds."""

    member_s: float
    waiting_s: float


@dataclass
class Members:
    """All workers by node id, and their streams.

    Attributes:
        by_node: the workers, in the order in which they came.
        nodes: node ids by stream.
        words: the workers that are heard as often as members, in the order in which they were last heard.
        early: the workers without a place, which are heard less often, in the order of their last messages.
        lacking: node ids of living newcomers that have not moved.
        quiesced: node ids of living members that have stopped for a planned change.
        came: how many workers have come so far.
        turns: how often a worker or its stream has come or gone.
        not_before: silence counts from this time on, because workers have to find this scheduler first.

    Only the methods of this class record what was heard, so that these attributes agree with the contacts.
    """

    by_node: dict[str, Contact] = field(default_factory=dict)
    nodes: dict[events.SessionId, str] = field(default_factory=dict)
    words: OrderedDict[str, Contact] = field(default_factory=OrderedDict)
    early: OrderedDict[str, Contact] = field(default_factory=OrderedDict)
    lacking: set[str] = field(default_factory=set)
    quiesced: set[str] = field(default_factory=set)
    came: int = 0
    turns: int = 0
    not_before: float = 0.0

    def expect(self, node_id: str, now: float, *, placed: bool = False) -> Contact:
        """Starts to wait for a worker that has a claim and no stream."""
        self.came += 1
        heard = max(now, self.not_before)
        contact = Contact(None, heard, number=self.came, placed=placed, waits=not placed)
        self.by_node[node_id] = contact
        (self.words if placed else self.early)[node_id] = contact
        return contact

    def attach(self, node_id: str, session: events.SessionId, now: float) -> Contact:
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
        """Records that something came from the worker.

        From now on it must be heard as often as its place requires.
        """
        contact = self.by_node[node_id]
        contact.last_heard = max(now, self.not_before)
        if contact.placed:
            contact.waits = False
            self.early.pop(node_id, None)
        order = self.words if contact.placed else self.early
        order[node_id] = contact
        order.move_to_end(node_id)

    def hear(self, node_id: str, event: events.Heard, *, settled: bool) -> bool:
        """Applies a heartbeat; see :meth:`Contact.hear`."""
        contact = self.by_node[node_id]
        progress = contact.hear(event, settled=settled)
        if contact.has_moved:
            self.lacking.discard(node_id)
        return progress

    def quiesce(self, node_id: str, last_started_step: int) -> None:
        """Records that a living member has stopped at a step boundary of the newest generation."""
        contact = self.by_node[node_id]
        contact.quiesce(last_started_step)
        self.quiesced.add(node_id)
        if contact.has_moved:
            self.lacking.discard(node_id)

    def forget_quiesced(self) -> None:
        """Forgets who has stopped: those that stopped for an earlier change may have gone on since."""
        for node_id in self.quiesced:
            self.by_node[node_id].quiesced = None
        self.quiesced = set()

    def detach(self, session: events.SessionId) -> None:
        """Records that the stream has ended; the worker may come back."""
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

    def session_of(self, node_id: str) -> events.SessionId | None:
        """The worker's stream, if it has one."""
        contact = self.by_node.get(node_id)
        return contact.session if contact is not None else None

    def enter_generation(self, members: Iterable[str], newcomers: Iterable[str]) -> None:
        """Records that a new generation was formed. What members have shown is kept across a suspension.

        Args:
            members: node ids of its members.
            newcomers: node ids of its living members that have to take the state from a survivor.
        """
        self.lacking, self.quiesced = set(newcomers), set()
        for contact in self.by_node.values():
            contact.enter_generation()
        for node_id in members:
            if node_id in self.by_node:
                self.by_node[node_id].placed = True

    def silent(self, now: float, patience: Patience) -> list[str]:
        """Node ids of workers that were silent for too long, in the order in which they came."""
        found = []
        for words, seconds in ((self.words, patience.member_s), (self.early, patience.waiting_s)):
            for node_id, contact in words.items():
                if now < contact.last_heard + seconds:
                    break
                found.append(node_id)
        return sorted(found, key=lambda node_id: self.by_node[node_id].number)

    def excuse(self, seconds: float, now: float) -> None:
        """Reduces everybody's silence by a time during which the scheduler itself did not run."""
        for contact in self.by_node.values():
            # The order does not change.
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
