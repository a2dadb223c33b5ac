"""Rounds of probes between workers: finds broken network paths and hanging ranks, and expels them.

An accusation is a pair (accuser, accused): the first could not reach the second. A pair is broken if either
accuses the other, because a group needs connections in both directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from muster.scheduler.core import events, evidence
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import (
    Claim,
    Phase,
    count,
    early_end,
    listing,
    named_first,
    upper_first,
    who,
)
from muster.scheduler.core.probing_state import (
    CANDIDATES_AT_ONCE,
    PROBES_EACH,
    ROUND_PAUSE_S,
    ROUND_S,
    BrokenPair,
    Hang,
    PartyName,
    ProbeBackoff,
    ProbeParticipant,
    ProbeRound,
)
from muster.wire import messages

# ---------------------------------------------------------------- rounds


def want_round(job: Job, now: float, *, urgent: bool) -> None:
    """Requests a round of probes: now, or when the round in progress is over.

    Does nothing if all members have just been found to reach each other, and the only new fact is that a
    member waits.
    """
    current = job.probing.current
    if current is not None and current.among_members:
        if current.generation == job.ledger.generation:
            return
        job.probing.current = None  # That round was among other members.
    if urgent or job.probing.backoff.generation != job.ledger.generation or now >= job.probing.backoff.until:
        job.probing.wanted = True
        tend_rounds(job, now)


def _begin_round(job: Job, now: float, *, among_members: bool) -> None:
    """Begins a round: sends each worker a Probe."""
    job.probing.wanted = job.probing.wanted and not among_members
    job.probing.number = max(job.probing.number + 1, int(now * 1000))
    job.probing.not_before = now + ROUND_PAUSE_S
    hosts = _by_host(job)
    generation, backoff = job.ledger.generation, job.probing.backoff
    rounds = backoff.rounds if backoff.generation == generation else 0
    # While a group is being built, any broken path blocks it. During training, the first question is only
    # which host is cut off.
    all_paths = job.phase is Phase.BUILDING or rounds > 0
    reach = max(1, PROBES_EACH // max(1, len(hosts) - 1)) if all_paths else 1
    current = ProbeRound(job.probing.number, now + ROUND_S, among_members, generation, hosts)
    current.shift, current.reach = rounds * reach, reach
    current.asked = asked = dict(_participants(job, current))
    if not asked:
        return
    current.awaited = list(asked)
    job.probing.current = current
    named = {each: (asked[each].candidate.node_id, job.probing.addresses[each]) for each in asked}
    for session, each in asked.items():
        targets = tuple(map(named.__getitem__, each.targets))
        job.outbox.send(session, messages.Probe(job.probing.number, targets))


def _by_host(job: Job) -> dict[str, list[events.SessionId]]:
    """The streams of workers that have a claim and can be probed, by the id of their host."""
    hosts: dict[str, list[events.SessionId]] = {}
    for claim in seated_claims(job):
        session = job.members.session_of(claim.candidate.node_id)
        if session is not None and job.probing.addresses.get(session):
            hosts.setdefault(claim.candidate.host.id, []).append(session)
    return hosts


def _participants(job: Job, current: ProbeRound) -> Iterator[tuple[events.SessionId, ProbeParticipant]]:
    outside = dict(list(job.probing.outside.items())[:CANDIDATES_AT_ONCE])
    hosts, among_members = current.hosts, current.among_members
    places = {session: place for here in hosts.values() for place, session in enumerate(here)}
    for claim in seated_claims(job):
        session = job.members.session_of(claim.candidate.node_id)
        if session not in places:
            continue
        place, host_id = places[session], claim.candidate.host.id
        elsewhere = [host for host in hosts if host != host_id] if among_members else []
        targets = [target for host in elsewhere for target in current.targets(place, host)]
        if place == 0:
            targets += [s for s, each in outside.items() if each.candidate.host.id != host_id]
        if targets or among_members:
            yield session, ProbeParticipant(claim.candidate, tuple(targets), seated=True, place=place)
    for session, event in outside.items():
        others = [there for host, there in hosts.items() if host != event.candidate.host.id]
        yield session, ProbeParticipant(event.candidate, tuple(there[0] for there in others), seated=False)


def seated_claims(job: Job) -> list[Claim]:
    """All claims, members first."""
    members = list(job.ledger.living_members())
    known = {claim.candidate.node_id for claim in members}
    return members + [c for node_id, c in job.ledger.claims.items() if node_id not in known]


def take_answer(job: Job, event: events.ProbeAnswered, now: float) -> None:
    """Handles a worker's answer; the last answer ends the round."""
    current = job.probing.current
    if current is None or event.round != current.number or event.session not in current.asked:
        return
    contacts = job.members.by_node
    heard = {node_id: contacts[node_id].last_heard for node_id, _ in event.unreached if node_id in contacts}
    current.take(event, now, heard)
    awaited = current.awaited  # Workers that have answered or are gone are no longer awaited.
    while awaited and (
        awaited[-1] in current.answers or not _is_there(job, awaited[-1], current.asked[awaited[-1]])
    ):
        awaited.pop()
    if not awaited:
        _conclude_round(job, now)


