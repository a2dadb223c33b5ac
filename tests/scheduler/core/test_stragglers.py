"""Who holds the others up: traces of even and uneven work, drawn with a seed, through the core."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from muster.scheduler.core import events
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.stragglers import (
    COMPUTING,
    DATA,
    LINK,
    ONE_OFF,
    Holdup,
    Seat,
    StragglerWatch,
    in_words,
)
from muster.wire import messages
from tests.scheduler.core.scenes import ELASTIC, history, join

RECORDED = Path(__file__).parent / "step_traces"


@dataclass(frozen=True)
class Steps:
    """What one rank does in a step, in seconds; ``noise``: standard deviation of their logarithm."""

    computed_s: float = 0.1
    data_s: float = 0.002
    noise: float = 0.05
    link_s: float = 0.004
    computed_at: Callable[[float, random.Random], float] = lambda now, dice: 0.0
    """What comes to a step that begins then, in seconds."""


class Job:
    """Ranks whose steps end together, and the core that hears of them once a second."""

    def __init__(self, ranks: list[Steps], seed: int, hosts: int = 1, collective_s: float = 0.02) -> None:
        self.ranks, self.collective_s = ranks, collective_s
        self.dice = random.Random(seed)
        seats = {str(rank): Seat(rank, f"host-{rank * hosts // len(ranks)}") for rank in range(len(ranks))}
        self.watch = StragglerWatch(seats)
        self.now, self.steps = 0.0, 0
        self.named: dict[str, tuple[float, int, str]] = {}
        """When each was named first, at which step, and of what kind."""
        self._beats = [self.dice.uniform(0.0, 1.0) for _ in ranks]
        self._told: list[list[tuple[float, float, float, float]]] = [[] for _ in ranks]

    def run(self, seconds: float) -> Job:
        until = self.now + seconds
        while self.now < until:
            self._step()
        return self

    def _step(self) -> None:
        dice = self.dice
        own = [
            (
                steps.computed_s * dice.lognormvariate(0.0, steps.noise) + steps.computed_at(self.now, dice),
                steps.data_s * dice.lognormvariate(0.0, steps.noise),
            )
            for steps in self.ranks
        ]
        slowest_link_s = max(steps.link_s for steps in self.ranks)
        whole_s = max(map(sum, own)) + self.collective_s + slowest_link_s
        self.now, self.steps = self.now + whole_s, self.steps + 1
        for rank, (computed_s, data_s) in enumerate(own):
            waited_s = whole_s - computed_s - data_s
            link_s = self.ranks[rank].link_s * dice.lognormvariate(0.0, 0.3)
            self._told[rank].append((computed_s, waited_s, data_s, link_s))
            if self.now >= self._beats[rank]:
                self._beats[rank] = max(self.now, self._beats[rank] + 1.0)
                self._beat(rank)

    def _beat(self, rank: int) -> None:
        told, self._told[rank] = self._told[rank], []
        seconds = [f(column) for column in zip(*(each[:3] for each in told), strict=True) for f in (sum, max)]
        seconds.append(sum(each[3] for each in told))
        times = messages.StepTimes(len(told), tuple(seconds), (rank + 1) % len(self.ranks) + 1)
        self.watch.hear(str(rank), times, self.now)
        for node_id, named in self.watch.named.items():
            self.named.setdefault(node_id, (self.now, self.steps, named.finding.kind))


def even(ranks: int, **steps: float) -> list[Steps]:
    return [replace(Steps(), **steps)] * ranks  # type: ignore[arg-type]  # of the durations alone


def with_one(ranks: int, which: int, slow: Steps, **steps: float) -> list[Steps]:
    ordinary = even(ranks, **steps)
    return [*ordinary[:which], slow, *ordinary[which + 1 :]]


def spikes(chance: float, seconds: float) -> Callable[[float, random.Random], float]:
    return lambda _, dice: seconds if dice.random() < chance else 0.0


def bursts(every_s: float, stopped_s: float) -> Callable[[float, random.Random], float]:
    """As of a process that is stopped for so long in each period."""
    return lambda now, _: max(0.0, stopped_s - now % every_s)


EVEN = {
    "quiet": lambda: even(4),
    "noisy": lambda: even(4, noise=0.3),
    "very noisy": lambda: even(4, noise=0.6),
    "two, noisy": lambda: even(2, noise=0.4),
    "quick steps": lambda: even(4, computed_s=0.005, noise=0.4),
    "slow steps": lambda: even(4, computed_s=1.5, noise=0.3),
    "many": lambda: even(64, noise=0.3),
    "very many": lambda: even(256, noise=0.5),
    "all hiccup now and then": lambda: [Steps(computed_at=spikes(0.01, 1.0), noise=0.2)] * 4,
    "slow loaders everywhere": lambda: even(4, data_s=0.3, noise=0.3),
    "one is a little slower": lambda: with_one(4, 1, Steps(computed_s=0.104)),
    "nothing but collectives": lambda: even(4, computed_s=0.0005, data_s=0.0, noise=0.8),
    "large messages": lambda: even(4, link_s=0.2),
}
UNEVEN: dict[str, tuple[Callable[[], list[Steps]], str]] = {
    "computes longer": (lambda: with_one(4, 2, Steps(computed_s=0.4)), COMPUTING),
    "half as fast": (lambda: with_one(4, 2, Steps(computed_s=0.22)), COMPUTING),
    "among noise": (lambda: with_one(4, 2, Steps(computed_s=0.5, noise=0.4), noise=0.4), COMPUTING),
    "of two": (lambda: with_one(2, 1, Steps(computed_s=0.3)), COMPUTING),
    "of many": (lambda: with_one(256, 2, Steps(computed_s=0.4), noise=0.2), COMPUTING),
    "stopped again and again": (
        lambda: with_one(4, 2, Steps(computed_at=bursts(0.8, 0.5))),
        COMPUTING,
    ),
    "slow loader": (lambda: with_one(4, 2, Steps(data_s=0.3)), DATA),
    "slow loader among noise": (lambda: with_one(4, 2, Steps(data_s=0.4, noise=0.3), noise=0.3), DATA),
    "slow link": (lambda: with_one(4, 2, Steps(link_s=0.3)), LINK),
    "slow link of many": (lambda: with_one(32, 2, Steps(link_s=0.3), noise=0.2), LINK),
}


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_named_on_even_work(name: str, seed: int) -> None:
    job = Job(EVEN[name](), seed).run(600.0 if len(EVEN[name]()) < 64 else 60.0)
    assert job.named == {}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("seed", range(3))
def test_who_holds_the_others_up_is_named_within_20_seconds_and_50_steps(name: str, seed: int) -> None:
    ranks, kind = UNEVEN[name]
    slow = ranks()
    which = min(2, len(slow) - 1)
    job = Job(slow, seed)
    job.run(20.0)
    assert {node_id: named[2] for node_id, named in job.named.items()} == {str(which): kind}
    (seconds, steps, _) = job.named[str(which)]
    assert seconds <= 20.0
    assert steps <= 50


@pytest.mark.parametrize(
    ("recorded", "named"),
    [("stopped", {2: COMPUTING}), ("loader", {2: DATA}), ("link", {1: LINK}), ("even", {})],
)
def test_traces_recorded_from_four_real_workers(recorded: str, named: dict[int, str]) -> None:
    watch = StragglerWatch({str(rank): Seat(rank, "host") for rank in range(4)})
    found: dict[int, str] = {}
    for line in (RECORDED / f"{recorded}.jsonl").read_text().splitlines():
        now, rank, steps, seconds, link = json.loads(line)
        watch.hear(str(rank), messages.StepTimes(steps, tuple(seconds), link), now)
        found.update({int(node_id): each.finding.kind for node_id, each in watch.named.items()})
    assert found == named


def test_a_single_long_step_is_remarked_on_and_is_no_straggler() -> None:
    hiccup = Steps(computed_at=lambda now, _: 8.0 if 10.0 <= now < 10.15 else 0.0)
    job = Job(with_one(4, 2, hiccup), 0).run(40.0)
    assert job.named == {}
    assert {node_id: seen.finding.kind for node_id, seen in job.watch.one_offs.items()} == {"2": ONE_OFF}
    job.run(40.0)
    assert job.watch.one_offs == {}


def test_who_is_as_fast_as_the_others_again_is_not_named_any_more() -> None:
    slow_for_a_while = Steps(computed_at=lambda now, _: 0.3 if now < 20.0 else 0.0)
    job = Job(with_one(4, 2, slow_for_a_while), 0).run(20.0)
    assert list(job.watch.named) == ["2"]
    assert job.watch.named["2"].since < 2.0
    job.run(20.0)
    assert job.watch.named == {}


def test_links_are_compared_with_links_of_their_kind_alone() -> None:
    """Of two hosts, two links go between them, and are slower than those within: by what, nobody can say."""
    between = Steps(link_s=0.3)
    ranks = [between if rank in (3, 7) else Steps() for rank in range(8)]
    assert Job(ranks, 0, hosts=2).run(60.0).named == {}


def test_who_computes_beside_a_collective_holds_nobody_up() -> None:
    """It computes longer, and nobody waits for it: so it is where communication takes the time."""
    watch = StragglerWatch({str(rank): Seat(rank, "host") for rank in range(4)})
    for second in range(60):
        for rank in range(4):
            computed_s = 8.0 if rank == 2 else 4.0
            seconds = (computed_s / 10, computed_s / 100, 0.02, 0.002, 0.0, 0.0, 0.0)
            watch.hear(str(rank), messages.StepTimes(10, seconds), second + rank / 10)
    assert watch.named == {}


# ---------------------------------------------------------------- what a job says and does


def beaten(job: Machine, sessions: dict[int, float], since: int, until: int) -> list[str]:
    """Workers that compute so long a step, once a second; returns what was said."""
    said = []
    longest = max(sessions.values())
    for second in range(since, until):
        for session, computed_s in sessions.items():
            waited_s = longest - computed_s + 0.01
            times = (5 * computed_s, computed_s, 5 * waited_s, waited_s, 0.0, 0.0, 0.0)
            generation = job.job.ledger.generation
            beat = events.Heard(
                session,
                generation,
                5 * second,
                5 * second + 1,
                1.0,
                entered_generation=generation,
                times=messages.StepTimes(5, times),
            )
            said.append(job.step(beat, float(second)).reason)
    return [reason for reason in said if reason]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (COMPUTING, "rank 1 holds the others up: it computes 1.5 s a step longer than they do"),
        (DATA, "rank 1 holds the others up: it waits for data 1.5 s a step longer than they do"),
        (LINK, "The link from rank 1 to rank 2 holds all up: data wait 1.5 s a step to leave on it"),
        (ONE_OFF, "rank 1 took 1.5 s for a single step, 7 s ago."),
    ],
)
def test_each_kind_has_its_sentence(kind: str, words: str) -> None:
    found = Holdup("b", kind, excess_s=1.5, slowdown=2.0)
    assert in_words(found, "rank 1", "rank 2", 7.0).startswith(words)


def test_the_report_of_a_worker_without_a_seat_counts_as_nothing() -> None:
    watch = StragglerWatch({"a": Seat(0, "left"), "b": Seat(1, "left")})
    assert not watch.hear("spare", messages.StepTimes(1, (0.1,) * 6), 1.0)
    assert watch.data_s(1.0) == 0.0 and watch.step_s() is None


def two_and_a_spare(policy: events.DrainPolicy | None) -> Machine:
    job = Machine("red", replace(ELASTIC, spares=1, drain_stragglers=policy))
    history(job, join(1, "a"), join(2, "b"), events.BuiltReported(1, 1), events.BuiltReported(2, 1))
    spare = join(3, "c")
    history(job, spare.replaced(candidate=spare.candidate.replaced(spare=True)))
    return job


def test_a_straggler_is_said_once_and_shown_until_it_is_none() -> None:
    job = two_and_a_spare(None)
    said = beaten(job, {1: 0.1, 2: 0.4}, 0, 12)
    named = [sentence for sentence in said if "holds the others up" in sentence]
    assert len(named) == 1
    sentence = "Rank 1 (node b on host host-b) holds the others up: it computes 300 ms a step longer"
    assert named[0].startswith(sentence)
    view = job.view(12.0)
    assert [(each.node_id, each.kind, each.rank) for each in view.stragglers] == [("b", COMPUTING, 1)]
    assert view.workers[1].shares == messages.StepShares(0.4, 0.01, 0.0)
    said = beaten(job, {1: 0.1, 2: 0.1}, 12, 40)
    assert said == ["Rank 1 (node b on host host-b) holds nobody up any more."]
    assert job.view(40.0).stragglers == ()
    assert not job.job.ledger.leaving


def test_a_straggler_is_drained_only_where_that_is_wanted_and_a_spare_waits() -> None:
    job = two_and_a_spare(events.DrainPolicy(1.5, 20.0))
    beaten(job, {1: 0.1, 2: 0.4}, 0, 15)
    assert not job.job.ledger.leaving  # not for long enough
    said = beaten(job, {1: 0.1, 2: 0.4}, 15, 25)
    assert any("node b on host host-b" in reason and "a spare waits" in reason for reason in said)
    assert job.job.ledger.leaving == {"b"}


@pytest.mark.parametrize("policy", [None, events.DrainPolicy(9.0, 5.0)])
def test_nobody_is_drained_who_is_not_slow_enough(policy: events.DrainPolicy | None) -> None:
    job = two_and_a_spare(policy)
    beaten(job, {1: 0.1, 2: 0.4}, 0, 30)
    assert not job.job.ledger.leaving


def test_in_a_group_of_a_thousand_that_reports_seldom_a_slow_rank_is_named_after_as_many_reports() -> None:
    size, apart_s = 1000, 5.0
    watch = StragglerWatch({str(rank): Seat(rank, f"host-{rank // 8}") for rank in range(size)})
    named_at = None
    for report in range(1, 9):
        for rank in range(size):
            computed_s, waited_s = (0.2, 0.0) if rank == 7 else (0.1, 0.1)
            seconds = (25 * computed_s, computed_s, 25 * waited_s, waited_s, 0.0, 0.0, 0.0)
            now = apart_s * (report + rank / size)
            watch.hear(str(rank), messages.StepTimes(25, seconds), now)
        if named_at is None and watch.named:
            named_at = report
    assert list(watch.named) == ["7"]
    assert named_at == 6  # five whole intervals, ended by the first report of the next
    assert watch.named["7"].since == apart_s
