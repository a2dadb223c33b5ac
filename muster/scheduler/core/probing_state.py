"""What rounds of probes have asked and found; :mod:`muster.scheduler.core.probing` decides what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.scheduler.core import events
from muster.wire import messages

ROUND_S = 15.0
"""How long a round of probes waits for answers, in seconds; a worker gives each probe up before that."""

ROUND_PAUSE_S = 5.0
"""The shortest time from one round of probes to the next, in seconds."""

LONGEST_ROUND_PAUSE_S = 60.0
"""What :data:`ROUND_PAUSE_S` grows to while rounds find that all reach each other."""

TOGETHER_S = 1.0
"""Two probes begun within this time count as simultaneous: a process that stood still begins later."""

LONG_S = 2.5
"""A running worker is heard within this time; one that is not while it is probed may stand still."""

CANDIDATES_AT_ONCE = 32

PROBES_EACH = 32
"""So many others a worker probes where no path may be left out, and one of each other host at least."""


@dataclass(frozen=True, slots=True)
class ProbeParticipant:
    """A worker that takes part in a round of probes.

    Attributes:
        candidate: who it is.
        targets: the streams of the workers that it probes.
        seated: it has a claim, and is not to earn one.
        place: its number among the seated workers of its host.
    """

    candidate: messages.Candidate
    targets: tuple[events.SessionId, ...]
    seated: bool
    place: int = 0


def opposite(there: Sequence[events.SessionId], place: int, shift: int, reach: int) -> list[events.SessionId]:
    """Which of the workers on another host one with this place on its own probes."""
    first = place + shift
    return [there[number % len(there)] for number in range(first, first + min(reach, len(there)))]


@dataclass(slots=True)
class ProbeRound:
    """A round of probes under way; ``awaited``: the workers whose answers it waits for, at least.

    Attributes:
        hosts: the streams of those with a claim that are asked, by the id of their host.
        shift: how many places further than its own one probes on another host, at first.
        reach: how many workers of each other host one probes.
        unreached: why they could not reach others, by node id, of each that has answered.
        began: since when those that have answered have probed.
        silent: those, by node id, that were not reached, and not heard either while they were probed.
    """

    number: int
    due: float
    among_members: bool
    generation: int = 0
    hosts: dict[str, list[events.SessionId]] = field(default_factory=dict)
    asked: dict[events.SessionId, ProbeParticipant] = field(default_factory=dict)
    awaited: list[events.SessionId] = field(default_factory=list)
    shift: int = 0
    reach: int = 1
    answers: dict[events.SessionId, events.ProbeAnswered] = field(default_factory=dict)
    unreached: dict[events.SessionId, dict[str, str]] = field(default_factory=dict)
    began: dict[events.SessionId, float] = field(default_factory=dict)
    silent: dict[events.SessionId, frozenset[str]] = field(default_factory=dict)

    def targets(self, place: int, host_id: str) -> list[events.SessionId]:
        """Which workers one with this place on its host probes of another host."""
        return opposite(self.hosts[host_id], place, self.shift, self.reach)

    def failed(self, session: events.SessionId, target: events.SessionId) -> str | None:
        """Why one worker could not reach another that it was to probe; "" if it could; None: not known.

        It is not where one of them may have stood still while the other probed it.
        """
        answer = self.answers.get(session)
        if answer is None or target not in self.answers:
            return None
        node_id = self.asked[target].candidate.node_id
        if node_id in self.silent[session]:
            return None
        why = self.unreached[session].get(node_id, "")
        together = abs(self.began[session] - self.began[target]) <= TOGETHER_S
        return why if together or not why else None

    def take(self, answer: events.ProbeAnswered, now: float, heard: Mapping[str, float]) -> None:
        """Takes an answer in; ``heard``: when workers were last heard, by node id."""
        session, began = answer.session, now - answer.seconds
        unreached = dict(answer.unreached)
        self.answers[session], self.unreached[session], self.began[session] = answer, unreached, began
        silent = (node_id for node_id in unreached if heard.get(node_id, began) < began)
        self.silent[session] = frozenset(silent if answer.seconds >= LONG_S else ())


@dataclass(frozen=True, slots=True)
class Hang:
    """A member that others wait for: since when, and in which step."""

    since: float
    place: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProbeBackoff:
    """Until when no further round is needed, because all members were found to reach each other.

    Attributes:
        rounds: how many in a row have found that. The next one probes other pairs of workers, else a path
            that is broken between two single ones is never found.
    """

    generation: int = 0
    until: float = 0.0
    pause_s: float = ROUND_PAUSE_S
    rounds: int = 0

    def again(self, generation: int, now: float) -> ProbeBackoff:
        """The same after another such round; the pause grows within a generation."""
        same = generation == self.generation
        pause_s = min(2 * self.pause_s, LONGEST_ROUND_PAUSE_S) if same else ROUND_PAUSE_S
        return ProbeBackoff(generation, now + pause_s, pause_s, self.rounds + 1 if same else 1)


PartyName = tuple[str, str]
"""The id of a host, and the node id of a worker on it, or "" for all of them."""

BrokenPair = tuple[PartyName, PartyName]
"""One that may be at fault, and the party with which it was broken."""


@dataclass(slots=True)
class Probing:
    """The rounds of probes of a job and what they found; begins empty when the scheduler restarts.

    Attributes:
        current: the round under way.
        number: the newest round's.
        not_before: when the next one may begin.
        wanted: the members are to be asked.
        backoff: they have been found to reach each other.
        hangs: the members that others wait for.
        awaited: those that were named as awaited, busy ones too, and in which step each was then.
        said: what was said last, so that it is not said at every round.
        broken: who may be at fault for a pair that could not reach each other: both, if neither was apart
            from anyone else; where one was apart from several, that one alone.
        barred: why, by the id of a host, or by a worker's node id.
        outside: joins of those that are barred.
        taken_in: those of them that have just been proven to be reached.
        addresses: where workers answer probes.
    """

    current: ProbeRound | None = None
    number: int = 0
    not_before: float = 0.0
    wanted: bool = False
    backoff: ProbeBackoff = ProbeBackoff()
    hangs: dict[str, Hang] = field(default_factory=dict)
    awaited: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    said: str = ""
    broken: frozenset[BrokenPair] = frozenset()
    barred: dict[str, str] = field(default_factory=dict)
    outside: dict[events.SessionId, events.Joined] = field(default_factory=dict)
    taken_in: list[events.Joined] = field(default_factory=list)
    addresses: dict[events.SessionId, str] = field(default_factory=dict)

    def bars(self, candidate: messages.Candidate) -> bool:
        """Whether this worker, or its host, was expelled because it could not be reached."""
        return candidate.host.id in self.barred or candidate.node_id in self.barred

    def due(self, hang_timeout_s: float) -> float | None:
        """The time at which a round has to end or to begin; None: no round is wanted."""
        if self.current is not None:
            return self.current.due
        times = [self.not_before] if self.outside or self.wanted else []
        times += [self.hang_due(hang_timeout_s)] if self.hangs else []
        return max(min(times), self.not_before) if times else None

    def hang_due(self, hang_timeout_s: float) -> float:
        """The time at which the first member has been waited for too long."""
        return min(hang.since for hang in self.hangs.values()) + hang_timeout_s

    def repeat(self) -> None:
        """Has the round under way asked again: what was answered in it may be true no more."""
        current, self.current = self.current, None
        self.wanted = self.wanted or (current is not None and current.among_members)

    def drop_round_of_members(self) -> None:
        """Takes no answers to the round under way any more: all have just met, whatever was so before."""
        if self.current is not None and self.current.among_members:
            self.current = None

    def forget_waits(self) -> None:
        """Training goes on: what is waited for next is something new."""
        self.awaited, self.said, self.backoff = {}, "", ProbeBackoff()

    def take_in(self) -> list[events.Joined]:
        """Takes and returns the Joins of workers that were just found to reach all members."""
        joins, self.taken_in = self.taken_in, []
        return joins

    def forget(self, session: events.SessionId) -> None:
        """Takes a stream that ends out of all rounds."""
        self.addresses.pop(session, None)
        self.outside.pop(session, None)