def _is_there(job: Job, session: events.SessionId, asked: ProbeParticipant) -> bool:
    if not asked.seated:
        return session in job.probing.outside
    return job.members.nodes.get(session) == asked.candidate.node_id


def tend_rounds(job: Job, now: float) -> None:
    """Ends a round that has timed out, and begins one that is due."""
    if job.phase is Phase.ENDED:
        return
    if job.probing.current is not None and now >= job.probing.current.due:
        _conclude_round(job, now)
    if job.probing.current is None and now >= job.probing.not_before:
        if job.probing.wanted or (
            job.probing.hangs and now >= job.probing.hang_due(job.settings.hang_timeout_s)
        ):
            _begin_round(job, now, among_members=True)
        elif job.probing.outside:
            _begin_round(job, now, among_members=False)


def _conclude_round(job: Job, now: float) -> None:
    current, job.probing.current = job.probing.current, None
    assert current is not None
    gone = [s for s, asked in current.asked.items() if not _is_there(job, s, asked)]
    for session in gone:
        current.answers.pop(session, None)
    trains = job.phase in (Phase.BUILDING, Phase.RUNNING, Phase.QUIESCING)
    if current.among_members and trains:
        if expel_unreachable(job, current):
            job.probing.backoff = ProbeBackoff()
        elif current.answers:
            hung = set(job.probing.hangs)
            _look_for_hangs(job, current, now)
            # A failure whose cause could not be found does not prove that all is well: the next wait asks
            # again. And when a member that hung continues, the next wait counts as a new one.
            unjudged = any(current.unreached.values())
            backoff = job.probing.backoff if job.probing.hangs.keys() >= hung else ProbeBackoff()
            job.probing.backoff = ProbeBackoff() if unjudged else backoff.again(current.generation, now)
    _take_in(job, current, now)


# ---------------------------------------------------------------- who cannot be reached


def expel_unreachable(job: Job, current: ProbeRound) -> bool:
    """Expels workers that the others cannot reach; returns whether some members cannot reach each other."""
    members = {
        session: asked.candidate
        for session, asked in current.asked.items()
        if asked.seated and job.rank_of(asked.candidate.node_id) >= 0
    }
    between, single = accusations(current, members)
    if not between and not single:
        return False
    sentence = _broken_pairs(job, current, members)
    present = _present(job, members.values())
    out, pairs = _who_goes(job, present, between, single, leaving)
    job.probing.broken |= pairs
    if job.ledger.living == 2:
        why = "nobody is expelled, because of two members neither can be shown to be at fault"
        _name_awaited(job, f"{upper_first(sentence)}; {why}.", ())
        return True
    if _too_few_left(job, (candidate for candidate, _ in out)):
        # The job goes on as long as enough members reach each other, regardless of who is at fault.
        out, _ = _who_goes(job, present, between, single, leaving_by_size)
    if may_expel(job, (candidate for candidate, _ in out), sentence):
        for candidate, barred in out:
            job.probing.barred[barred] = sentence
            what = f"was expelled: {sentence}; all that stay reach each other"
            job.lose(candidate.node_id, what, messages.RefusalCode.SUPERSEDED)
    return True


