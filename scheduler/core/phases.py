"""The phases of a job: its state, and how it moves from one to the next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from muster.scheduler.core import messages as m
from muster.scheduler.core import messages as v
from muster.scheduler.core import planning
from muster.scheduler.core import records as r
from muster.scheduler.core.ledger import Claim, Ledger, Phase
from muster.scheduler.core.members import Contacts
from muster.scheduler.core.stall import RankProgress, absent, building_sentence, stall_report
from muster.scheduler.core.wording import (
    STATELESS,
    all_in,
    are_in,
    count,
    listing,
    missing,
    nodes,
    upper_first,
    waiting,
    who,
)


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


HAND_OVER_S = 15.0
"""How long a member that leaves waits for others to take the state: half of what Kubernetes gives it."""


class Machine(JobState):
    """The conclusions and transitions of one job; :class:`muster.scheduler.core.job.Job` feeds it events."""

    # ------------------------------------------------------------ conclusions

    def advance(self, now: float) -> None:
        """Draws every conclusion from the facts as they are."""
        moves = {
            Phase.FORMING: self._advance_forming,
            Phase.BUILDING: self._advance_building,
            Phase.RUNNING: self._advance_running,
            Phase.QUIESCING: self._advance_quiescing,
            Phase.SUSPENDED: self._advance_suspended,
        }
        while self.phase is not Phase.ENDED and moves[self.phase](now):
            self._note_phase(now)
        self._note_phase(now)

    def _note_phase(self, now: float) -> None:
        if self.phase is not self._phase_seen:
            self._phase_seen = self.phase
            self._phase_since = self._progress_since = now
            self._report_due = now + self.settings.waiting_report_interval_s

    def _timed_out(self, now: float) -> bool:
        return now >= self._phase_since + self.settings.topo_timeout_s

    def _advance_forming(self, now: float) -> bool:
        opened = self._ledger.opened
        if opened is not None and self._enough_to_form(opened.worker_num, now):
            return self._regroup(now, all_in(opened.worker_num))
        if not self._timed_out(now):
            return False
        if opened is not None and len(planning.choose(self._ledger, self.settings)) >= opened.worker_min:
            return self._regroup(now, f"no more came within {self.settings.topo_timeout_s:g} s")
        return self._end(False, f"The group did not form in time: {self._waiting_sentence()}.")

    def _enough_to_form(self, worker_num: int, now: float) -> bool:
        """Whether to form the first group. Dedicated spares stand back for the others for a while."""
        claims = self._ledger.claims
        if len(claims) < worker_num:
            self._spares_fill_in = 0.0
            return False
        if not self._spares_fill_in:
            self._spares_fill_in = now + self.settings.waiting_report_interval_s
        ordinary = sum(not claim.candidate.spare for claim in claims.values())
        no_more_can_come = len(claims) >= worker_num + self.settings.spares
        if ordinary < worker_num and not no_more_can_come and now < self._spares_fill_in:
            return False
        return len(planning.choose(self._ledger, self.settings)) >= worker_num

    def _advance_building(self, now: float) -> bool:
        ledger = self._ledger
        if self._broken or ledger.lost.keys() - ledger.arriving:
            return self._regroup(now, self._departure())
        if (ledger.lost or ledger.finished) and ledger.formed is not None:
            # Who finished has done the last step before a planned switch, and who was still to arrive has no
            # part in it; the others are still to do it.
            return self._regroup(now, self._departure(), ledger.formed.switch_after_step)
        if len(self._built) == len(self._ledger.ranks):
            self._commit(r.GroupEstablished(self._ledger.generation))
            self._tell_members(m.GroupBuilt(self._ledger.generation))
            self._say(self._standing())
            return True
        if self._suspicion_due(now) or self._switch_overdue(now):
            return True
        if ledger.formed is not None and ledger.formed.switch_after_step < 0 and self._hand_over_overdue(now):
            return True
        if not (self._stalled or self._timed_out(now)):
            return False
        busy = absent(ledger, self._contacts, self._built)
        if self._stalled and any(claim.leaving is not None for claim in busy):
            return self._regroup(now, planning.wanted_change(ledger, self.settings) or "")
        if not self._timed_out(now):
            return False
        if busy:  # whoever trains on cannot be told from who hangs: it is reported, as in a running job
            self._phase_since = now
            return False
        return self._end(False, f"The group was not built in time: {self._building_sentence()}.")

    def _advance_running(self, now: float) -> bool:
        ledger = self._ledger
        if ledger.lost or len(ledger.finished) == len(ledger.ranks):
            return self._regroup(now, self._departure())
        if self._suspicion_due(now) or self._hand_over_overdue(now):
            return True
        if self._hand_over_due is not None:  # whoever leaves is still needed
            return False
        change = planning.wanted_change(ledger, self.settings)
        return change is not None and self._quiesce(change)

    def _advance_quiescing(self, now: float) -> bool:
        ledger = self._ledger
        if ledger.lost or len(ledger.finished) == len(ledger.ranks):
            return self._regroup(now, self._departure())
        if self._suspicion_due(now) or self._switch_overdue(now):
            return True
        if not self._contacts.all_quiesced(ledger):
            return False
        change = self._planned()  # by now more may leave
        if self._suspicion is not None:  # whose collective failed cannot finish the step with the others
            return self._regroup(now, change)
        return self._regroup(now, change, self._contacts.last_started_step())

    def _advance_suspended(self, now: float) -> bool:
        present = planning.choose(self._ledger, self.settings)
        opened = self._ledger.opened
        if self._ledger.finishing:
            return self._regroup(now, self._departure())
        if opened is not None and len(present) >= opened.worker_min:
            return self._regroup(now, f"{are_in(len(present))} again")
        if self._timed_out(now):
            return self._end(False, f"No group could be formed again in time: {self._waiting_sentence()}.")
        return False

    def _departure(self) -> str:
        """Why members are gone, in words."""
        reasons = [*self._ledger.lost.values()]
        if self._broken:
            reasons.append(self._broken)
        if not reasons and self._ledger.finished:
            reasons.append(f"node {listing(sorted(self._ledger.finished))} finished")
        return listing(reasons)

    def _suspicion_due(self, now: float) -> bool:
        if self._suspicion is None or now < self._suspicion.due:
            return False
        return self._regroup(now, self._suspicion.sentence)

    def _switch_due(self) -> float | None:
        """Until when a planned change must have been carried out; None: there is none."""
        if self._switches_by_steps() or self.phase is Phase.QUIESCING:
            return self._phase_since + self._switch_patience_s()
        return None

    def _switch_patience_s(self) -> float:
        return min(self.settings.stall_timeout_s, self.settings.topo_timeout_s)

    def _switch_overdue(self, now: float) -> bool:
        """Some member cannot come to the step at which to switch: the change is made at once instead."""
        due = self._switch_due()
        if due is None or now < due:
            return False
        stalled = now >= self._progress_since + self.settings.stall_timeout_s
        if stalled and (report := self._stall_report(now)):
            self._say(report)
        self._phase_since = now
        took = f"took over {self._switch_patience_s():g} s"
        return self._regroup(now, f"the planned change ({self._planned()}) {took}")

    def _planned(self) -> str:
        """Who joins or leaves by the planned change under way, in words."""
        if self.phase is Phase.QUIESCING:
            return planning.wanted_change(self._ledger, self.settings) or self._plan or ""
        return self._change

    def _stateless(self) -> frozenset[str]:
        return frozenset(self._contacts.stateless(self._ledger))

    def _hand_over_overdue(self, now: float) -> bool:
        """Nobody has taken the state in time: the members that leave with it go, and save it if they can."""
        stateless = self._stateless()
        if not planning.is_handing_over(self._ledger, stateless):
            self._hand_over_due = None
        elif self._hand_over_due is None:
            self._hand_over_due = now + HAND_OVER_S
        elif now >= self._hand_over_due:
            self._hand_over_due = None
            for claim in planning.leaving_holders(self._ledger, stateless):
                told = f"left: nobody took the training state from it within {HAND_OVER_S:g} s"
                self._say(f"{upper_first(who(claim.candidate))} {told}.")
                self._dismiss(claim, self._farewell(claim.leaving or ""), told)
            return True
        return False

    # ------------------------------------------------------------ transitions

    def _quiesce(self, reason: str) -> bool:
        self._plan, self._hand_over_due = reason, None
        self._tell_members(m.Quiesce(self._ledger.generation, reason))
        self._say(f"A change of members is prepared: {reason}.")
        return True

    def _regroup(self, now: float, reason: str, switch_after_step: int = -1) -> bool:
        """Forms the next generation from whoever is there, suspends the job, or ends it."""
        ledger = self._ledger
        assert ledger.opened is not None
        stateless = self._stateless()
        chosen = planning.choose(ledger, self.settings, stateless)
        if ledger.finishing and not chosen:
            if ledger.lost.keys() <= ledger.parted:
                return self._end(True, "All members have completed the training.")
            return self._end(False, f"Workers were lost while the others finished: {reason}.")
        if len(chosen) < (1 if ledger.finishing else ledger.opened.worker_min):
            return self._suspend(reason)
        lost = tuple(ledger.lost.values())
        if ledger.finishing:
            self._release_idle({candidate.node_id for candidate in chosen})
        change = f"{self._change}; {reason}" if self._switches_by_steps() else reason
        reason += self._remark_on_state(chosen, stateless)
        record = planning.next_generation(
            ledger, chosen, stateless=stateless, reason=reason, switch_after_step=switch_after_step
        )
        self._commit(record)
        self._change = change
        for member in record.members:
            self._tell(member.candidate.node_id, self._assignment(member.rank, lost))
        for claim in self._departing():
            self._tell(claim.candidate.node_id, self._assignment(-1, lost))
        self._say(f"Generation {record.generation} is formed with {self._size()}: {reason}.")
        return True

    def _remark_on_state(self, chosen: Collection[v.Candidate], stateless: Collection[str]) -> str:
        """What is odd about the next generation's state, to follow the reason for which it is formed."""
        ledger = self._ledger
        givers = [c.node_id for c in chosen if ledger.claims[c.node_id].leaving is not None]
        if givers:
            return f"; node {listing(givers)} stays until it has handed over the training state"
        known = any(planning.holds_state(ledger, c.node_id, stateless) for c in chosen)
        return f"; {STATELESS}" if ledger.ever_established and not known else ""

    def _release_idle(self, chosen: Collection[str]) -> None:
        """Some have finished: whoever holds neither a place nor the state is not needed any more."""
        for node_id, claim in list(self._ledger.claims.items()):
            if node_id not in chosen and claim.leaving is None:
                sentence = "The job is finishing and needs no more workers."
                self._dismiss(claim, m.Ended(True, sentence), "is not needed any more")

    def _departing(self) -> list[Claim]:
        """Former members that are on their way out as planned."""
        return [
            claim
            for node_id, claim in self._ledger.claims.items()
            if claim.leaving is not None and claim.since and self._ledger.rank_of(node_id) < 0
        ]

    def _suspend(self, reason: str) -> bool:
        """Too few members are left: the survivors keep their state and wait."""
        ledger = self._ledger
        if ledger.phase is Phase.SUSPENDED:
            return False
        assert ledger.opened is not None
        self._commit(r.GenerationEnded(ledger.generation, reason))
        for claim in [claim for claim in ledger.claims.values() if claim.leaving is not None]:
            self._dismiss(claim, self._farewell(claim.leaving or ""), "left as planned")
        sentence = self._suspension()
        wait_s = self.settings.topo_timeout_s  # the worker puts it into words itself
        stateless = self._stateless()
        members = [claim.candidate.node_id for claim in ledger.living_members()]
        heard = [node_id for node_id in members if self._contacts.session_of(node_id) is not None]
        holders = [node_id for node_id in heard if planning.holds_state(ledger, node_id, stateless)]
        for node_id in heard:
            save = node_id in holders[:1]
            self._tell(
                node_id, m.Suspended(ledger.generation, f"{sentence}.", wait_s, self._first_loss, save)
            )
        self._say(f"{sentence}; waiting up to {wait_s:g} s for more.")
        return True

    def _suspension(self) -> str:
        """Why the job is suspended, and who is left."""
        ledger = self._ledger
        assert ledger.opened is not None
        survivors = [claim.candidate for claim in ledger.living_members()]
        left = count(len(survivors), "member")
        return (
            f"Generation {ledger.generation} is over: {ledger.suspended}. {left} left "
            f"({nodes(survivors) or 'none'}), MS_WORKER_MIN is {ledger.opened.worker_min}"
        )

    def _explain_recovered(self) -> None:
        """What ``status`` says of a job that was just recovered, until something happens."""
        ledger, phase = self._ledger, self.phase
        if phase is Phase.SUSPENDED:
            wait_s = self.settings.topo_timeout_s
            self._reason = f"{self._suspension()}; waiting up to {wait_s:g} s for more."
        elif phase is Phase.BUILDING and ledger.formed is not None:
            self._reason = (
                f"Generation {ledger.generation} is formed with {self._size()}: {ledger.formed.reason}."
            )
        elif phase is Phase.FORMING and ledger.claims:
            self._reason = self._waiting_message().sentence

    @staticmethod
    def _farewell(reason: str) -> m.Ended:
        """The last word to a worker that leaves as asked where no next generation gives it leave."""
        return m.Ended(True, f"This worker leaves the job: {reason}.", leave=True)

    def _dismiss(self, claim: Claim, message: m.Ended, reason: str) -> None:
        """Tells a worker its last word and takes its claim away."""
        self._tell(claim.candidate.node_id, message)
        self._remove(claim.candidate.node_id, f"{who(claim.candidate)} {reason}")

    def _end(self, ok: bool, reason: str) -> bool:
        formed = self._ledger.formed is not None
        self._commit(r.JobEnded(ok, reason))
        ended = m.Ended(ok, reason, first_loss=self._first_loss)
        message = ended if formed else m.Refused(m.RefusalCode.TOPO_TIMEOUT, reason)
        for node_id in self._ledger.claims:
            self._tell(node_id, message)
        self._contacts.nodes.clear()
        self._say(reason)
        return True
