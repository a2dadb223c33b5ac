"""The scheduler's state machine for one job: events and ``now`` in, decisions out.

Nothing here reads a clock, sends, writes or logs. See :mod:`muster.scheduler.core.events` for what goes in,
:mod:`muster.scheduler.core.decision` for what comes out, :mod:`muster.scheduler.core.machine` for the phases,
:mod:`muster.scheduler.core.ledger` for what is durable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import planning
from muster.scheduler.core import records as r
from muster.scheduler.core import values as v
from muster.scheduler.core.contacts import Contact
from muster.scheduler.core.decision import Decision
from muster.scheduler.core.ledger import Claim, Phase
from muster.scheduler.core.probing import Probing
from muster.scheduler.core.ranks import natural_key
from muster.scheduler.core.state import Suspicion
from muster.scheduler.core.status import JobView, worker_view
from muster.scheduler.core.wording import count, upper_first, who


class RecoveryError(ValueError):
    """Records do not make up the history of this job."""


class Job(Probing):
    """One training job, from the first Join to its end.

    Args:
        job_id: its name.
        settings: what the scheduler was told.

    Raises:
        ValueError: ``worker_num`` and the rank table disagree.
    """

    def __init__(self, job_id: str, settings: v.Settings) -> None:
        super().__init__(job_id, settings)
        self._handlers = {
            e.Joined: self._joined,
            e.Heard: self._heard,
            e.UniqueIdsPublished: self._published,
            e.BuiltReported: self._built_reported,
            e.QuiescedReported: self._quiesced_reported,
            e.PeerSuspected: self._peer_suspected,
            e.PeerLate: self._peer_late,
            e.Probed: self._probed,
            e.LeaveRequested: self._leave_requested,
            e.LeftCleanly: self._left,
            e.SessionLost: self._session_lost,
            e.DrainRequested: self._drain_requested,
            e.Expel: self._expel,
            e.Tick: self._tick,
            e.StoodStill: self._stood_still,
            e.FellBehind: self._fell_behind,
        }

    @classmethod
    def recover(cls, job_id: str, settings: v.Settings, records: Iterable[r.Record], now: float) -> Job:
        """The job as its records tell it. Its workers have ``node_timeout_s`` to come back.

        Raises:
            RecoveryError: the records are those of another job, or of other settings, or no history at all.
        """
        job = cls(job_id, settings)
        try:
            for record in records:
                job.apply(record)
        except (KeyError, AttributeError, TypeError) as error:
            raise RecoveryError(f"The records of job {job_id} contradict one another: {error!r}") from error
        job._check_opened()
        for node_id in job._ledger.claims:
            job._contacts.by_node[node_id] = Contact(None, now)
        job._start(now)
        job._note_phase(now)
        job._explain_recovered()
        job._silence_due = job._next_silence()
        return job

    @property
    def outcome(self) -> r.JobEnded | None:
        """How the job ended (``ok`` and why); None while it goes on."""
        return self._ledger.outcome

    def step(self, event: e.Event, now: float, *, more: bool = False) -> Decision:
        """Takes one event and says what follows from it.

        Args:
            event: what happened.
            now: seconds on the clock of all calls.
            more: another event follows at once, and the conclusions are drawn with that one: losses that
                come together make one new generation.
        """
        if not self._started:
            self._start(now)
        self._now = now
        self._records, self._messages, self._reasons = [], [], []
        self._revise()
        self._handlers[type(event)](event, now)  # type: ignore[operator]
        if type(event) is not e.Heard and not more:
            self._retry_held_back(now)
            self.advance(now)
        if self._outside and self.phase is Phase.ENDED:
            self._dismiss_outside()
        self._forget_sessions(event)
        return Decision(tuple(self._records), tuple(self._messages), " ".join(self._reasons))

    def deadline(self) -> float | None:
        """When the machine wants a Tick at the latest; never later than the true deadline, maybe earlier."""
        if not self._started or self._revised_min():
            return 0.0
        phase = self.phase
        if phase is Phase.ENDED:
            return None
        times = [self._silence_due, self._suspicion.due if self._suspicion else None, self._switch_due()]
        times += [self._hand_over_due, self._rounds_due()]
        if phase in (Phase.FORMING, Phase.BUILDING, Phase.SUSPENDED):
            times += [self._phase_since + self.settings.topo_timeout_s, self._report_due]
        if phase is Phase.FORMING and self._spares_fill_in > self._now:
            times.append(self._spares_fill_in)
        times.append(self._stall_due())
        return min((time for time in times if time is not None), default=None)

    def overdue(self, now: float) -> tuple[v.SessionId, ...]:
        """The streams whose workers the next Tick would declare lost for their silence."""
        if self.phase is Phase.ENDED or self._silence_due is None or now < self._silence_due:
            return ()
        silent = self._contacts.silent(now, self.settings.node_timeout_s)
        sessions = (self._contacts.session_of(node_id) for node_id in silent)
        return tuple(session for session in sessions if session is not None)

    def view(self, now: float) -> JobView:
        """The job as ``status`` shows it: members by rank, then those who wait."""
        ledger = self._ledger
        claims = sorted(
            ledger.claims.items(),
            key=lambda item: (ledger.rank_of(item[0]) % (1 << 32), natural_key(item[0])),
        )
        workers = (
            worker_view(ledger, claim, self._contacts.by_node[node_id], now, built=node_id in self._built)
            for node_id, claim in claims
        )
        return JobView(
            job_id=self.job_id,
            state=self.phase.value,
            generation=ledger.generation,
            worker_num=self._needed(),
            worker_min=ledger.opened.worker_min if ledger.opened else self.settings.worker_min,
            workers=tuple(workers),
            missing=self._missing(),
            reason=self._state_reason(),
        )

    # ------------------------------------------------------------ word from members

    def _claim_behind(self, session: v.SessionId, now: float) -> Claim | None:
        node_id = self._contacts.nodes.get(session)
        if node_id is None:
            return None
        self._contacts.by_node[node_id].last_heard = now
        return self._ledger.claims[node_id]

    def _member_behind(self, session: v.SessionId, generation: int, now: float) -> str | None:
        """Node id of the sender, if it is a member of the newest generation and speaks of that one."""
        claim = self._claim_behind(session, now)
        if claim is None or generation != self._ledger.generation or self.phase is Phase.ENDED:
            return None
        node_id = claim.candidate.node_id
        return node_id if self._ledger.rank_of(node_id) >= 0 else None

    def _heard(self, event: e.Heard, now: float) -> None:
        claim = self._claim_behind(event.session, now)
        if claim is None or event.generation > self._ledger.generation:
            return
        settled = self._ledger.established and event.generation == self._ledger.generation
        contact = self._contacts.by_node[claim.candidate.node_id]
        lacked_state = claim.newcomer and not contact.has_moved
        if contact.entered < event.entered_generation == self._ledger.generation:
            self._came_to_build(now)
        trains = self.phase is not Phase.BUILDING or self._switches_by_steps()
        if contact.hear(event, settled=settled) and trains:
            self._progress_since = now
            if self._stalled:
                self._stalled = False
                self._say(f"Training goes on at step {event.step}.")
        if lacked_state and contact.has_moved:  # who leaves may wait for that
            self.advance(now)

    def _came_to_build(self, now: float) -> None:
        """Whoever comes late, and may have been waited for beyond all time-outs, gets its time to build.

        Whoever comes soon does not, lest a group that fails again and again be tried for ever.
        """
        late = now > self._formed_at + self.settings.topo_timeout_s / 2
        if late and self.phase is Phase.BUILDING and self._ledger.ever_established:
            self._phase_since = now

    def _published(self, event: e.UniqueIdsPublished, now: float) -> None:
        node_id = self._member_behind(event.session, event.generation, now)
        if node_id is None or self._ledger.rank_of(node_id) != 0 or self.phase is not Phase.BUILDING:
            return
        if len(event.unique_ids) != self._unique_id_count() or not all(event.unique_ids):
            told = f"handed in {len(event.unique_ids)} of {count(self._unique_id_count(), 'unique id')}"
            self._lose(node_id, told, m.RefusalCode.MALFORMED)
        elif not self._unique_ids:
            self._unique_ids = event.unique_ids
            self._tell_members(m.UniqueIds(event.generation, event.unique_ids))

    def _built_reported(self, event: e.BuiltReported, now: float) -> None:
        node_id = self._member_behind(event.session, event.generation, now)
        if node_id is not None:
            self._mark_built(node_id)

    def _quiesced_reported(self, event: e.QuiescedReported, now: float) -> None:
        node_id = self._member_behind(event.session, event.generation, now)
        if node_id is None:
            return
        self._contacts.by_node[node_id].quiesce(event.last_started_step)
        if self.phase is Phase.RUNNING and planning.wanted_change(self._ledger, self.settings) is None:
            self._quiesce("a change was under way before the scheduler restarted")

    def _peer_suspected(self, event: e.PeerSuspected, now: float) -> None:
        claim = self._claim_behind(event.session, now)
        formed, phase = self._ledger.formed, self.phase
        if claim is None or formed is None or phase in (Phase.SUSPENDED, Phase.ENDED):
            return
        own = who(claim.candidate, self._ledger.rank_of(claim.candidate.node_id))
        peer = "its peers"
        if event.generation == formed.generation and 0 <= event.rank < len(formed.members):
            peer = who(formed.members[event.rank].candidate, event.rank)
        sentence = f"{own} could not go on with {peer}: {event.detail}"
        planned = phase is Phase.BUILDING and formed.switch_after_step >= 0
        if event.generation == self._ledger.stood and planned:
            self._broken = sentence  # the others may hang in the last step before the planned switch
        elif event.generation != formed.generation or self._ledger.rank_of(claim.candidate.node_id) < 0:
            return
        self._say(f"{upper_first(sentence)}.")
        if self._suspicion is None:
            self._suspicion = Suspicion(now + self.settings.node_timeout_s, sentence)
        self._want_round(now, urgent=True)

    def _peer_late(self, event: e.PeerLate, now: float) -> None:
        claim = self._claim_behind(event.session, now)
        if claim is not None and self._ledger.rank_of(claim.candidate.node_id) >= 0:
            self._want_round(now, urgent=False)

    def _probed(self, event: e.Probed, now: float) -> None:
        self._claim_behind(event.session, now)
        self._take_answer(event, now)

    # ------------------------------------------------------------ going

    def _leave_requested(self, event: e.LeaveRequested, now: float) -> None:
        claim = self._claim_behind(event.session, now)
        if claim is not None:
            self._plan_leave(claim, event.reason)

    def _drain_requested(self, event: e.DrainRequested, now: float) -> None:
        claim = self._ledger.claims.get(event.node_id)
        if claim is None or self.phase is Phase.ENDED:
            self._mention(f"Job {self.job_id} has no worker with node id {event.node_id}.")
            return
        if claim.leaving is not None:
            self._mention(f"{upper_first(who(claim.candidate))} is leaving already: {claim.leaving}.")
        self._plan_leave(claim, event.reason)

    def _plan_leave(self, claim: Claim, reason: str) -> None:
        """A member leaves at the next step boundary; anybody else at once."""
        node_id, phase = claim.candidate.node_id, self.phase
        rank = self._ledger.rank_of(node_id)
        if phase is Phase.ENDED or claim.leaving is not None:
            return
        if rank >= 0 and phase is not Phase.SUSPENDED:
            self._commit(r.LeavePlanned(node_id, claim.candidate.incarnation, reason))
            self._say(f"{upper_first(who(claim.candidate, rank))} will leave at a step boundary: {reason}.")
        else:
            self._dismiss(claim, self._farewell(reason), f"left: {reason}")
            self._say(f"{upper_first(who(claim.candidate))} has left: {reason}.")

    def _expel(self, event: e.Expel, now: float) -> None:
        if event.node_id in self._ledger.claims and self.phase is not Phase.ENDED:
            self._lose(event.node_id, f"was expelled: {event.reason}", m.RefusalCode.EXPELLED)

    def _left(self, event: e.LeftCleanly, now: float) -> None:
        claim = self._claim_behind(event.session, now)
        self._held_back.pop(event.session, None)
        if claim is None or self.phase is Phase.ENDED:
            self._messages.append((event.session, m.Ended(True, "Goodbye.", first_loss=self._first_loss)))
            return
        node_id = claim.candidate.node_id
        rank = self._ledger.rank_of(node_id)
        finished = event.finished and rank >= 0
        why = event.reason.rstrip(".") or "no reason given"
        told = "has completed the training" if finished else f"left: {why}"
        sentence = f"{who(claim.candidate, rank)} {told}"
        if not (finished or event.consequence):
            self._note_loss(node_id, sentence, exit_code=event.exit_code)
        self._messages.append((event.session, m.Ended(True, "Goodbye.", first_loss=self._first_loss)))
        self._remove(node_id, sentence, finished=finished)
        self._say(f"{upper_first(sentence)}.")

    def _session_lost(self, event: e.SessionLost, now: float) -> None:
        self._held_back.pop(event.session, None)
        node_id = self._contacts.nodes.get(event.session)
        if node_id is None or self.phase is Phase.ENDED:
            return
        if now < self._forgiving_until:
            self._contacts.detach(event.session)
            claim = self._ledger.claims[node_id]
            name = upper_first(who(claim.candidate, self._ledger.rank_of(node_id)))
            self._mention(f"{name} has lost its stream while the scheduler stood still; it may come back.")
            return
        silent_s = now - self._contacts.by_node[node_id].last_heard
        if silent_s <= 2 * self.settings.heartbeat_interval_s:  # as of a process that was killed
            self._lose(node_id, f"is lost: its stream ended ({event.detail})")
        elif silent_s < self.settings.node_timeout_s:  # as of one that pauses: it may live
            self._contacts.detach(event.session)
            name = upper_first(who(self._ledger.claims[node_id].candidate, self._ledger.rank_of(node_id)))
            left_s = self.settings.node_timeout_s - silent_s
            self._mention(
                f"{name} was not heard for {silent_s:.1f} s when its stream ended ({event.detail}); "
                f"it has {left_s:.1f} s to come back."
            )
        else:
            detail = f"not heard for {silent_s:.1f} s, until its stream ended ({event.detail})"
            self._lose(node_id, f"is lost: {detail}")

    # ------------------------------------------------------------ time

    def _start(self, now: float) -> None:
        self._started = True
        self._phase_since = self._progress_since = self._formed_at = now
        self._report_due = now + self.settings.waiting_report_interval_s

    def _tick(self, event: e.Tick, now: float) -> None:
        if self.phase is Phase.ENDED:
            return
        for node_id in self._contacts.silent(now, self.settings.node_timeout_s):
            told = f"is lost: not heard for {now - self._contacts.by_node[node_id].last_heard:.1f} s"
            self._lose(node_id, told, m.RefusalCode.SUPERSEDED)
        self._silence_due = self._next_silence()
        self._tend_rounds(now)
        self.advance(now)
        self._report(now)
        self._check_progress(now)

    def _stood_still(self, event: e.StoodStill, now: float) -> None:
        """Nobody is to blame for what broke or was not heard meanwhile: all may return, as after a restart.

        Workers end a stream that does not answer; that is seen only now, of streams begun meanwhile as well.
        """
        seconds, node_timeout_s = event.seconds, self.settings.node_timeout_s
        if self.phase is Phase.ENDED:
            return
        # Late turns add up, unless most of the time passes between them.
        self._late_s = max(0.0, self._late_s - (now - self._late_at) / 3) + seconds
        self._late_at = now
        if 3 * self._late_s < node_timeout_s:  # too short to break a stream
            self._excuse(seconds, now)
            return
        forgave = now < self._forgiving_until
        self._forgiving_until = now + node_timeout_s
        self._excuse(math.inf if 3 * seconds >= node_timeout_s else seconds, now)
        self._phase_since += seconds
        self._progress_since += seconds
        if self._spares_fill_in:
            self._spares_fill_in += seconds
        if self._suspicion is not None:
            self._suspicion = replace(self._suspicion, due=self._suspicion.due + seconds)
        if not forgave or 3 * seconds >= node_timeout_s:
            self._mention(
                f"The scheduler itself stood still for {self._late_s:.1f} s; "
                f"its workers have {node_timeout_s:g} s to be heard again."
            )

    def _fell_behind(self, event: e.FellBehind, now: float) -> None:
        """Silence counts only while the scheduler keeps up: it has not read what these workers have sent."""
        unread = [node_id for session in event.sessions if (node_id := self._contacts.nodes.get(session))]
        if unread and self.phase is not Phase.ENDED:
            self._forgiving_until = now + self.settings.node_timeout_s
            self._excuse(math.inf, now)
            self._mention(
                f"The scheduler is behind: what {count(len(unread), 'worker')} sent is not read yet; "
                f"its workers have {self.settings.node_timeout_s:g} s to be heard again."
            )

    def _excuse(self, seconds: float, now: float) -> None:
        """So much of everybody's silence does not count."""
        self._contacts.excuse(seconds, now)
        self._silence_due = self._next_silence()

    def _next_silence(self) -> float | None:
        oldest = self._contacts.oldest_word()
        return None if oldest is None else oldest + self.settings.node_timeout_s

    def _revised_min(self) -> int:
        """MS_WORKER_MIN, where the scheduler was started again with another one; 0: it is as it was."""
        opened, settings = self._ledger.opened, self.settings
        if opened is None or not settings.worker_num or self.phase is Phase.ENDED:
            return 0
        wanted = min(settings.worker_min or settings.worker_num, opened.worker_num)
        return wanted if wanted != opened.worker_min else 0

    def _revise(self) -> None:
        """Takes a changed MS_WORKER_MIN over: lowering it is how an operator frees a suspended job."""
        opened, wanted = self._ledger.opened, self._revised_min()
        if opened is not None and wanted:
            self._commit(replace(opened, worker_min=wanted))
            self._mention(f"MS_WORKER_MIN is {wanted} from now on; it was {opened.worker_min}.")

    def _check_opened(self) -> None:
        opened, settings = self._ledger.opened, self.settings
        if opened is None:
            if self._ledger.claims or self._ledger.formed:
                raise RecoveryError(f"The records of job {self.job_id} do not begin with its opening")
            return
        if opened.job_id != self.job_id:
            raise RecoveryError(f"The records are those of job {opened.job_id}, not of job {self.job_id}")
        if settings.worker_num not in (0, opened.worker_num):
            raise RecoveryError(
                f"The records of job {self.job_id} say MS_WORKER_NUM={opened.worker_num}, the scheduler has "
                f"{settings.worker_num}; set the same, or start without the old journal"
            )
