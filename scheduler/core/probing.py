"""Rounds of probes: when workers wait in vain, all of them try to reach each other, and tell.

Nothing is probed while training goes well. A worker whose collective is late says so; then every member
connects to one worker of each other host and answers with those that it could not reach. A pair counts only
if both its workers have answered: one that stands still is a matter of its heartbeats.

Who is expelled because it cannot be reached joins again, and waits outside until probes between it and the
members succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from scheduler.core import admission, planning, reachability
from scheduler.core import events as e
from scheduler.core import messages as m
from scheduler.core import values as v
from scheduler.core.ledger import Claim, Phase
from scheduler.core.reception import Reception
from scheduler.core.wording import count, listing, upper_first, who

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