def _present(job: Job, asked: Iterable[messages.Candidate]) -> list[messages.Candidate]:
    """The members to count for a host: those that were asked, and those that have come since."""
    present = {one.node_id: one for one in asked}
    for claim in job.ledger.living_members():
        if job.members.session_of(claim.candidate.node_id) is not None:
            present.setdefault(claim.candidate.node_id, claim.candidate)
    return list(present.values())


def _who_goes(
    job: Job,
    members: Collection[messages.Candidate],
    between: Collection[Accusation],
    single: Collection[Accusation],
    rule: Rule,
) -> tuple[list[tuple[messages.Candidate, str]], frozenset[BrokenPair]]:
    """The workers that leave by a rule, each with the id of worker or host to bar; the pairs to remember."""
    gone, unreachable, pairs = frozenset[str](), frozenset[str](), frozenset[BrokenPair]()
    if between:
        hosts = _parties(job, members, lambda one: one.host.id)
        gone, pairs = _leaving_and_pairs(job, hosts, between, rule, _workers_beside(job, members, single))
    workers = _parties(job, (one for one in members if one.host.id not in gone), lambda one: one.node_id)
    single = {pair for pair in single if set(pair) <= workers.keys()}
    if single:
        unreachable, more = _leaving_and_pairs(job, workers, single, rule, WHOLE)
        pairs |= more
    claims = [claim.candidate for claim in seated_claims(job)]
    out = [one for one in claims if one.host.id in gone or one.node_id in unreachable]
    # If no worker of this host stays, the next worker from there has to prove that it reaches the others.
    staying = {one.host.id for one in claims if one not in out}
    return [(one, one.node_id if one.host.id in staying else one.host.id) for one in out], pairs


def _workers_beside(
    job: Job, members: Collection[messages.Candidate], single: Collection[Accusation]
) -> Split:
    """Divides the hosts of these workers into parts: each of the workers alone, and the others together."""
    # A node id may equal the id of a host.
    units = {node_id: f"worker {node_id}" for pair in single for node_id in pair}
    concerned = {one.host.id for one in members if one.node_id in units}
    here = {one.node_id: one for one in members if one.host.id in concerned}
    named = {node_id: units.get(node_id, one.host.id) for node_id, one in here.items()}
    parties = _parties(job, here.values(), lambda one: named[one.node_id])
    parts: dict[str, dict[str, Party]] = {host_id: {} for host_id in concerned}
    for node_id, one in here.items():
        parts[one.host.id][named[node_id]] = parties[named[node_id]]
    return Split(parts, [(units[a], units[b]) for a, b in single])


def _leaving_and_pairs(
    job: Job,
    parties: Mapping[str, Party],
    accusations: Collection[Accusation],
    rule: Rule,
    split: Split,
) -> tuple[frozenset[str], frozenset[BrokenPair]]:
    """The parties that must leave because of this and earlier rounds, and the pairs to remember.

    In a lone pair, either party may be at fault, unless a part of it also fails to reach others. A party that
    leaves because its paths to several others are broken is at fault, and those others are not.
    """
    names = {name: party.name for name, party in parties.items()}
    apart = {*accusations, *split.of_wholes()}
    lone = [tuple(pair) for pair in lone_pairs(apart) & lone_pairs(accusations)]
    seen = {(names[a], names[b]) for one, other in lone for a, b in ((one, other), (other, one))}
    known = job.probing.broken | seen
    others = {name: _others(names[name], known) for pair in lone for name in pair}
    gone = rule(parties, accusations, others, split)
    stars = {(names[centre], names[other]) for centre, other in stars_of(gone, apart)}
    return gone, frozenset(seen | stars)


def _others(name: PartyName, pairs: Collection[BrokenPair]) -> int:
    """Returns the number of different parties to which a party's path was broken.

    The count of a worker includes the broken paths of its host. If a path to another host and a path to a
    worker on that host were broken, they count once.
    """
    host, _ = name
    peers = {peer for one, peer in pairs if one in (name, (host, ""))}
    named = {each for each, node in peers if node}
    return sum(bool(node) or each not in named for each, node in peers)


