"""The state of rounds of probes; :mod:`muster.scheduler.core.probing` has the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.scheduler.core import events
from muster.wire import messages

ROUND_S = 15.0
"""How long a round of probes waits for answers, in seconds; a worker gives up each probe earlier than
that.
"""

ROUND_PAUSE_S = 5.0
"""The shortest time from one round of probes to the next, in seconds."""

LONGEST_ROUND_PAUSE_S = 60.0
"""The limit to which the pause grows while rounds find that all members reach each other, in seconds."""

TOGETHER_S = 1.0
"""Two probes that begin within this many seconds count as simultaneous; a paused process begins later."""

LONG_S = 2.5
"""A running worker is heard at least this often, in seconds; one not heard during a probe may be paused."""

CANDIDATES_AT_ONCE = 32

PROBES_EACH = 32
"""How many workers a worker probes if no path may be left out; at least one on each other host."""


@dataclass(frozen=True, slots=True)
class ProbeParticipant:
    """A worker that takes part in a round of probes.

    Attributes:
        candidate: the worker.
        targets: the streams of the workers that it probes.
        seated: whether it has a claim; otherwise it has to pass the probes first.
        place: its number among the seated workers of its host.
    """

    candidate: messages.Candidate
    targets: tuple[events.SessionId, ...]
    seated: bool
    place: int = 0


def opposite(there: Sequence[events.SessionId], place: int, shift: int, reach: int) -> list[events.SessionId]:
    """Returns the workers of another host that the worker with this place on its own host probes."""
    first = place + shift
    return [there[number % len(there)] for number in range(first, first + min(reach, len(there)))]


@dataclass(slots=True)
class ProbeRound:
    """A round of probes in progress; ``awaited``: the workers whose answers it waits for.

    Attributes:
        hosts: the streams of the workers with a claim that are asked, by the id of their host.
        shift: offset between a worker's own place and the first place that it probes on another host.
        reach: how many workers of each other host a worker probes.
        unreached: for each worker that has answered, why it could not reach others, by node id.
        began: when each worker that has answered began to probe.
        silent: node ids of workers that were not reached and were not heard either while they were probed.
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
        """Returns the workers of another host that the worker with this place on its host probes."""
        return opposite(self.hosts[host_id], place, self.shift, self.reach)

    def failed(self, session: events.SessionId, target: events.SessionId) -> str | None:
        """Returns why one worker could not reach another that it had to probe; "" if it could.

        None if that is not known, because one of them may have been paused while the other probed it.
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
        """Stores an answer; ``heard``: when workers were last heard, by node id."""
        session, began = answer.session, now - answer.seconds
        unreached = dict(answer.unreached)
        self.answers[session], self.unreached[session], self.began[session] = answer, unreached, began
        silent = (node_id for node_id in unreached if heard.get(node_id, began) < began)
        self.silent[session] = frozenset(silent if answer.seconds >= LONG_S else ())


@dataclass(frozen=True, slots=True)
class Hang:
    """A member for which others wait: since when, and in which step."""

    since: float
    place: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProbeBackoff:
    """The pause until a further round is needed, after all members were found to reach each other.

    Attributes:
        rounds: number of consecutive rounds with that result. The next round probes other pairs of workers;
            otherwise, a broken path between two single workers would never be found.
    """

    generation: int = 0
    until: float = 0.0
    pause_s: float = ROUND_PAUSE_S
    rounds: int = 0

    def again(self, generation: int, now: float) -> ProbeBackoff:
        """The state after one more such round; the pause grows within a generation."""
        same = generation == self.generation
        pause_s = min(2 * self.pause_s, LONGEST_ROUND_PAUSE_S) if same else ROUND_PAUSE_S
        return ProbeBackoff(generation, now + pause_s, pause_s, self.rounds + 1 if same else 1)


PartyName = tuple[str, str]
"""The id of a host, and the node id of a worker on it, or "" for all of its workers."""

BrokenPair = tuple[PartyName, PartyName]
"""A party that may be at fault, and the party to which its path was broken."""


@dataclass(slots=True)
class Probing:
    """A job's rounds of probes and their findings; empty after a restart of the scheduler.

    Attributes:
        current: the round in progress.
        number: number of the newest round.
        not_before: when the next round may begin.
        wanted: whether a round among the members is wanted.
        backoff: the pause until the next round is needed, if all members reach each other.
        hangs: the members that others wait for.
        awaited: the members that were reported as awaited, including busy ones, and the step of each at that
            time.
        said: the last report, so that it is not repeated at every round.
        broken: for each pair that could not reach each other, who may be at fault: both if neither had other
            broken paths; only the one with several broken paths otherwise.
        barred: the reason why a host (by its id) or a worker (by its node id) is kept out.
        outside: the Joins of barred workers.
        taken_in: those of these Joins whose workers were just found to be reachable.
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
        """Returns when a round must end or begin; None if no round is wanted."""
        if self.current is not None:
            return self.current.due
        times = [self.not_before] if self.outside or self.wanted else []
        times += [self.hang_due(hang_timeout_s)] if self.hangs else []
        return max(min(times), self.not_before) if times else None

    def hang_due(self, hang_timeout_s: float) -> float:
        """Returns when the others will have waited too long for the first member."""
        return min(hang.since for hang in self.hangs.values()) + hang_timeout_s

    def repeat(self) -> None:
        """Repeats the round in progress, because its answers may be out of date."""
        current, self.current = self.current, None
        self.wanted = self.wanted or (current is not None and current.among_members)

    def drop_round_of_members(self) -> None:
        """Ignores further answers to the round in progress, because all members have just met."""
        if self.current is not None and self.current.among_members:
            self.current = None

    def forget_waits(self) -> None:
        """Training goes on, so the next wait counts as a new one."""
        self.awaited, self.said, self.backoff = {}, "", ProbeBackoff()

    def take_in(self) -> list[events.Joined]:
        """Takes and returns the Joins of workers that were just found to reach all members."""
        joins, self.taken_in = self.taken_in, []
        return joins

    def forget(self, session: events.SessionId) -> None:
        """Removes a stream that has ended from all rounds."""
        self.addresses.pop(session, None)
        self.outside.pop(session, None)
