"""Finds the rank that holds up a job: by how much, since when, and for which reason.

Members report with their heartbeats how the time of their steps was spent, in ``StepTimes``. All ranks end a
step together, so a slow rank shows in two ways: it computes, or waits for data, longer than the others, and
the others wait for it by about as much. Neither is sufficient alone: a rank that computes longer in parallel
with a collective holds nobody up, and a rank that waits does not show which rank it waits for.

Sums are compared in *intervals* in which every member has ended a step. An interval is as long as the time
between two reports of a member, at least one second. The smaller a rank's slowdown, the more intervals it
takes until it is reported (``LEVELS``), and it must exceed what the ranks' own variation between intervals
would explain. One long step does not make a straggler: the longest step of a window is ignored.

If a link is slow, all ranks wait and none computes longer. The data of the sender on that link then stays
unsent for far longer than data on the slowest link of any other rank. Links within hosts are compared only
with each other, and so are links between hosts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from statistics import median
from typing import NamedTuple

from muster.wire import messages

COMPUTING, DATA, LINK, ONE_OFF = "computing", "data", "link", "one-off"

LEVELS = ((5, 1.5), (8, 1.3), (16, 1.2))
"""Pairs of a window's length in intervals and the slowdown from which on a rank is reported in it."""

STAYS, FORGOTTEN_AFTER = 0.5, 5
"""The part of a level's slowdown with which a reported rank stays reported, and the number of intervals below
it after which the rank is no longer reported.
"""

SIEVE = 0.04
"""A rank is examined if it exceeds the usual rank by this part of a step."""

LEAST_STEPS = 10
"""The least number of steps in a window."""

SIGMAS = 6.0
"""By how many standard errors of the others a rank must exceed them."""

OWN_SIGMAS = 6.0
"""By how many of its own standard errors a rank must exceed the others."""

SLOW_SHARE = 0.75
"""The share of a window's intervals in which a rank must be slow."""

CONFIRMED = 0.5
"""The share of a rank's excess time for which the other ranks must wait."""

LINKS_COMPARED = 2
"""How many other links there must be for a link to be called slow."""

TIMES_OTHERS = 3.0
"""A link is slow if data waits on it this many times as long as on other links."""

ONE_OFF_STEPS, ONE_OFF_S, ONE_OFF_SHOWN_S = 5.0, 2.0, 30.0
"""The length from which on a single step is reported, in usual steps and in seconds, and for how many seconds
the report is shown.
"""

NAMED_AT_MOST = 8


class Seat(NamedTuple):
    """A member's place."""

    rank: int
    host_id: str


@dataclass(slots=True)
class Tally:
    """A member's step times in one interval; sums and longest in seconds."""

    steps: int = 0
    computed: float = 0.0
    computed_most: float = 0.0
    waited: float = 0.0
    data: float = 0.0
    data_most: float = 0.0
    link_s: float = 0.0
    link_most: float = 0.0
    link: int = 0

    def take(self, times: messages.StepTimes) -> None:
        """Adds the times from a heartbeat."""
        computed, computed_most, waited, _, data, data_most, link_s = times.seconds
        self.steps += times.steps
        self.computed += computed
        self.waited += waited
        self.data += data
        if computed_most > self.computed_most:
            self.computed_most = computed_most
        if data_most > self.data_most:
            self.data_most = data_most
        if times.link and link_s >= self.link_most:
            self.link, self.link_most = times.link, link_s
        self.link_s += link_s

    @property
    def busy(self) -> float:
        """The time of a step in which this member itself was busy, in seconds."""
        return (self.computed + self.data) / self.steps


@dataclass(slots=True)
class Window:
    """Sums of one member over several intervals, without its longest step."""

    steps: int
    computed: float
    waited: float
    data: float
    link_s: float

    @classmethod
    def over(cls, tallies: Sequence[Tally]) -> Window:
        """Builds the window of these intervals, with times per step."""
        steps = sum(tally.steps for tally in tallies)
        computed, data = sum(t.computed for t in tallies), sum(t.data for t in tallies)
        longest_computed = max(t.computed_most for t in tallies)
        longest_data = max(t.data_most for t in tallies)
        counted = steps
        if steps > 1:
            counted = steps - 1
            computed, data = computed - longest_computed, data - longest_data
        return cls(
            steps,
            max(0.0, computed) / counted,
            sum(t.waited for t in tallies) / steps,
            max(0.0, data) / counted,
            sum(t.link_s for t in tallies) / steps,
        )

    @property
    def busy(self) -> float:
        """The time of a step in which this member itself was busy, in seconds."""
        return self.computed + self.data

    @property
    def whole(self) -> float:
        """The whole time of a step, in seconds."""
        return self.computed + self.data + self.waited


