"""What a running job knows and says: durable and soft state, what goes out, and the words for it.

:mod:`muster.scheduler.core.machine` decides on top of this; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.scheduler.core import messages as m
from muster.scheduler.core import planning
from muster.scheduler.core import records as r
from muster.scheduler.core import values as v
from muster.scheduler.core.building import building_sentence
from muster.scheduler.core.contacts import Contacts
from muster.scheduler.core.ledger import Ledger, Phase
from muster.scheduler.core.progress import RankProgress, stall_report
from muster.scheduler.core.wording import STATELESS, count, missing, nodes, upper_first, waiting


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Collectives failed on a peer; unless it dies by then, the group is built anew with it."""

    due: float
    sentence: str


class JobState:
    """Everything one job remembers: ``_ledger`` survives a crash, the rest is soft."""

    def __init__(self, job_id: str, settings: v.Settings) -> None:
        table = settings.rank_table
        if table is not None and settings.worker_num not in (0, len(table.entries)):
            raise ValueError(
                f"MS_WORKER_NUM is {settings.worker_num}, but the rank table has {len(table.entries)} entries"
            )
        self.job_id = job_id
        self.settings = settings
        self._ledger = Ledger()
        self._contacts = Contacts()
        self._unique_ids: tuple[bytes, ...] = ()
        self._built: set[str] = set()
        self._trained: dict[str, int] = {}
        self._plan: str | None = None
        self._change = ""
        self._suspicion: Suspicion | None = None
        self._broken: str | None = None
        self._hand_over_due: float | None = None
        self._started = False
        self._phase_seen = Phase.FORMING
        self._phase_since = 0.0
        self._formed_at = 0.0
        self._report_due = 0.0
        self._spares_fill_in = 0.0
        self._now = 0.0
        self._progress_since = 0.0
        self._stalled = False
        self._reason = ""
        self._first_loss: m.FirstLoss | None = None
        self._records: list[r.Record] = []
        self._messages: list[tuple[v.SessionId, m.Message]] = []
        self._reasons: list[str] = []

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        durable = self._ledger.phase
        return Phase.QUIESCING if durable is Phase.RUNNING and self._plan is not None else durable

    def apply(self, record: r.Record) -> None:
        """Takes a durable record in: the only way in which durable state changes, here and in recovery."""
        self._ledger.apply(record)
        if isinstance(record, r.Removed):
            self._contacts.forget(record.node_id)
            self._built.discard(record.node_id)
        elif isinstance(record, r.GenerationFormed | r.GenerationEnded):
            self._unique_ids, self._built, self._plan = (), set(), None
            self._suspicion, self._broken, self._stalled = None, None, False
            self._hand_over_due = None
            self._formed_at = self._progress_since = self._now
            if isinstance(record, r.GenerationFormed):
                self._change = record.reason
                # What members have shown counts beyond a suspension.
                for contact in self._contacts.by_node.values():
                    contact.enter_generation()
        elif isinstance(record, r.GroupEstablished):
            self._unique_ids, self._suspicion, self._stalled = (), None, False
            self._first_loss = None  # the others have gone on
            self._trained = dict(self._ledger.ranks)

    # ------------------------------------------------------------ output

    def _commit(self, record: r.Record) -> None:
        self.apply(record)
        self._records.append(record)

    def _tell(self, node_id: str, message: m.Message) -> None:
        session = self._contacts.session_of(node_id)
        if session is not None:
            self._messages.append((session, message))

    def _tell_members(self, message: m.Message) -> None:
        for claim in self._ledger.living_members():
            self._tell(claim.candidate.node_id, message)

    def _say(self, sentence: str) -> None:
        self._mention(sentence)
        self._reason = sentence

    def _mention(self, sentence: str) -> None:
        """Says what happened to somebody; what the job's state is put down to stays."""
        self._reasons.append(sentence)

    def _remove(self, node_id: str, reason: str, *, finished: bool = False) -> None:
        claim = self._ledger.claims[node_id]
        self._commit(r.Removed(node_id, claim.candidate.incarnation, reason, finished))

    def _note_loss(self, node_id: str, sentence: str, *, exit_code: int = 0) -> None:
        """Remembers the first member that goes without having been asked to, before it is removed.

        Whoever asks later why the job ended is to hear of that one, not of those that ended because of it.
        A scheduler that is started again does not know it any more.
        """
        claim = self._ledger.claims[node_id]
        is_member = self._ledger.rank_of(node_id) >= 0
        if self._first_loss is None and is_member and claim.leaving is None:
            incarnation = claim.candidate.incarnation
            self._first_loss = m.FirstLoss(node_id, incarnation, sentence, exit_code)

    def _assignment(self, rank: int, lost: tuple[str, ...] = ()) -> m.Assignment:
        formed = self._ledger.formed
        assert formed is not None
        return m.Assignment(
            generation=formed.generation,
            rank=rank,
            members=formed.members,
            state_source_rank=formed.state_source_rank,
            newcomer_ranks=formed.newcomer_ranks,
            unique_id_count=self._unique_id_count(),
            reason=formed.reason,
            switch_after_step=formed.switch_after_step,
            lost=lost,
            launch=self._ledger.launch,
            first_loss=self._first_loss,
        )

    def _unique_id_count(self) -> int:
        return -(-len(self._ledger.ranks) // self.settings.ranks_per_unique_id)

    # ------------------------------------------------------------ words and reports

    def _needed(self) -> int:
        opened = self._ledger.opened
        return opened.worker_num if opened is not None else self.settings.worker_num

    def _present(self) -> list[v.Candidate]:
        return planning.choose(self._ledger, self.settings) if self._ledger.opened is not None else []

    def _seated(self) -> list[v.Candidate]:
        """Who has a place, or gets one; before the first group, spares stand back for others for a while."""
        forming = self.phase is Phase.FORMING
        return [candidate for candidate in self._present() if not (forming and candidate.spare)]

    def _waiting_sentence(self) -> str:
        sentence = waiting(self._seated(), self._needed(), self.settings.rank_table)
        spares = [c.candidate for c in self._ledger.claims.values() if c.candidate.spare]
        if self.phase is not Phase.FORMING or not spares:
            return sentence
        left_s = self._spares_fill_in - self._now
        when = f", to fill in after {left_s:.0f} s" if left_s > 0 else ""
        return f"{sentence}; {count(len(spares), 'spare')} in: {nodes(spares)}{when}"

    def _missing(self) -> tuple[str, ...]:
        if self.phase is Phase.ENDED:
            return ()
        return missing(self._seated(), self._needed(), self.settings.rank_table)

    def _size(self) -> str:
        return count(len(self._ledger.ranks), "member")

    def _standing(self) -> str:
        formed = self._ledger.formed
        remark = f": {STATELESS}" if formed is not None and formed.reason.endswith(STATELESS) else ""
        return f"Generation {self._ledger.generation} stands with {self._size()}{remark}."

    def _state_reason(self) -> str:
        """What the state is put down to; while all is well, news of single workers do not hide that."""
        complete = self.phase is Phase.RUNNING and not self._ledger.finished
        calm = not self._stalled and self._suspicion is None
        return self._standing() if complete and calm else self._reason

    def _building_sentence(self) -> str:
        return building_sentence(self._ledger, self._contacts, self._built, ids=bool(self._unique_ids))

    def _switches_by_steps(self) -> bool:
        """Whether members still train in the generation before, until the step at which to switch."""
        formed = self._ledger.formed
        return self.phase is Phase.BUILDING and formed is not None and formed.switch_after_step >= 0

    def _report(self, now: float) -> None:
        """The periodic word on who is in and who is missing."""
        if self.phase not in (Phase.FORMING, Phase.SUSPENDED, Phase.BUILDING) or now < self._report_due:
            return
        self._report_due = now + self.settings.waiting_report_interval_s
        formed = self._ledger.formed
        if self._switches_by_steps() and formed is not None:
            standing = self._stall_report(now).partition(": ")[2]
            begins = f"Generation {formed.generation} begins after step {formed.switch_after_step}"
            self._say(f"{begins}: {standing}" if standing else f"{begins}.")
            return
        if self.phase is Phase.BUILDING:
            since = f"for {now - self._formed_at:.0f} s"
            self._say(f"The group is being built {since}: {self._building_sentence()}.")
            # Whoever waits has its own log told for whom.
            self._tell_members(m.Waiting(len(self._built), len(self._ledger.ranks), self._reason))
            return
        self._broadcast_waiting()

    def _broadcast_waiting(self) -> None:
        message = self._waiting_message()
        for node_id in self._ledger.claims:
            self._tell(node_id, message)
        self._say(message.sentence)

    def _waiting_message(self) -> m.Waiting:
        sentence = upper_first(self._waiting_sentence()) + "."
        return m.Waiting(len(self._seated()), self._needed(), sentence)

    def _check_progress(self, now: float) -> None:
        """Reports a stall once; the job goes on waiting."""
        due = self._stall_due()
        if due is None or now < due:
            return
        report = self._stall_report(now)
        if report:
            self._stalled = True
            self._say(report)
        else:
            self._progress_since = now

    def _stall_due(self) -> float | None:
        """When training counts as standing still; None: it does already, or is not to go on."""
        trains = self.phase in (Phase.RUNNING, Phase.QUIESCING)
        rebuilds = self.phase is Phase.BUILDING and self._ledger.ever_established
        if self._stalled or not (trains or rebuilds):
            return None
        return self._progress_since + self.settings.stall_timeout_s

    def _stall_report(self, now: float) -> str:
        stalled_s = now - self._progress_since
        if self.phase is Phase.BUILDING and not self._switches_by_steps():
            return f"No progress for {stalled_s:.0f} s: {self._building_sentence()}."
        # Those that train, with their ranks there: while the next generation is awaited, not its members.
        standings = [
            RankProgress(rank, self._ledger.claims[node_id].candidate, contact)
            for node_id, rank in self._trained.items()
            if (contact := self._contacts.by_node.get(node_id)) is not None
            and (self.phase is not Phase.BUILDING or 0 < contact.entered < self._ledger.generation)
        ]
        return stall_report(standings, stalled_s)
