"""Which rank of a job holds the others up: by how much, since when, and of what kind.

Members say with their heartbeats where the time of their steps went, in ``StepTimes``. All steps of a job
end together, so a rank that is slow shows in two ways: it computes, or waits for data, longer than the
others, and the others wait about as much longer for it. Neither alone would do: who computes longer beside a
collective that is under way holds nobody up, and who waits does not tell for which rank.

Sums are laid side by side in *intervals*, in which every member has ended a step: as long as the time between
two reports of a member, a second or more. A rank is named after as many intervals as its slowdown is small
(``LEVELS``), and only beyond what chance would make of the ranks' own variation from interval to interval.
One long step is no straggler: the longest of a window does not count.

Where a link is slow, all wait and nobody computes longer. Its sender has data then that cannot leave, far
longer than what others have for their slowest link; only links within hosts are compared with each other, and
only those between hosts.
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
"""Intervals of a window, and the slowdown from which on a rank is named by it."""

STAYS, FORGOTTEN_AFTER = 0.5, 5
"""Part of a level's slowdown that keeps a named rank named; and intervals without, after which it is not."""

SIEVE = 0.04
"""Part of a step beyond the usual, from which on a rank is looked at."""

LEAST_STEPS = 10
"""Steps that a window has at least."""

SIGMAS = 6.0
"""By how many standard errors a rank is beyond the others at least."""

OWN_SIGMAS = 6.0
"""By how many of its own standard errors a rank is beyond the others at least."""

SLOW_SHARE = 0.75
"""Part of a window's intervals in which a rank must be slow."""

CONFIRMED = 0.5
"""Part of a rank's excess that the others wait for it at least."""

LINKS_COMPARED = 2
"""Other links that there must be to say that one is slow."""

TIMES_OTHERS = 3.0
"""How much longer than others' data those of a slow link cannot leave."""

ONE_OFF_STEPS, ONE_OFF_S, ONE_OFF_SHOWN_S = 5.0, 2.0, 30.0
"""A single step is remarked on that takes so many usual ones and so many seconds, for so long."""

NAMED_AT_MOST = 8


class Seat(NamedTuple):
    """A member's place."""

    rank: int
    host_id: str


@dataclass(slots=True)
class Tally:
    """What a member has said of the steps of one interval; sums and longest in seconds."""

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
        """Adds what came with a heartbeat."""
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
        """What a step took this member itself, in seconds."""
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
        """The window of these intervals; per step."""
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
        """What a step took this member itself, in seconds."""
        return self.computed + self.data

    @property
    def whole(self) -> float:
        """What a step took in all, in seconds."""
        return self.computed + self.data + self.waited


class Interval(NamedTuple):
    """What all members have said of it, and who stands out in it, as a first sieve."""

    begun: float
    tallies: Mapping[str, Tally]
    stand_out: frozenset[str]

    @classmethod
    def of(cls, begun: float, tallies: Mapping[str, Tally]) -> Interval:
        """The interval; who stands out in it is busy, or has a link, beyond the usual by a part of a step."""
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
    """Somebody who holds the others up, as found in a window."""

    node_id: str
    kind: str
    excess_s: float
    slowdown: float
    peer_rank: int = -1


@dataclass(slots=True)
class Named:
    """A finding that holds, since when, and for how many intervals it was not found again."""

    finding: Holdup
    since: float
    unseen: int = 0


@dataclass
class StragglerWatch:
    """Who holds up the members of one generation.

    Attributes:
        seats: the members by node id.
        named: who is named now.
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
        """How long an interval lasts at least, in seconds."""
        return messages.step_times_apart_s(len(self.seats))

    def shares(self, node_id: str) -> messages.StepShares | None:
        """Where the time of a member's last steps went; None: not known yet."""
        tally = self._past[-1].tallies.get(node_id) if self._past else None
        if tally is None:
            return None
        steps = tally.steps
        return messages.StepShares(tally.computed / steps, tally.waited / steps, tally.data / steps)

    def step_s(self) -> float | None:
        """How long a step took in the last interval, in seconds, at the usual member; None: not known yet."""
        tallies = self._past[-1].tallies.values() if self._past else ()
        return median((t.computed + t.waited + t.data) / t.steps for t in tallies) if tallies else None

    def data_s(self, now: float) -> float:
        """How much of the last interval, which has just ended, the members waited for data, in seconds."""
        if not self._past:
            return 0.0
        newest = self._past[-1]
        data = sum(tally.data for tally in newest.tallies.values())
        whole = data + sum(tally.computed + tally.waited for tally in newest.tallies.values())
        return (now - newest.begun) * data / whole if whole > 0.0 else 0.0

    def hear(self, node_id: str, times: messages.StepTimes, now: float) -> bool:
        """Takes in what a member says; returns whether an interval has ended by that."""
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
        # A rank that is stopped now and then is not always seen to be slow.
        for node_id, known in before.items():
            if node_id not in self.named and known.unseen + 1 < FORGOTTEN_AFTER:
                self.named[node_id] = replace(known, unseen=known.unseen + 1)

    def _stand_out(self, intervals: Sequence[Interval]) -> bool:
        """Whether anybody stands out in most of these intervals."""
        counts = Counter(node_id for interval in intervals for node_id in interval.stand_out)
        return max(counts.values(), default=0) >= SLOW_SHARE * len(intervals)

    def _slow_since(self, finding: Holdup) -> float:
        """When the first of the last intervals began in each of which it was slow."""
        since = self._past[-1].begun
        for interval in reversed(self._past):
            if not self._is_slow(finding, interval.tallies):
                break
            since = interval.begun
        return since

    def _is_slow(self, finding: Holdup, interval: Mapping[str, Tally]) -> bool:
        """Whether a rank exceeds the others in one interval by half of what it does in the window."""
        own = interval[finding.node_id]
        others = [tally for node_id, tally in interval.items() if node_id != finding.node_id]
        if finding.kind == LINK:
            return own.link_s / own.steps >= finding.excess_s / 2
        return own.busy - median(tally.busy for tally in others) >= finding.excess_s / 2

    def _find(self, intervals: Sequence[Interval], least: float) -> list[Holdup]:
        """Who is slow over these intervals, by a slowdown of at least ``least``."""
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
        """The slowdown that names a rank; less for one that is named already."""
        return 1.0 + (least - 1.0) * (STAYS if node_id in self.named else 1.0)

    def _is_steady(self, finding: Holdup, intervals: Sequence[Interval]) -> bool:
        """Whether it is so in most of the intervals, and not by a few long steps that fell into them."""
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
        """The standard error of a rank's busy time over a window, by how the usual rank's varies in it."""
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
        """The link that is slow, where nobody computes or loads longer; none, or one."""
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
        """Remarks on a rank of which a single step took very long, where that is all."""
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
    """Mean and variance."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1)


def _slowdown(whole_s: float, excess_s: float) -> float:
    """How many times as long a step takes because of what it has in excess."""
    return whole_s / max(whole_s - excess_s, whole_s / 100)


def in_words(finding: Holdup, who: str, peer: str, seconds: float) -> str:
    """A finding in a sentence.

    Args:
        finding: what was found.
        who: the rank, in words.
        peer: the other end of a link, in words.
        seconds: for how long it is so.
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
