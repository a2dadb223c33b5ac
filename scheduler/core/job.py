"""The scheduler's state machine for one job: events and ``now`` in, decisions out.

Nothing here reads a clock, sends, writes or logs. See :mod:`muster.scheduler.core.events` for what goes in,
:mod:`muster.scheduler.core.events` for what comes out, :mod:`muster.scheduler.core.phases` for the phases,
:mod:`muster.scheduler.core.ledger` for what is durable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from muster.scheduler.core import admission, planning, reachability
from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import messages as v
from muster.scheduler.core import records as r
from muster.scheduler.core.events import Decision
from muster.scheduler.core.ledger import Claim, Phase
from muster.scheduler.core.members import Contact, JobView, worker_view
from muster.scheduler.core.phases import Machine, Suspicion
from muster.scheduler.core.ranks import natural_key
from muster.scheduler.core.wording import count, listing, upper_first, who

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


ROUND_S = 15.0
"""How long answers are waited for; a worker gives each probe up before that."""

ROUND_PAUSE_S = 5.0
"""The least time from one round to the next."""

CALM_PAUSE_S = 60.0
"""What that grows to while rounds find that all reach each other."""

TOGETHER_S = 1.0
"""Two that began to probe within so long of each other both lived meanwhile: who stood still begins later."""

CANDIDATES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """One worker that takes part in a round; ``seated``: it has a claim, and is not to earn one."""

    candidate: v.Candidate
    targets: tuple[v.SessionId, ...]
    seated: bool


@dataclass(slots=True)
class Round:
    """A round under way."""

    number: int
    due: float
    among_members: bool
    asked: dict[v.SessionId, Asked]
    generation: int = 0
    answers: dict[v.SessionId, e.Probed] = field(default_factory=dict)
    began: dict[v.SessionId, float] = field(default_factory=dict)

    def failed(self, session: v.SessionId, target: v.SessionId) -> str | None:
        """Why the one could not reach the other; "" if it could; None if that is not known.

        It is not where one of them may have stood still while the other probed it.
        """
        answer = self.answers.get(session)
        if answer is None or target not in self.answers or target not in self.asked[session].targets:
            return None
        why = dict(answer.unreached).get(self.asked[target].candidate.node_id, "")
        together = abs(self.began[session] - self.began[target]) <= TOGETHER_S
        return why if together or not why else None

    def take(self, answer: e.Probed, now: float) -> None:
        """Takes an answer in."""
        self.answers[answer.session] = answer
        self.began[answer.session] = now - answer.seconds


@dataclass(frozen=True, slots=True)
class Hang:
    """A member that others wait for: since when, and where it stands."""

    since: float
    place: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Calm:
    """All members of a generation were found to reach each other: until when that is not asked again."""

    generation: int = 0
    until: float = 0.0
    pause_s: float = ROUND_PAUSE_S

    def again(self, generation: int, now: float) -> Calm:
        """It was found once more."""
        same = generation == self.generation
        pause_s = min(2 * self.pause_s, CALM_PAUSE_S) if same else ROUND_PAUSE_S
        return Calm(generation, now + pause_s, pause_s)


class Probing(Reception):
    """The part of a job that finds out who can reach whom, and for whom the others wait."""

    def __init__(self, job_id: str, settings: v.Settings) -> None:
        super().__init__(job_id, settings)
        self._round: Round | None = None
        self._round_number = 0
        self._no_round_before = 0.0
        self._round_wanted = False
        self._calm = Calm()
        self._hangs: dict[str, Hang] = {}
        self._told = ""
        self._barred: dict[str, str] = {}  # why, by the id of a host, or by a worker's node id
        self._outside: dict[v.SessionId, e.Joined] = {}

    # ------------------------------------------------------------ rounds

    def _want_round(self, now: float, *, urgent: bool) -> None:
        """The members should probe each other: at once, or when the round under way is over.

        Unless all have just been found to reach each other, and nothing but a wait speaks against that.
        """
        current = self._round
        if current is not None and current.among_members:
            if current.generation == self._ledger.generation:
                return
            self._round = None  # it was among other members
        if urgent or self._calm.generation != self._ledger.generation or now >= self._calm.until:
            self._round_wanted = True
            self._tend_rounds(now)

    def _begin_round(self, now: float, *, among_members: bool) -> None:
        """Asks everybody to probe."""
        self._round_wanted = self._round_wanted and not among_members
        self._round_number = max(self._round_number + 1, int(now * 1000))
        self._no_round_before = now + ROUND_PAUSE_S
        asked = dict(self._participants(among_members=among_members))
        if not asked:
            return
        self._round = Round(self._round_number, now + ROUND_S, among_members, asked, self._ledger.generation)
        for session, each in asked.items():
            targets = [(asked[t].candidate.node_id, self._addresses[t]) for t in each.targets]
            self._messages.append((session, m.Probe(self._round_number, tuple(targets))))

    def _participants(self, *, among_members: bool) -> Iterator[tuple[v.SessionId, Asked]]:
        hosts: dict[str, list[v.SessionId]] = {}
        seated: dict[v.SessionId, v.Candidate] = {}
        for claim in self._seated_claims():
            session = self._contacts.session_of(claim.candidate.node_id)
            if session is not None and self._addresses.get(session):
                hosts.setdefault(claim.candidate.host.id, []).append(session)
                seated[session] = claim.candidate
        outside = dict(list(self._outside.items())[:CANDIDATES_AT_ONCE])
        for session, candidate in seated.items():
            here = hosts[candidate.host.id]
            place = here.index(session)
            others = [there for host, there in hosts.items() if host != candidate.host.id]
            targets = [there[place % len(there)] for there in others] if among_members else []
            if place == 0:
                targets += [s for s, each in outside.items() if each.candidate.host.id != candidate.host.id]
            if targets or among_members:
                yield session, Asked(candidate, tuple(targets), seated=True)
        for session, event in outside.items():
            others = [there for host, there in hosts.items() if host != event.candidate.host.id]
            yield session, Asked(event.candidate, tuple(there[0] for there in others), seated=False)

    def _seated_claims(self) -> list[Claim]:
        members = list(self._ledger.living_members())
        known = {claim.candidate.node_id for claim in members}
        return members + [c for node_id, c in self._ledger.claims.items() if node_id not in known]

    def _take_answer(self, event: e.Probed, now: float) -> None:
        current = self._round
        if current is None or event.round != current.number or event.session not in current.asked:
            return
        current.take(event, now)
        if all(s in current.answers for s in current.asked if self._is_there(s, current.asked[s])):
            self._conclude(now)

    def _is_there(self, session: v.SessionId, asked: Asked) -> bool:
        if not asked.seated:
            return session in self._outside
        return self._contacts.nodes.get(session) == asked.candidate.node_id

    def _tend_rounds(self, now: float) -> None:
        """Ends a round whose time is over, and begins one that is due."""
        if self.phase is Phase.ENDED:
            return
        if self._round is not None and now >= self._round.due:
            self._conclude(now)
        if self._round is None and now >= self._no_round_before:
            if self._round_wanted or (self._hangs and now >= self._hang_due()):
                self._begin_round(now, among_members=True)
            elif self._outside:
                self._begin_round(now, among_members=False)

    def _rounds_due(self) -> float | None:
        """When :meth:`_tend_rounds` has something to do; None: nothing."""
        if self._round is not None:
            return self._round.due
        times = [self._no_round_before] if self._outside or self._round_wanted else []
        times += [self._hang_due()] if self._hangs else []
        return max(min(times), self._no_round_before) if times else None

    def _hang_due(self) -> float:
        return min(hang.since for hang in self._hangs.values()) + self.settings.hang_timeout_s

    def _conclude(self, now: float) -> None:
        current, self._round = self._round, None
        assert current is not None
        gone = [s for s, asked in current.asked.items() if not self._is_there(s, asked)]
        for session in gone:
            current.answers.pop(session, None)
        trains = self.phase in (Phase.BUILDING, Phase.RUNNING, Phase.QUIESCING)
        if current.among_members and trains:
            if self._expel_unreachable(current):
                self._calm = Calm()
            else:
                self._look_for_hangs(current, now)
                self._calm = self._calm.again(current.generation, now)
        self._take_in(current, now)

    # ------------------------------------------------------------ who cannot be reached

    def _expel_unreachable(self, current: Round) -> bool:
        """Expels whoever the others cannot reach; whether some cannot reach each other."""
        members = {
            session: asked.candidate
            for session, asked in current.asked.items()
            if asked.seated and self._ledger.rank_of(asked.candidate.node_id) >= 0
        }
        between, single = _accusations(current, members)
        if not between and not single:
            return False
        hosts = [candidate.host.id for candidate in members.values()]
        gone = reachability.leaving({h: self._party(members, h) for h in hosts}, between)
        there = [candidate.node_id for candidate in members.values() if candidate.host.id not in gone]
        workers = {node_id: self._party(members, node_id) for node_id in there}
        single = {pair for pair in single if set(pair) <= workers.keys()}
        unreachable = reachability.leaving(workers, single)
        sentence = self._broken_pairs(current, members)
        everybody = [claim.candidate for claim in self._seated_claims()]
        out = [c for c in everybody if c.host.id in gone or c.node_id in unreachable]
        if self._may_expel(out, sentence):
            for candidate in out:
                key = candidate.host.id if candidate.host.id in gone else candidate.node_id
                self._barred[key] = sentence
                told = f"was expelled: {sentence}; all that stay reach each other"
                self._lose(candidate.node_id, told, m.RefusalCode.SUPERSEDED)
        return True

    def _party(self, members: dict[v.SessionId, v.Candidate], name: str) -> reachability.Party:
        """A host by its id, or a worker by its node id."""
        ledger, stateless = self._ledger, self._stateless()
        mine = [c.node_id for c in members.values() if name in (c.host.id, c.node_id)]
        return reachability.Party(
            workers=len(mine),
            holds_state=any(planning.holds_state(ledger, node_id, stateless) for node_id in mine),
            lowest_rank=min(ledger.rank_of(node_id) for node_id in mine),
        )

    def _broken_pairs(self, current: Round, members: dict[v.SessionId, v.Candidate]) -> str:
        """Which hosts cannot reach each other, in words, with the first reason that was given."""
        pairs: dict[tuple[str, str], str] = {}
        for session, target, why in _failures(current, members):
            names = sorted((members[session].host.name, members[target].host.name))
            pairs.setdefault((names[0], names[1]), why)
        told = listing([f"hosts {one} and {other}" for one, other in pairs])
        return f"{told} cannot reach each other ({next(iter(pairs.values()))})"

    def _may_expel(self, out: Iterable[v.Candidate], sentence: str) -> bool:
        """Whether enough members would be left; says so if not."""
        ledger = self._ledger
        assert ledger.opened is not None
        gone = {candidate.node_id for candidate in out}
        least = 1 if ledger.finishing else ledger.opened.worker_min
        left = [c for c in ledger.living_members() if c.leaving is None and c.candidate.node_id not in gone]
        if len(left) >= least:
            return True
        told = f"only {len(left)} could go on, and MS_WORKER_MIN is {least}"
        self._say_once(f"{upper_first(sentence)}; nobody is expelled, because {told}.")
        return False

    def _say_once(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            self._say(sentence)

    # ------------------------------------------------------------ who does not come

    def _look_for_hangs(self, current: Round, now: float) -> None:
        """Names members that answer and do not come to what others wait for; expels them in the end."""
        members = {
            current.asked[session].candidate.node_id: answer
            for session, answer in current.answers.items()
            if self._ledger.rank_of(current.asked[session].candidate.node_id) >= 0
        }
        waiting = [node_id for node_id, answer in members.items() if answer.late and answer.waits]
        before, self._hangs = self._hangs, {}
        if not waiting:
            return
        furthest = max(self._place(node_id) for node_id in waiting)
        for node_id, answer in members.items():
            # Who has issued all that the others have may wait for its device, out of sight.
            if answer.waits or (answer.late and self._place(node_id) >= furthest):
                continue
            if answer.busy:
                name = who(self._ledger.claims[node_id].candidate, self._ledger.rank_of(node_id))
                self._say_once(f"{upper_first(name)} is busy alone: {answer.busy}; the others wait for it.")
                continue
            hang = Hang(now, self._place(node_id))
            if node_id in before and before[node_id].place == hang.place:
                hang = before[node_id]
            else:
                self._told = ""  # said of each hang anew
            self._hangs[node_id] = hang
        if self._hangs:
            self._deal_with_hangs(now, len(waiting))

    def _place(self, node_id: str) -> tuple[int, int, int]:
        contact = self._contacts.by_node[node_id]
        return contact.step, contact.started_step, contact.recent[-1].sequence if contact.recent else 0

    def _deal_with_hangs(self, now: float, waiting: int) -> None:
        limit_s = self.settings.hang_timeout_s
        claims = {node_id: self._ledger.claims[node_id] for node_id in self._hangs}
        names = listing([who(c.candidate, self._ledger.rank_of(node_id)) for node_id, c in claims.items()])
        waits = f"{count(waiting, 'member')} wait{'s' if waiting == 1 else ''}"
        self._say_once(
            f"{upper_first(names)} can be reached and does not come to the step for which {waits}; "
            f"expelled after {limit_s:g} s (MS_HANG_TIMEOUT), unless it says session.busy()."
        )
        due = [c.candidate for node_id, c in claims.items() if now >= self._hangs[node_id].since + limit_s]
        if not due:
            return
        if self._may_expel(due, f"{names} hangs"):
            for candidate in due:
                told = f"was expelled: it has not come to the step for which {waits} in {limit_s:g} s"
                self._lose(candidate.node_id, f"{told} (MS_HANG_TIMEOUT)", m.RefusalCode.SUPERSEDED)
        for candidate in due:
            self._hangs.pop(candidate.node_id)  # if it stays, its time begins anew

    # ------------------------------------------------------------ who comes back

    def _ask_for_place(self, event: e.Joined, now: float, *, again: bool) -> None:
        refused = admission.check_place(self._ledger, self.settings, event.candidate) is not None
        if refused or not self._is_barred(event.candidate) or not self._seated_claims():
            super()._ask_for_place(event, now, again=again)
            return
        for session, other in list(self._outside.items()):
            if other.candidate.node_id == event.candidate.node_id:
                del self._outside[session]
        self._outside[event.session] = event
        settings = self.settings
        why = self._barred.get(event.candidate.host.id) or self._barred[event.candidate.node_id]
        name = upper_first(who(event.candidate))
        told = f"{name} is taken in when it and the members reach each other: {why}."
        self._messages += [
            (
                event.session,
                m.Welcome(settings.heartbeat_interval_s, settings.node_timeout_s, settings.topo_timeout_s),
            ),
            (event.session, m.Waiting(len(self._present()), self._needed(), told)),
        ]
        self._mention(told)

    def _is_barred(self, candidate: v.Candidate) -> bool:
        return candidate.host.id in self._barred or candidate.node_id in self._barred

    def _take_in(self, current: Round, now: float) -> None:
        """Takes in those that were outside and that all members have reached, of one host at a time."""
        proven: str | None = None
        for session, asked in current.asked.items():
            event = self._outside.get(session)
            if asked.seated or event is None or not self._is_proven(current, session):
                continue
            if proven is None:
                proven = asked.candidate.host.id
            if asked.candidate.host.id == proven:
                del self._outside[session]
                self._barred.pop(proven, None)
                self._barred.pop(asked.candidate.node_id, None)
                self._joined(event, now, again=True)

    def _is_proven(self, current: Round, session: v.SessionId) -> bool:
        asked = current.asked[session]
        askers = [s for s, other in current.asked.items() if other.seated and session in other.targets]
        tries = [(session, target) for target in asked.targets] + [(s, session) for s in askers]
        return session in current.answers and all(current.failed(*each) == "" for each in tries)

    def _forget_sessions(self, event: e.Event) -> None:
        """Streams that have ended, or are about to, have no part in rounds any more."""
        over = [s for s, told in self._messages if isinstance(told, m.Refused | m.Ended)]
        if isinstance(event, e.SessionLost | e.LeftCleanly):
            over.append(event.session)
        for session in over:
            self._addresses.pop(session, None)
            self._outside.pop(session, None)

    def _dismiss_outside(self) -> None:
        """The job has ended: those outside are told so."""
        outcome = self._ledger.outcome
        assert outcome is not None
        for session in self._outside:
            self._messages.append((session, m.Ended(outcome.ok, outcome.reason)))
        self._outside.clear()


def _failures(
    current: Round, members: dict[v.SessionId, v.Candidate]
) -> Iterator[tuple[v.SessionId, v.SessionId, str]]:
    """Who could not reach whom, and why; only where both have answered."""
    for session in members:
        for target in current.asked[session].targets:
            why = current.failed(session, target) if target in members else None
            if why:
                yield session, target, why


def _accusations(
    current: Round, members: dict[v.SessionId, v.Candidate]
) -> tuple[set[reachability.Accusation], set[reachability.Accusation]]:
    """Between hosts, where none got through; between single workers, where others of their hosts did."""
    through, failed = set(), set()
    for session, candidate in members.items():
        for target in current.asked[session].targets:
            if target in members:
                why = current.failed(session, target)
                hosts = (candidate.host.id, members[target].host.id)
                if why == "":
                    through.add(hosts)
                elif why:
                    failed.add((session, target))
    between, single = set(), set()
    for session, target in failed:
        one, other = members[session], members[target]
        if (one.host.id, other.host.id) in through:
            single.add((one.node_id, other.node_id))
        else:
            between.add((one.host.id, other.host.id))
    return between, single


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
