"""What a scheduler must still know after a crash, and the one function that changes it.

A :class:`Ledger` is the fold of a job's records. The running machine and recovery both go through
:meth:`Ledger.apply`; nothing else writes here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.scheduler.core import messages as v
from muster.scheduler.core import records as r


class Phase(enum.Enum):
    """Where a job stands; ``status`` shows the value."""

    FORMING = "forming"
    BUILDING = "building"
    RUNNING = "running"
    QUIESCING = "quiescing"
    SUSPENDED = "suspended"
    ENDED = "ended"


@dataclass(slots=True)
class Claim:
    """One admitted worker process.

    Attributes:
        candidate: what its Join said.
        since: the generation from which on it has been a member without a break; 0: never one.
        newcomer: it was to take the state from a survivor when its last generation was formed.
        leaving: why it is to leave at the next step boundary; None: it stays.
    """

    candidate: v.Candidate
    since: int = 0
    newcomer: bool = False
    leaving: str | None = None


@dataclass
class Ledger:
    """The durable state of one job.

    Attributes:
        claims: admitted worker processes by node id.
        retired: incarnations that may never come back, with the reason, by node id.
        absent: by node id, an incarnation that went before it ever was a member, and may come back.
        completed: worker processes that completed the training.
        lost: members of the current generation that are gone without having finished, with the reason.
        parted: those of them that left as planned when the job was suspended.
        arriving: those of them that were members of no generation before; nobody had computed with them.
        finished: node ids of the current generation that completed the training.
        stood: the last generation that stood; until a planned switch is made its members compute in it.
        launch: incarnation of the worker admitted first: names this launch of the job, also after a restart.
        finishing: some member of the job completed the training: nobody new is placed any more.
    """

    opened: r.JobOpened | None = None
    claims: dict[str, Claim] = field(default_factory=dict)
    retired: dict[str, dict[int, str]] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    formed: r.GenerationFormed | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    completed: set[tuple[str, int]] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    parted: set[str] = field(default_factory=set)
    arriving: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    launch: int = 0
    finishing: bool = False
    established: bool = False
    stood: int = 0
    suspended: str | None = None
    outcome: r.JobEnded | None = None

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> Phase:
        """The phase as far as records tell (a change being prepared is not among them)."""
        if self.outcome is not None:
            return Phase.ENDED
        if self.formed is None:
            return Phase.FORMING
        if self.suspended is not None:
            return Phase.SUSPENDED
        return Phase.RUNNING if self.established else Phase.BUILDING

    @property
    def generation(self) -> int:
        """Number of the newest generation; 0 before the first."""
        return self.formed.generation if self.formed is not None else 0

    @property
    def ever_established(self) -> bool:
        """Whether some generation stood, so that there may be state worth handing on."""
        return self.stood > 0

    def rank_of(self, node_id: str) -> int:
        """Rank of a living member of the newest generation; -1 for everybody else."""
        if node_id not in self.claims or node_id in self.lost or node_id in self.finished:
            return -1
        return self.ranks.get(node_id, -1)

    def living_members(self) -> Iterator[Claim]:
        """The members of the newest generation that are neither lost nor finished, by rank."""
        if self.formed is None:
            return
        for member in self.formed.members:
            if self.rank_of(member.candidate.node_id) >= 0:
                yield self.claims[member.candidate.node_id]

    def retirement(self, node_id: str, incarnation: int) -> str | None:
        """Why this worker process may not come back; None if it may."""
        return self.retired.get(node_id, {}).get(incarnation)

    # ------------------------------------------------------------ the one writer

    def apply(self, record: r.Record) -> None:
        """Takes one record in. Records come in the order in which they were made."""
        if isinstance(record, r.JobOpened):
            self.opened = record
        elif isinstance(record, r.Admitted):
            self.launch = self.launch or record.candidate.incarnation
            self._admit(record.candidate)
        elif isinstance(record, r.LeavePlanned):
            self.claims[record.node_id].leaving = record.reason
        elif isinstance(record, r.Removed):
            self._remove(record)
        elif isinstance(record, r.GenerationFormed):
            self._form(record)
        elif isinstance(record, r.GroupEstablished):
            self.established = True
            self.stood = record.generation
        elif isinstance(record, r.GenerationEnded):
            self.suspended = record.reason
            self.established = False
        else:
            self.outcome = record

    def _admit(self, candidate: v.Candidate) -> None:
        node_id = candidate.node_id
        before = self.absent.pop(node_id, candidate.incarnation)
        if before != candidate.incarnation:
            self._retire(node_id, before, "a newer process has taken its node id")
        self.claims[node_id] = Claim(candidate)

    def _remove(self, record: r.Removed) -> None:
        claim = self.claims.pop(record.node_id)
        if claim.since:
            self._retire(record.node_id, record.incarnation, record.reason)
        else:
            self.absent[record.node_id] = record.incarnation
        if record.node_id in self.ranks:
            if record.finished:
                self.finished.add(record.node_id)
                self.completed.add((record.node_id, record.incarnation))
                self.finishing = True
            else:
                self.lost[record.node_id] = record.reason
                if claim.since == self.generation and not self.established:
                    self.arriving.add(record.node_id)
                if claim.leaving is not None and self.suspended is not None:
                    self.parted.add(record.node_id)

    def _retire(self, node_id: str, incarnation: int, reason: str) -> None:
        self.retired.setdefault(node_id, {})[incarnation] = reason

    def _form(self, record: r.GenerationFormed) -> None:
        self.formed = record
        self.ranks = {member.candidate.node_id: member.rank for member in record.members}
        self.lost = {}
        self.parted = set()
        self.arriving = set()
        self.finished = set()
        self.established = False
        self.suspended = None
        newcomers = set(record.newcomer_ranks)
        for member in record.members:
            claim = self.claims[member.candidate.node_id]
            claim.since = claim.since or record.generation
            claim.newcomer = member.rank in newcomers
