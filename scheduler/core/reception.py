"""How workers come: a new place, the old place after a broken stream, or a refusal."""

from __future__ import annotations

from muster.scheduler.core import admission
from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import records as r
from muster.scheduler.core import values as v
from muster.scheduler.core.ledger import Phase
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.wording import upper_first, who

LONG_LIST = 32
"""From this many workers on, an arrival is not told to everybody at once."""


class Reception(Machine):
    """The part of a job that deals with Join."""

    def __init__(self, job_id: str, settings: v.Settings) -> None:
        super().__init__(job_id, settings)
        self._held_back: dict[v.SessionId, e.Joined] = {}
        self._silence_due: float | None = None
        self._late_s = self._late_at = 0.0
        self._forgiving_until = 0.0  # a stream that ends before that may have broken while we stood still
        self._remarked: set[str] = set()
        self._machines: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._addresses: dict[v.SessionId, str] = {}  # where workers answer probes

    def _joined(self, event: e.Joined, now: float, *, again: bool = False) -> None:
        candidate = event.candidate
        self._held_back.pop(event.session, None)  # one answer to each stream, however often it asks
        self._addresses[event.session] = event.probe_address
        known = self._contacts.nodes.get(event.session)
        if known is not None and not self._is_of(known, candidate):
            self._lose(known, "asked for a second place on its stream", m.RefusalCode.MALFORMED)
            return
        answer = admission.check_process(self._ledger, event)
        if answer is not None:
            self._messages.append((event.session, answer))
        elif self._is_of(candidate.node_id, candidate):
            self._come_back(event, now)
        else:
            self._ask_for_place(event, now, again=again)

    def _is_of(self, node_id: str, candidate: v.Candidate) -> bool:
        claim = self._ledger.claims.get(node_id)
        return (
            claim is not None
            and node_id == candidate.node_id
            and claim.candidate.incarnation == candidate.incarnation
        )

    def _ask_for_place(self, event: e.Joined, now: float, *, again: bool) -> None:
        candidate = event.candidate
        refusal = admission.check_place(self._ledger, self.settings, candidate)
        if refusal is not None and self._may_free_up(refusal, candidate):
            self._held_back[event.session] = event
            if not again:
                self._mention(f"{upper_first(who(candidate))} waits until it is clear who comes back.")
            return
        if refusal is not None:
            self._messages.append((event.session, refusal))
            self._mention(refusal.sentence)
            return
        if self._ledger.opened is None:
            self._commit(r.JobOpened(self.job_id, *admission.sizes(self.settings, candidate)))
        self._commit(r.Admitted(candidate))
        contact = self._contacts.attach(candidate.node_id, event.session, now)
        contact.step = contact.baseline = event.step
        due = now + self.settings.node_timeout_s
        self._silence_due = due if self._silence_due is None else min(self._silence_due, due)
        self._greet(candidate.node_id, now)
        self._say(f"{upper_first(who(candidate))} has joined.")
        self._remark(candidate)
        self.advance(now)
        self._tell_of_arrival(candidate.node_id)

    def _remark(self, candidate: v.Candidate) -> None:
        """Warns of what is odd about this worker, of each thing once."""
        for topic, sentence in admission.remarks(self._ledger, candidate):
            self._warn_once(topic, sentence)
        host = candidate.host
        if self._machines.setdefault(host.name, host.id) != host.id:
            sentence = f"several machines are named {host.name}; give each a host name of its own."
            self._warn_once(f"host {host.name}", sentence)
        label = self._labels.setdefault(host.id, host.topology)
        if label != host.topology:
            one, other = sorted((label or admission.UNSET, host.topology or admission.UNSET))
            sentence = (
                f"workers of host {host.name} came with MS_TOPOLOGY {one} and {other}; give all the same."
            )
            self._warn_once(f"label {host.id}", sentence)

    def _warn_once(self, topic: str, sentence: str) -> None:
        if topic not in self._remarked:
            self._remarked.add(topic)
            self._mention(f"Warning: {sentence}")

    def _may_free_up(self, refusal: m.Refused, candidate: v.Candidate) -> bool:
        """Whether the place may be that of a worker that has not come back since the scheduler's restart."""
        contacts = self._contacts.by_node
        if len(self._held_back) > self._needed() + self.settings.spares:
            return False
        if refusal.code is m.RefusalCode.NODE_ID_TAKEN and candidate.node_id in contacts:
            return contacts[candidate.node_id].session is None
        if refusal.code in (m.RefusalCode.NODE_ID_TAKEN, m.RefusalCode.JOB_FULL):
            return any(contact.session is None for contact in contacts.values())
        return False

    def _retry_held_back(self, now: float) -> None:
        held, self._held_back = self._held_back, {}
        for event in held.values():
            self._joined(event, now, again=True)

    def _tell_of_arrival(self, node_id: str) -> None:
        if self.phase not in (Phase.FORMING, Phase.SUSPENDED):
            return
        if len(self._ledger.claims) <= LONG_LIST:
            self._broadcast_waiting()
        else:
            number = len(self._ledger.claims)
            self._tell(
                node_id, m.Waiting(number, self._needed(), f"{number} of {self._needed()} workers are in.")
            )

    def _come_back(self, event: e.Joined, now: float) -> None:
        """The worker opens its stream anew: everything it may have missed is told again."""
        node_id = event.candidate.node_id
        old = self._contacts.session_of(node_id)
        if old is not None and old != event.session:
            sentence = f"{upper_first(who(event.candidate))} has opened a newer stream."
            self._messages.append((old, m.Refused(m.RefusalCode.SUPERSEDED, sentence)))
        contact = self._contacts.attach(node_id, event.session, now)
        contact.step = max(contact.step, event.step)
        if event.built and event.held_generation == self._ledger.generation:
            self._mark_built(node_id)
        self._greet(node_id, now)
        if self.phase is Phase.FORMING:
            self._tell(node_id, self._waiting_message())
        self._mention(f"{upper_first(who(event.candidate, self._ledger.rank_of(node_id)))} is back.")

    def _greet(self, node_id: str, now: float) -> None:
        ledger, settings = self._ledger, self.settings
        claim = ledger.claims[node_id]
        no_place = ledger.rank_of(node_id) < 0 and sum(1 for _ in ledger.living_members()) >= self._needed()
        welcome = m.Welcome(
            settings.heartbeat_interval_s,
            settings.node_timeout_s,
            settings.topo_timeout_s,
            no_place or admission.is_spare(ledger, claim),
        )
        self._tell(node_id, welcome)
        rank, generation, phase = ledger.rank_of(node_id), ledger.generation, self.phase
        if phase is Phase.SUSPENDED and rank >= 0:
            wait_s = max(0.0, self._phase_since + settings.topo_timeout_s - now)
            self._tell(node_id, m.Suspended(generation, ledger.suspended or "", wait_s, self._first_loss))
        if phase not in (Phase.BUILDING, Phase.RUNNING, Phase.QUIESCING):
            return
        if rank >= 0 or (claim.leaving is not None and claim.since):
            self._tell(node_id, self._assignment(rank))
        if rank >= 0:
            self._tell_rest(node_id, generation, phase)

    def _tell_rest(self, node_id: str, generation: int, phase: Phase) -> None:
        """What a member needs besides its assignment."""
        if phase is Phase.BUILDING and self._unique_ids:
            self._tell(node_id, m.UniqueIds(generation, self._unique_ids))
        if phase is not Phase.BUILDING:
            self._tell(node_id, m.GroupBuilt(generation))
        if phase is Phase.QUIESCING:
            self._tell(node_id, m.Quiesce(generation, self._plan or ""))

    def _mark_built(self, node_id: str) -> None:
        if self.phase is Phase.BUILDING and self._ledger.rank_of(node_id) >= 0:
            self._built.add(node_id)

    def _lose(self, node_id: str, what: str, code: m.RefusalCode | None = None) -> None:
        """A worker is gone without a goodbye; with a code, it is told so on the stream that it still has."""
        claim = self._ledger.claims[node_id]
        sentence = f"{who(claim.candidate, self._ledger.rank_of(node_id))} {what}"
        if code is not None:
            self._tell(node_id, m.Refused(code, f"{upper_first(sentence)}."))
        departing = claim.leaving is not None and claim.since and self._ledger.rank_of(node_id) < 0
        if departing and self.phase is Phase.BUILDING:
            self._broken = sentence  # the others may be in a step that it was to finish with them
        self._note_loss(node_id, sentence)
        self._remove(node_id, sentence)
        self._say(f"{upper_first(sentence)}.")