class Interval(NamedTuple):
    """The times of all members in an interval, and a first selection of the members that stand out in it."""

    begun: float
    tallies: Mapping[str, Tally]
    stand_out: frozenset[str]

    @classmethod
    def of(cls, begun: float, tallies: Mapping[str, Tally]) -> Interval:
        """Builds the interval, and selects the members whose busy time or link exceeds the usual one."""
        rows = [(node_id, t.computed + t.data, t.waited, t.link_s, t.steps) for node_id, t in tallies.items()]
        whole_s = median([(busy + waited) / steps for _, busy, waited, _, steps in rows])
        busy_s = median([busy / steps for _, busy, _, _, steps in rows]) + SIEVE * whole_s
        link_s = median([link / steps for _, _, _, link, steps in rows]) + SIEVE * whole_s
        found = [
            node_id
            for node_id, busy, _, link, steps in rows
            if busy > busy_s * steps or link > link_s * steps
        ]
        return cls(begun, tallies, frozenset(found))


@dataclass(frozen=True, slots=True)
class Holdup:
    """A rank that holds up the others, as found in a window."""

    node_id: str
    kind: str
    excess_s: float
    slowdown: float
    peer_rank: int = -1


@dataclass(slots=True)
class Named:
    """A finding that is being reported, its beginning, and for how many intervals it was not found again."""

    finding: Holdup
    since: float
    unseen: int = 0


