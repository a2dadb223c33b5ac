"""What the watching thread reports to the machine; its looks are called by hand here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from muster.errors import MembershipChanged
from muster.worker.session import events
from muster.worker.session.pace import Pace
from muster.worker.session.threads import Threads
from muster.worker.session.watcher import TRIES, Watcher
from tests.waiting import wait_for


class Training:
    """What a training thread is in, and the client that learns what its watcher says of it."""

    def __init__(
        self,
        threads: Threads | None = None,
        probe: Callable[[dict[str, str]], dict[str, str]] | None = None,
    ) -> None:
        self.waited_s = 0.0
        self.busy = ""
        self.news_of_members: Exception | None = None
        self.unreached: dict[str, str] | Exception = {}
        self.probed: list[dict[str, str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.posted: list[Any] = []
        self.watcher = Watcher(Pace(), self, self, probe or self.probe, threads or Threads())

    def late_s(self) -> float:
        return self.waited_s

    def waits(self) -> bool:
        return True

    def post(self, event: events.Event) -> None:
        self.posted.append(event)

    def probe(self, targets: dict[str, str]) -> dict[str, str]:
        self.probed.append(targets)
        self.may_answer.wait(30.0)
        if isinstance(self.unreached, Exception):
            raise self.unreached
        return self.unreached


def test_nothing_is_told_and_nobody_probed_while_no_collective_is_late() -> None:
    training = Training()
    for seconds in (0.0, 3.0, 9.9):
        training.waited_s = seconds
        training.watcher.look()
    assert training.posted == training.probed == []


def test_a_late_collective_is_told_and_one_as_long_is_not_late_again() -> None:
    training = Training()
    training.waited_s = 12.0
    training.watcher.look()
    assert training.posted == [events.PeersLate(12.0)]
    training.waited_s = 0.0
    training.watcher.look()
    training.waited_s = 14.0
    training.watcher.look()
    assert training.posted == [events.PeersLate(12.0)]


def test_a_wait_that_a_change_of_members_ends_says_nothing_of_the_steps() -> None:
    training = Training()
    training.waited_s = 12.0
    training.watcher.look()
    training.waited_s, training.news_of_members = 0.0, MembershipChanged("over", generation=1)
    training.watcher.look()
    training.waited_s = 14.0
    training.watcher.look()
    assert training.posted == [events.PeersLate(12.0), events.PeersLate(14.0)]


def test_probes_are_made_by_the_thread_and_answered_with_what_the_training_is_in() -> None:
    training = Training()
    training.unreached = {"b": "timed out"}
    training.waited_s, training.busy = 11.0, "evaluation"
    training.watcher.start()
    training.watcher.ask(events.ProbeWanted(7, (("a", "x:1"), ("b", "y:2"))))
    wait_for(lambda: training.posted)
    assert training.probed == [{"a": "x:1", "b": "y:2"}]
    unreached = (("b", "timed out"),)
    answer = training.posted[0]
    assert 0.0 < answer.seconds < 60.0
    assert answer == events.ProbesDone(
        7, unreached, late=True, waits=True, busy="evaluation", seconds=answer.seconds
    )
    training.watcher.close()


def test_who_stood_still_while_it_probed_says_since_when_it_has_lived() -> None:
    now, reads = 100.0, 0

    class Clocked(Threads):
        def now(self) -> float:
            nonlocal reads
            reads += 1
            return now

    def wait_for_reads(count: int) -> None:
        wanted = reads + count
        wait_for(lambda: reads >= wanted)

    training = Training(Clocked())
    training.may_answer.clear()
    training.watcher.start()
    training.watcher.ask(events.ProbeWanted(7, (("a", "x:1"),)))
    wait_for_reads(2)
    now = 100.5
    wait_for_reads(2)
    now = 109.5
    wait_for_reads(2)
    now = 110.0
    training.may_answer.set()
    wait_for(lambda: training.posted)
    assert training.posted[0].seconds == pytest.approx(0.5)
    training.watcher.close()


class Stopped(Threads):
    """A process that is stopped during the first of its probes."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.seconds, self.reads = 100.0, 0
        self.training = Training(self, self.probe)
        self.training.unreached = {"b": "no answer"}

    def now(self) -> float:
        self.reads += 1
        return self.seconds

    def probe(self, targets: dict[str, str]) -> dict[str, str]:
        if len(self.training.probed) < self.times:
            self._wait_for_reads(2)
            self.seconds += 9.0
            self._wait_for_reads(2)
        return self.training.probe(targets)

    def _wait_for_reads(self, count: int) -> None:
        wanted = self.reads + count
        wait_for(lambda: self.reads >= wanted)


def test_who_stood_still_while_it_probed_tries_again_whom_it_did_not_reach() -> None:
    """What failed did so before; the answer is about the time since then."""
    stopped = Stopped(times=1)
    training = stopped.training
    training.watcher.start()
    training.watcher.ask(events.ProbeWanted(7, (("a", "x:1"), ("b", "y:2"))))
    wait_for(lambda: training.posted)
    assert training.probed == [{"a": "x:1", "b": "y:2"}, {"b": "y:2"}]
    assert training.posted[0].unreached == (("b", "no answer"),)
    training.watcher.close()


def test_who_stands_still_at_each_try_says_nothing_of_others() -> None:
    stopped = Stopped(times=TRIES)
    training = stopped.training
    training.watcher.start()
    training.watcher.ask(events.ProbeWanted(7, (("b", "y:2"),)))
    training.watcher.ask(events.ProbeWanted(8, (("b", "y:2"),)))
    wait_for(lambda: training.posted)
    assert [answer.round for answer in training.posted] == [8]
    assert len(training.probed) == TRIES + 1
    training.watcher.close()


def test_a_fault_in_a_probe_does_not_end_the_thread() -> None:
    training = Training()
    training.unreached = RuntimeError("a fault")
    training.watcher.start()
    training.watcher.ask(events.ProbeWanted(1, ()))
    wait_for(lambda: training.probed)
    training.unreached = {}
    training.watcher.ask(events.ProbeWanted(2, ()))
    wait_for(lambda: training.posted)
    assert training.posted[0].round == 2
    training.watcher.close()