def _parties(
    job: Job, members: Iterable[messages.Candidate], name_of: Callable[[messages.Candidate], str]
) -> dict[str, Party]:
    """Groups the members by host, or leaves each by itself, as ``name_of`` says."""
    ledger, stateless = job.ledger, job.stateless()
    parties: dict[str, Party] = {}
    for one in members:
        name = name_of(one)
        rank, holds = ledger.rank_of(one.node_id), ledger.holds_state(one.node_id, stateless)
        known = parties.get(name, Party(0, holds_state=False, lowest_rank=rank))
        # A host with one worker is remembered as that worker, because another one may soon join it.
        place = one.host.id, "" if known.workers else one.node_id
        lowest = min(rank, known.lowest_rank)
        parties[name] = Party(known.workers + 1, holds or known.holds_state, lowest, place)
    return parties


def _broken_pairs(job: Job, current: ProbeRound, members: dict[events.SessionId, messages.Candidate]) -> str:
    """Names the hosts that cannot reach each other, with the first reason reported."""
    pairs: dict[tuple[str, str], str] = {}
    for session, target, why in failures(current, members):
        names = sorted((members[session].host.name, members[target].host.name))
        pairs.setdefault((names[0], names[1]), why)
    hosts = listing([f"hosts {one} and {other}" for one, other in pairs])
    return f"{hosts} cannot reach each other ({next(iter(pairs.values()))})"


def may_expel(job: Job, out: Iterable[messages.Candidate], sentence: str) -> bool:
    """Whether enough members would be left after an expulsion; logs it if not."""
    why = _too_few_left(job, out)
    if why:
        _name_awaited(job, f"{upper_first(sentence)}; {why}.", ())
    return not why


def _too_few_left(job: Job, out: Iterable[messages.Candidate]) -> str:
    """Says why these members cannot be expelled (too few would be left); empty if they can."""
    ledger = job.ledger
    assert ledger.opened is not None
    gone = {candidate.node_id for candidate in out}
    least = 1 if ledger.finishing else ledger.opened.worker_min
    left = [c for c in ledger.living_members() if c.leaving is None and c.candidate.node_id not in gone]
    if len(left) >= least:
        return ""
    return f"nobody is expelled, because only {len(left)} could go on, and MS_WORKER_MIN is {least}"


def _say_once(job: Job, sentence: str) -> bool:
    if sentence == job.probing.said:
        return False
    job.probing.said = sentence
    job.say(sentence)
    return True


def _name_awaited(job: Job, sentence: str, awaited: Iterable[str]) -> None:
    """Reports once, also to all members, which member the others wait for; their launchers show it."""
    job.probing.awaited |= {node_id: _place(job, node_id) for node_id in awaited}
    if _say_once(job, sentence):
        job.tell_members(sentence)


def all_have_moved(job: Job) -> bool:
    """Forgets the awaited members that have moved; returns whether all of them have."""
    awaited = job.probing.awaited
    moved = [n for n, place in awaited.items() if n not in job.members.by_node or _place(job, n) != place]
    for node_id in moved:
        del awaited[node_id]
    if not moved or awaited:
        return False
    job.probing.forget_waits()
    return True


# ---------------------------------------------------------------- who does not come


def _look_for_hangs(job: Job, current: ProbeRound, now: float) -> None:
    """Reports members that answer probes but do not come to a step for which others wait.

    Expels them in the end.
    """
    members = {
        current.asked[session].candidate.node_id: answer
        for session, answer in current.answers.items()
        if job.rank_of(current.asked[session].candidate.node_id) >= 0
    }
    waiting = [node_id for node_id, answer in members.items() if answer.late and answer.waits]
    before, job.probing.hangs = job.probing.hangs, {}
    if not waiting:
        return
    if job.ledger.finished and all(answer.waits for answer in members.values()):
        name_finished(job, waiting)
    furthest = max(_place(job, node_id) for node_id in waiting)
    for node_id, answer in members.items():
        # A member that has issued everything that the others have may be waiting for its device, which cannot
        # be seen from here.
        if answer.waits or (answer.late and _place(job, node_id) >= furthest):
            continue
        if answer.busy:
            name = upper_first(who(job.ledger.claims[node_id].candidate, job.rank_of(node_id)))
            _name_awaited(job, f"{name} is busy alone: {answer.busy}; the others wait for it.", [node_id])
            continue
        hang = Hang(now, _place(job, node_id))
        if node_id in before and before[node_id].place == hang.place:
            hang = before[node_id]
        else:
            job.probing.said = ""  # Reported again for each hang.
        job.probing.hangs[node_id] = hang
    if job.probing.hangs:
        deal_with_hangs(job, now, len(waiting))


