"""How a job moves from phase to phase.

Events only change facts (see ``job``): who has a claim, who has built, who has stopped.
:meth:`Machine.advance` then looks at the facts and draws every conclusion there is, so that it does not
matter in which order the facts came in.
"""

from __future__ import annotations

from collections.abc import Collection

from muster.scheduler.core import messages as m
from muster.scheduler.core import planning
from muster.scheduler.core import records as r
from muster.scheduler.core import values as v
from muster.scheduler.core.building import absent
from muster.scheduler.core.ledger import Claim, Phase
from muster.scheduler.core.state import JobState
from muster.scheduler.core.wording import STATELESS, all_in, are_in, count, listing, nodes, upper_first, who

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