@dataclass
class StragglerWatch:
    """Watches which members of one generation hold up the others.

    Attributes:
        seats: the members by node id.
        named: the findings that are reported now.
        one_offs: single long steps, and when they were seen.
    """

    seats: Mapping[str, Seat] = field(default_factory=dict)
    named: dict[str, Named] = field(default_factory=dict)
    one_offs: dict[str, Named] = field(default_factory=dict)
    _open: dict[str, Tally] = field(default_factory=dict)
    _begun: float = -1.0
    _past: deque[Interval] = field(default_factory=lambda: deque(maxlen=max(count for count, _ in LEVELS)))

    @property
    def interval_s(self) -> float:
        """The least length of an interval, in seconds."""
        return messages.step_times_apart_s(len(self.seats))

    def shares(self, node_id: str) -> messages.StepShares | None:
        """Returns how the time of a member's recent steps was spent; None if not yet known."""
        tally = self._past[-1].tallies.get(node_id) if self._past else None
        if tally is None:
            return None
        steps = tally.steps
        return messages.StepShares(tally.computed / steps, tally.waited / steps, tally.data / steps)

    def step_s(self) -> float | None:
        """Returns the median of the members' step times in the last interval, in seconds.

        None if not yet known.
        """
        tallies = self._past[-1].tallies.values() if self._past else ()
        return median((t.computed + t.waited + t.data) / t.steps for t in tallies) if tallies else None

    def data_s(self, now: float) -> float:
        """For how much of the interval that has just ended the members waited for data, in seconds."""
        if not self._past:
            return 0.0
        newest = self._past[-1]
        data = sum(tally.data for tally in newest.tallies.values())
        whole = data + sum(tally.computed + tally.waited for tally in newest.tallies.values())
        return (now - newest.begun) * data / whole if whole > 0.0 else 0.0

    def hear(self, node_id: str, times: messages.StepTimes, now: float) -> bool:
        """Handles a member's report; returns whether it has ended an interval."""
        if node_id not in self.seats:
            return False
        if self._begun < 0.0:
            self._begun = now
        tally = self._open.get(node_id)
        if tally is None:
            tally = self._open[node_id] = Tally()
        tally.take(times)
        if now < self._begun + self.interval_s or len(self._open) < len(self.seats):
            return False
        self._past.append(Interval.of(self._begun, self._open))
        self._open, self._begun = {}, now
        self._look(now)
        return True

    # ------------------------------------------------------------ what follows from an interval

    def _look(self, now: float) -> None:
        newest = self._past[-1].tallies
        if len(self.seats) < 2:
            return
        self._look_for_one_offs(newest, now)
        found: dict[str, Holdup] = {}
        for count, slowdown in LEVELS:
            intervals = list(self._past)[-count:]
            if len(intervals) == count and self._stand_out(intervals):
                for finding in self._find(intervals, slowdown):
                    found.setdefault(finding.node_id, finding)
        worst = sorted(found.values(), key=lambda each: -each.excess_s)[:NAMED_AT_MOST]
        before, self.named = self.named, {}
        for finding in worst:
            known = before.get(finding.node_id)
            same = known is not None and (known.finding.kind == LINK) == (finding.kind == LINK)
            since = known.since if same and known is not None else self._slow_since(finding)
            self.named[finding.node_id] = Named(finding, since)
        # A rank that is stopped from time to time is not seen to be slow in every interval.
        for node_id, known in before.items():
            if node_id not in self.named and known.unseen + 1 < FORGOTTEN_AFTER:
                self.named[node_id] = replace(known, unseen=known.unseen + 1)

    def _stand_out(self, intervals: Sequence[Interval]) -> bool:
        """Whether some rank stands out in most of these intervals."""
        counts = Counter(node_id for interval in intervals for node_id in interval.stand_out)
        return max(counts.values(), default=0) >= SLOW_SHARE * len(intervals)

    def _slow_since(self, finding: Holdup) -> float:
        """When the first of the latest consecutive intervals began in which the rank was slow."""
        since = self._past[-1].begun
        for interval in reversed(self._past):
            if not self._is_slow(finding, interval.tallies):
                break
            since = interval.begun
        return since

    def _is_slow(self, finding: Holdup, interval: Mapping[str, Tally]) -> bool:
        """Whether a rank exceeds the others in one interval by at least half of its excess in the window."""
        own = interval[finding.node_id]
        others = [tally for node_id, tally in interval.items() if node_id != finding.node_id]
        if finding.kind == LINK:
            return own.link_s / own.steps >= finding.excess_s / 2
        return own.busy - median(tally.busy for tally in others) >= finding.excess_s / 2

    def _find(self, intervals: Sequence[Interval], least: float) -> list[Holdup]:
        """Finds the rank that is slow in these intervals, by a slowdown of at least ``least``."""
        windows = {
            node_id: Window.over([interval.tallies[node_id] for interval in intervals])
            for node_id in self.seats
        }
        whole_s = median(window.whole for window in windows.values())
        if whole_s <= 0.0 or min(window.steps for window in windows.values()) < LEAST_STEPS:
            return []
        usual = median(window.busy for window in windows.values())
        errors = self._standard_errors(intervals)
        found = []
        for node_id, window in windows.items():
            if window.busy <= usual and len(windows) > 2:
                continue
            others = [each for other, each in windows.items() if other != node_id]
            excess_s = window.busy - median(each.busy for each in others)
            needed = self._threshold(node_id, least)
            slowdown = _slowdown(whole_s, excess_s)
            waited_s = median(each.waited for each in others)
            if slowdown < needed or excess_s < SIGMAS * errors or waited_s < CONFIRMED * excess_s:
                continue
            data_s = window.data - median(each.data for each in others)
            kind = DATA if data_s > excess_s / 2 else COMPUTING
            finding = Holdup(node_id, kind, excess_s, slowdown)
            if self._is_steady(finding, intervals):
                found.append(finding)
        return found or self._find_links(windows, intervals, whole_s, least)

    def _threshold(self, node_id: str, least: float) -> float:
        """The slowdown from which on a rank is reported; lower for one that is reported already."""
        return 1.0 + (least - 1.0) * (STAYS if node_id in self.named else 1.0)

    def _is_steady(self, finding: Holdup, intervals: Sequence[Interval]) -> bool:
        """Whether the rank is slow in most of the intervals, and not only because of a few long steps."""
        slow = sum(self._is_slow(finding, interval.tallies) for interval in intervals)
        if slow < SLOW_SHARE * len(intervals):
            return False
        if finding.kind == LINK:
            return True
        excesses = []
        for interval in intervals:
            tallies = interval.tallies
            others = [tally.busy for node_id, tally in tallies.items() if node_id != finding.node_id]
            excesses.append(tallies[finding.node_id].busy - median(others))
        mean, variance = _moments(excesses)
        return mean >= OWN_SIGMAS * math.sqrt(variance / len(excesses))

    def _standard_errors(self, intervals: Sequence[Interval]) -> float:
        """The standard error of a rank's busy time in a window, from the variation of the usual rank."""
        variances = []
        for node_id in self.seats:
            variances.append(_moments([interval.tallies[node_id].busy for interval in intervals])[1])
        return math.sqrt(median(variances) / len(intervals))

    # ------------------------------------------------------------ links

    def _find_links(
        self,
        windows: Mapping[str, Window],
        intervals: Sequence[Interval],
        whole_s: float,
        least: float,
    ) -> list[Holdup]:
        """Finds a slow link if no rank computes or loads data longer; returns at most one."""
        hosts = {seat.rank: seat.host_id for seat in self.seats.values()}
        kinds: dict[bool, list[str]] = {False: [], True: []}
        for node_id, seat in self.seats.items():
            peers = [interval.tallies[node_id].link for interval in intervals]
            peer = max(set(peers), key=peers.count) - 1
            if peer in hosts:
                kinds[hosts[peer] != seat.host_id].append(node_id)
        best: Holdup | None = None
        for alike in kinds.values():
            if len(alike) <= LINKS_COMPARED:
                continue
            worst = max(alike, key=lambda node_id: windows[node_id].link_s)
            usual_s = median(windows[node_id].link_s for node_id in alike if node_id != worst)
            own_s = windows[worst].link_s
            slowdown = _slowdown(whole_s, own_s - usual_s)
            if own_s < TIMES_OTHERS * usual_s or slowdown < self._threshold(worst, least):
                continue
            peers = [interval.tallies[worst].link for interval in intervals]
            peer = max(set(peers), key=peers.count)
            finding = Holdup(worst, LINK, own_s - usual_s, slowdown, peer - 1)
            same = peers.count(peer) >= SLOW_SHARE * len(peers)
            if same and self._is_steady(finding, intervals) and (best is None or slowdown > best.slowdown):
                best = finding
        return [best] if best is not None else []

    # ------------------------------------------------------------ single steps

    def _look_for_one_offs(self, interval: Mapping[str, Tally], now: float) -> None:
        """Reports a rank if a single step of it took very long and nothing else was found."""
        longest = {node_id: max(tally.computed_most, tally.data_most) for node_id, tally in interval.items()}
        (worst, most_s), (_, next_s) = nlargest(2, longest.items(), key=lambda each: each[1])
        if most_s > max(ONE_OFF_S, 2 * next_s):
            usual_s = median(
                (t.computed + t.data + t.waited) / t.steps
                for past in self._past
                for t in past.tallies.values()
            )
            if most_s > ONE_OFF_STEPS * usual_s:
                self.one_offs[worst] = Named(Holdup(worst, ONE_OFF, most_s, 1.0), now)
        self.one_offs = {
            node_id: seen for node_id, seen in self.one_offs.items() if now < seen.since + ONE_OFF_SHOWN_S
        }


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the variance."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1)


def _slowdown(whole_s: float, excess_s: float) -> float:
    """Returns the factor by which a rank's excess makes a step longer."""
    return whole_s / max(whole_s - excess_s, whole_s / 100)


def in_words(finding: Holdup, who: str, peer: str, seconds: float) -> str:
    """Describes a finding in a sentence.

    Args:
        finding: the finding.
        who: the rank, in words.
        peer: the other end of a link, in words.
        seconds: how long the rank or link has been slow.
    """
    excess, times = _seconds(finding.excess_s), f"{finding.slowdown:.1f} times as long"
    if finding.kind == ONE_OFF:
        return f"{who} took {excess} for a single step, {seconds:.0f} s ago."
    if finding.kind == LINK:
        return (
            f"The link from {who} to {peer} holds all up: data wait {excess} a step to leave on it, for"
            f" {seconds:.0f} s now; steps take {times}."
        )
    what = "waits for data" if finding.kind == DATA else "computes"
    return (
        f"{who} holds the others up: it {what} {excess} a step longer than they do, for {seconds:.0f} s now;"
        f" steps take {times}."
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
