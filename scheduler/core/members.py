"""What the scheduler knows of its workers only while it runs, and shows as ``status``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.scheduler.core.admission import is_spare
from muster.scheduler.core.events import Heard
from muster.scheduler.core.ledger import Claim, Ledger, Phase
from muster.scheduler.core.messages import Candidate, Collective, SessionId


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
    """

    session: SessionId | None
    last_heard: float
    step: int = 0
    started_step: int = 0
    samples_per_s: float = 0.0
    recent: tuple[Collective, ...] = ()
    baseline: int = 0
    baseline_started: int = 0
    has_moved: bool = False
    entered: int = 0
    quiesced: int | None = None

    def hear(self, event: Heard, *, settled: bool) -> bool:
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
        """A new generation was formed: progress counts from here."""
        self.baseline = self.step
        self.baseline_started = self.started_step
        self.has_moved = False
        self.quiesced = None


@dataclass
class Contacts:
    """All workers by node id, and who is behind which stream."""

    by_node: dict[str, Contact] = field(default_factory=dict)
    nodes: dict[SessionId, str] = field(default_factory=dict)

    def attach(self, node_id: str, session: SessionId, now: float) -> Contact:
        """Puts a stream to a worker, in place of any older one."""
        contact = self.by_node.get(node_id)
        if contact is None:
            contact = self.by_node[node_id] = Contact(session, now)
        elif contact.session is not None:
            self.nodes.pop(contact.session, None)
        contact.session = session
        contact.last_heard = now
        contact.quiesced = None
        self.nodes[session] = node_id
        return contact

    def detach(self, session: SessionId) -> None:
        """The stream has ended; the worker is waited for."""
        self.by_node[self.nodes.pop(session)].session = None

    def forget(self, node_id: str) -> None:
        """The worker's claim is gone."""
        contact = self.by_node.pop(node_id, None)
        if contact is not None and contact.session is not None:
            self.nodes.pop(contact.session, None)

    def session_of(self, node_id: str) -> SessionId | None:
        """The worker's stream, if it has one."""
        contact = self.by_node.get(node_id)
        return contact.session if contact is not None else None

    def silent(self, now: float, node_timeout_s: float) -> list[str]:
        """Node ids that were not heard for ``node_timeout_s`` seconds."""
        return [
            node_id for node_id, contact in self.by_node.items() if now >= contact.last_heard + node_timeout_s
        ]

    def excuse(self, seconds: float, now: float) -> None:
        """So much of everybody's silence does not count: the scheduler itself was late."""
        for contact in self.by_node.values():
            contact.last_heard = min(now, contact.last_heard + seconds)

    def oldest_word(self) -> float | None:
        """When the most silent worker was last heard."""
        return min((contact.last_heard for contact in self.by_node.values()), default=None)

    def all_quiesced(self, ledger: Ledger) -> bool:
        """Whether every living member has stopped at a step boundary."""
        return all(
            self.by_node[claim.candidate.node_id].quiesced is not None for claim in ledger.living_members()
        )

    def last_started_step(self) -> int:
        """The newest step that a quiesced worker has begun."""
        return max((contact.quiesced or 0 for contact in self.by_node.values()), default=0)

    def stateless(self, ledger: Ledger) -> Iterator[str]:
        """Newcomers of the newest generation that are not known to have received the state."""
        for claim in ledger.living_members():
            if claim.newcomer and not self.by_node[claim.candidate.node_id].has_moved:
                yield claim.candidate.node_id


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as ``status`` shows it; ``rank`` and ``local_rank`` are -1 while there is none."""

    candidate: Candidate
    state: str
    rank: int
    local_rank: int
    silent_s: float
    step: int
    samples_per_s: float
    last_collective: Collective | None = None


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


def worker_view(ledger: Ledger, claim: Claim, contact: Contact, now: float, *, built: bool) -> WorkerView:
    """One worker."""
    node_id = claim.candidate.node_id
    rank = ledger.rank_of(node_id)
    local_rank = ledger.formed.members[rank].local_rank if ledger.formed is not None and rank >= 0 else -1
    return WorkerView(
        candidate=claim.candidate,
        state=_state(ledger, claim, contact, rank, built),
        rank=rank,
        local_rank=local_rank,
        silent_s=max(0.0, now - contact.last_heard),
        step=contact.step,
        samples_per_s=contact.samples_per_s,
        last_collective=contact.recent[-1] if contact.recent else None,
    )


def _state(ledger: Ledger, claim: Claim, contact: Contact, rank: int, built: bool) -> str:
    if contact.session is None:
        return "lost"
    if claim.leaving is not None:
        return "leaving"
    if rank < 0:
        return "spare" if is_spare(ledger, claim) else "waiting"
    if ledger.phase is Phase.BUILDING and not built:
        return "building"
    return "member"