def name_finished(job: Job, waiting: Iterable[str]) -> None:
    """Sends waiting members the names of the finished members for which they wait."""
    finished = tuple(sorted(job.ledger.ranks[node_id] for node_id in job.ledger.finished))
    sentence = f"{upper_first(early_end(job.ledger))}."
    _say_once(job, sentence)
    number = len(job.ledger.ranks)
    for node_id in waiting:
        job.send(node_id, messages.Waiting(number - len(finished), number, sentence, finished))


def explain_failures(job: Job) -> None:
    """Sends the names of finished members to those whose collective failed, whichever report comes first."""
    if job.ledger.finished and job.current.puzzled:
        name_finished(job, job.current.puzzled)
        job.current.puzzled = set()


def _place(job: Job, node_id: str) -> tuple[int, int, int]:
    contact = job.members.by_node[node_id]
    return contact.step, contact.started_step, contact.recent[-1].sequence if contact.recent else 0


def deal_with_hangs(job: Job, now: float, waiting: int) -> None:
    """Reports the members for which others wait, and expels those that were reported for a long time."""
    limit_s = job.settings.hang_timeout_s
    claims = {node_id: job.ledger.claims[node_id] for node_id in job.probing.hangs}
    names = listing([who(c.candidate, job.rank_of(node_id)) for node_id, c in claims.items()])
    waits = f"{count(waiting, 'member')} wait{'s' if waiting == 1 else ''}"
    due = [
        claim.candidate
        for node_id, claim in claims.items()
        if now >= job.probing.hangs[node_id].since + limit_s and not job.evidence.awaits(node_id)
    ]
    obstacle = _too_few_left(job, due or [claim.candidate for claim in claims.values()])
    _name_awaited(
        job,
        f"{upper_first(names)} can be reached and does not come to the step for which {waits}; "
        f"{obstacle or f'expelled after {limit_s:g} s (MS_HANG_TIMEOUT), unless it says session.busy()'}.",
        claims,
    )
    evidence.standstill(
        job, now, claims, f"{upper_first(names)} does not come to the step for which {waits}."
    )
    if not obstacle:
        for candidate in due:
            what = f"was expelled: it has not come to the step for which {waits} in {limit_s:g} s"
            job.lose(candidate.node_id, f"{what} (MS_HANG_TIMEOUT)", messages.RefusalCode.SUPERSEDED)
    for candidate in due:
        job.probing.hangs.pop(candidate.node_id)  # If it stays, its time starts again.


# ---------------------------------------------------------------- who comes back


def keep_outside(job: Job, event: events.Joined) -> bool:
    """Keeps an expelled worker out until probes succeed; returns whether it is kept out."""
    candidate = event.candidate
    if not seated_claims(job):
        return False
    name = named_first(candidate)
    for session, other in job.probing.outside.items():
        if other.candidate.node_id == candidate.node_id and session != event.session:
            same = other.candidate.incarnation == candidate.incarnation
            newer = f"{name} has opened a newer stream." if same else f"{name} is a newer process."
            refused = messages.Refused(messages.RefusalCode.SUPERSEDED, newer)
            job.outbox.send(min(session, event.session), refused)
            if event.session < session:  # Its Join took long to arrive.
                return True
    job.probing.outside[event.session] = event
    why = job.probing.barred.get(candidate.host.id) or job.probing.barred[candidate.node_id]
    sentence = f"{name} is taken in when it and the members reach each other: {why}."
    job.outbox.send(event.session, job.welcome())
    job.outbox.send(event.session, messages.Waiting(len(job.present()), job.needed, sentence))
    job.outbox.mention(sentence)
    return True


def _take_in(job: Job, current: ProbeRound, now: float) -> None:
    """Admits workers that were outside and that all members have reached, from one host at a time."""
    proven: str | None = None
    # Hosts whose workers have come since the round began and were not asked.
    unasked = _by_host(job).keys() - current.hosts.keys() if job.probing.outside else frozenset[str]()
    for session, asked in current.asked.items():
        event = job.probing.outside.get(session)
        if asked.seated or event is None or not is_proven(job, current, session):
            continue
        if unasked - {asked.candidate.host.id}:
            continue
        if proven is None:
            proven = asked.candidate.host.id
        if asked.candidate.host.id == proven:
            del job.probing.outside[session]
            job.probing.barred.pop(proven, None)
            job.probing.barred.pop(asked.candidate.node_id, None)
            job.probing.taken_in.append(event)


def is_proven(job: Job, current: ProbeRound, session: events.SessionId) -> bool:
    """Whether this worker and all members have reached each other."""
    pairs = [
        pair for target in current.asked[session].targets for pair in ((session, target), (target, session))
    ]
    return session in current.answers and all(current.failed(*pair) == "" for pair in pairs)


def dismiss_outside(job: Job) -> None:
    """Tells the workers that are outside the group how the job has ended."""
    outcome = job.ledger.outcome
    assert outcome is not None
    for session in job.probing.outside:
        job.outbox.send(session, messages.Ended(outcome.ok, outcome.reason))
    job.probing.outside.clear()


# ---------------------------------------------------------------- who stays

EXACT_PARTIES = 16
"""Up to this number of parties the best set is found by exhaustive search; beyond that, by removing the worst
party repeatedly.
"""

MANY = 2
"""A party is at fault if its paths to this many others are broken while those others reach each other."""

Accusation = tuple[str, str]

Rule = Callable[[Mapping[str, "Party"], Collection[Accusation], Mapping[str, int], "Split"], frozenset[str]]
"""A function that decides which parties leave, such as :func:`leaving`."""


@dataclass(frozen=True, slots=True)
class Party:
    """A host or a worker that stays or leaves as a whole.

    Attributes:
        workers: how many workers leave with it.
        holds_state: one of them holds the training state.
        lowest_rank: the lowest of their ranks.
        name: the name under which its broken pairs are remembered.
    """

    workers: int
    holds_state: bool
    lowest_rank: int
    name: PartyName = ("", "")


@dataclass(frozen=True, slots=True)
class Split:
    """Parties that may lose a single part and stay.

    Attributes:
        parts: the parts of each such party, by name; the remainder has the party's own name.
        accusations: pairs of parts; the first could not reach the second.
    """

    parts: Mapping[str, Mapping[str, Party]]
    accusations: Collection[Accusation]

    def of_wholes(self) -> set[Accusation]:
        """The same accusations, as accusations between whole parties."""
        whole = {part: name for name, parts in self.parts.items() for part in parts}
        return {(whole[a], whole[b]) for a, b in self.accusations}

    def apart(
        self, parties: Mapping[str, Party], accusations: Collection[Accusation]
    ) -> tuple[dict[str, Party], list[Accusation]]:
        """The parties with each split party replaced by its parts, and all accusations between those."""
        parts = {name: self.parts.get(name, {name: party}) for name, party in parties.items()}
        taken = {part: party for here in parts.values() for part, party in here.items()}
        left = [(a, b) for one, other in accusations for a in parts[one] for b in parts[other]]
        return taken, left + [(a, b) for a, b in self.accusations if a in taken and b in taken]


WHOLE = Split({}, ())
"""A split in which no party has separate parts."""


def leaving(
    parties: Mapping[str, Party],
    accusations: Collection[Accusation],
    others: Mapping[str, int] | None = None,
    split: Split = WHOLE,
) -> frozenset[str]:
    """Chooses the parties that must leave so that all that stay reach each other.

    A party leaves if it accuses many others that nobody else accuses. A lone pair is a broken pair whose
    parties are in no other broken pair. A party of a lone pair leaves if it was in lone pairs with many
    others before. Of the rest, the largest set that holds the training state stays; among equal sets, the
    one with the lowest ranks. It does not matter which party of a pair accused the other; otherwise a party
    would gain by not answering.

    Args:
        parties: all parties, by name.
        accusations: pairs of names; the first could not reach the second.
        others: for each party, the number of different others with which it has been in a lone pair
            (including this round), or had broken paths when it left.
        split: the single parts of parties that could not reach each other. The sides are compared without
            the parts that they would lose. The result has neither such parts nor parties in no pair.
    """
    alone = lone_accusers(parties, accusations)
    alone |= repeaters(parties, accusations, others or {})
    rest = {name: party for name, party in parties.items() if name not in alone}
    return alone | leaving_by_size(rest, accusations, split=split)


def leaving_by_size(
    parties: Mapping[str, Party],
    accusations: Collection[Accusation],
    others: Mapping[str, int] | None = None,
    split: Split = WHOLE,
) -> frozenset[str]:
    """Chooses the parties that must leave so that the largest set stays, regardless of who is at fault.

    Takes the arguments of :func:`leaving`, and ignores ``others``.
    """
    left = [(a, b) for a, b in accusations if a in parties and b in parties]
    involved = {name for pair in left for name in pair}
    if sum(len(split.parts.get(name, (name,))) for name in involved | split.parts.keys()) > EXACT_PARTIES:
        split = WHOLE
    taken, broken = split.apart(parties, left)
    find = best if len({name for pair in broken for name in pair}) <= EXACT_PARTIES else _thinned_out
    stay = find(frozenset(taken), taken, broken)
    return frozenset(name for name in involved if stay.isdisjoint(split.parts.get(name, (name,))))


def lone_accusers(parties: Mapping[str, Party], accusations: Collection[Accusation]) -> frozenset[str]:
    """Parties that accuse many others which nobody else accuses and which do not accuse them in turn."""
    accused_by: dict[str, set[str]] = {}
    for accuser, accused in accusations:
        accused_by.setdefault(accused, set()).add(accuser)
    found = set()
    for accuser in {accuser for accuser, _ in accusations}:
        victims = [accused for accused, by in accused_by.items() if accuser in by]
        one_sided = all(accused_by[victim] == {accuser} for victim in victims)
        if len(victims) >= MANY and one_sided and not accused_by.get(accuser):
            found.add(accuser)
    others_hold = any(party.holds_state for name, party in parties.items() if name not in found)
    hold = any(parties[name].holds_state for name in found)
    return frozenset() if hold and not others_hold else frozenset(found)


def lone_pairs(accusations: Collection[Accusation]) -> frozenset[frozenset[str]]:
    """Broken pairs whose parties are in no other broken pair, so that they do not show who is at fault."""
    pairs = {frozenset(pair) for pair in accusations}
    degree = Counter(name for pair in pairs for name in pair)
    return frozenset(pair for pair in pairs if all(degree[name] == 1 for name in pair))


def stars_of(centres: Collection[str], accusations: Collection[Accusation]) -> frozenset[tuple[str, str]]:
    """The broken pairs of these parties with others that are in no other broken pair.

    The centre comes first.
    """
    pairs = {frozenset(pair) for pair in accusations}
    degree = Counter(name for pair in pairs for name in pair)
    ends = ((c, x) for pair in pairs for c in pair for x in pair - {c})
    return frozenset((c, x) for c, x in ends if c in centres and degree[x] == 1)


def repeaters(
    parties: Mapping[str, Party], accusations: Collection[Accusation], others: Mapping[str, int]
) -> frozenset[str]:
    """Returns, of each lone pair, the party that was in lone pairs with many others and more than its peer.

    Returns nothing if these parties hold the training state and no other party does.
    """
    found = set()
    for pair in lone_pairs(accusations):
        less, more = sorted(pair, key=lambda name: others.get(name, 0))
        if others.get(more, 0) >= MANY and others.get(more, 0) > others.get(less, 0):
            found.add(more)
    others_hold = any(party.holds_state for name, party in parties.items() if name not in found)
    hold = any(parties[name].holds_state for name in found)
    return frozenset() if hold and not others_hold else frozenset(found)


def _broken(names: frozenset[str], accusations: Collection[Accusation]) -> dict[str, set[str]]:
    pairs: dict[str, set[str]] = {}
    for a, b in accusations:
        if a in names and b in names:
            pairs.setdefault(a, set()).add(b)
            pairs.setdefault(b, set()).add(a)
    return pairs


def worth(names: frozenset[str], parties: Mapping[str, Party]) -> tuple[bool, int, int, list[int]]:
    """The value by which sets of parties are compared; the set with the greater value stays."""
    return (
        any(parties[name].holds_state for name in names),
        sum(parties[name].workers for name in names),
        len(names),
        sorted((-parties[name].lowest_rank for name in names), reverse=True),
    )


def best(
    names: frozenset[str], parties: Mapping[str, Party], accusations: Collection[Accusation]
) -> frozenset[str]:
    """Finds the best set in which all reach each other, with or without the party in most broken pairs."""
    pairs = _broken(names, accusations)
    if not pairs:
        return names
    most = max(sorted(pairs), key=lambda name: len(pairs[name]))
    without = best(names - {most}, parties, accusations)
    with_it = best(names - pairs[most], parties, accusations)
    return max(with_it, without, key=lambda found: worth(found, parties))


def _thinned_out(
    names: frozenset[str], parties: Mapping[str, Party], accusations: Collection[Accusation]
) -> frozenset[str]:
    """Finds such a set by removing parties with the most broken pairs.

    The last party that holds the state stays.
    """
    pairs = _broken(names, accusations)
    holders = {name for name in names if parties[name].holds_state}
    gone = set()
    while pairs:
        ranked = [
            (len(pairs[name]), -parties[name].workers, parties[name].lowest_rank, name)
            for name in pairs
            if holders != {name}
        ]
        name = max(ranked)[-1]
        gone.add(name)
        holders.discard(name)
        for other in pairs.pop(name):
            pairs[other].discard(name)
            if not pairs[other]:
                del pairs[other]
    return names - gone


def failures(
    current: ProbeRound, members: dict[events.SessionId, messages.Candidate]
) -> Iterator[tuple[events.SessionId, events.SessionId, str]]:
    """Pairs of workers that could not reach each other, and why; only pairs in which both have answered."""
    by_node = {candidate.node_id: session for session, candidate in members.items()}
    order = {host_id: number for number, host_id in enumerate(current.hosts)}
    for session, candidate in members.items():
        named = [by_node[node_id] for node_id in current.unreached.get(session, ()) if node_id in by_node]
        for target in sorted(named, key=lambda one: order[members[one].host.id]):
            host_id, place = members[target].host.id, current.asked[session].place
            if host_id != candidate.host.id and target in current.targets(place, host_id):
                why = current.failed(session, target)
                if why:
                    yield session, target, why


def accusations(
    current: ProbeRound, members: dict[events.SessionId, messages.Candidate]
) -> tuple[set[Accusation], set[Accusation]]:
    """Failed pairs: two hosts if no worker of one got through to the other; single workers otherwise.

    Returns:
        The pairs of hosts, and the pairs of workers.
    """
    through: dict[Accusation, bool] = {}
    between, single = set(), set()
    for session, target, _ in failures(current, members):
        one, other = members[session], members[target]
        hosts = (one.host.id, other.host.id)
        if hosts not in through:
            through[hosts] = _got_through(current, *hosts)
        if through[hosts]:
            single.add((one.node_id, other.node_id))
        else:
            between.add(hosts)
    return between, single


def _got_through(current: ProbeRound, here: str, there: str) -> bool:
    """Whether some worker on one host has reached one on the other; spares count for their host too.

    The opposite direction also counts if a single probe represents a host with many workers, because one
    worker may refuse the probe, or lie.
    """
    forth, back = (_tried(current, *ends) for ends in ((here, there), (there, here)))
    counts = forth + back if len(current.hosts[here]) == 1 < len(current.hosts[there]) else forth
    return any(current.failed(*pair) == "" for pair in counts)


def _tried(current: ProbeRound, here: str, there: str) -> list[tuple[events.SessionId, events.SessionId]]:
    """Which workers on one host had to probe which workers on the other."""
    return [(s, t) for s in current.hosts[here] for t in current.targets(current.asked[s].place, there)]
