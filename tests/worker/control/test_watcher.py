"""What the watching thread tells the machine; its looks are called by hand here."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from muster.worker.control import events as e
from muster.worker.control.pace import Pace
from muster.worker.control.watcher import Watcher
from tests.waiting import wait_for


class Training:
    """What a training thread is in, and what its watcher says of it."""

    def __init__(self) -> None:
        self.hanging_s = 0.0
        self.waits = True
        self.busy = ""
        self.unreached: dict[str, str] | Exception = {}
        self.probed: list[dict[str, str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.posted: list[Any] = []
        self.watcher = Watcher(
            Pace(),
            hanging_s=lambda: self.hanging_s,
            waits=lambda: self.waits,
            busy=lambda: self.busy,
            probe_all=self.probe,
            post=self.posted.append,
        )

    def probe(self, targets: dict[str, str]) -> dict[str, str]:
        self.probed.append(targets)
        self.may_answer.wait(30.0)
        if isinstance(self.unreached, Exception):
            raise self.unreached
        return self.unreached


def test_nothing_is_told_and_nobody_probed_while_no_collective_is_late() -> None:
    training = Training()
    for seconds in (0.0, 3.0, 9.9):
        training.hanging_s = seconds
        training.watcher.look()
    assert training.posted == training.probed == []


def test_a_late_collective_is_told_and_one_as_long_is_not_late_again() -> None:
    training = Training()
    training.hanging_s = 12.0
    training.watcher.look()
    assert training.posted == [e.PeersLate(12.0)]
    training.hanging_s = 0.0
    training.watcher.look()
    training.hanging_s = 14.0
    training.watcher.look()
    assert training.posted == [e.PeersLate(12.0)]


def test_probes_are_made_by_the_thread_and_answered_with_what_the_training_is_in() -> None:
    training = Training()
    training.unreached = {"b": "timed out"}
    training.hanging_s, training.busy = 11.0, "evaluation"
    training.watcher.start()
    training.watcher.ask(e.ProbeWanted(7, (("a", "x:1"), ("b", "y:2"))))
    wait_for(lambda: training.posted)
    assert training.probed == [{"a": "x:1", "b": "y:2"}]
    unreached = (("b", "timed out"),)
    answer = training.posted[0]
    assert 0.0 < answer.seconds < 60.0
    assert answer == e.ProbesDone(
        7, unreached, late=True, waits=True, busy="evaluation", seconds=answer.seconds
    )
    training.watcher.close()


def test_who_stood_still_while_it_probed_says_since_when_it_has_lived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reads = 100.0, 0

    def monotonic() -> float:
        nonlocal reads
        reads += 1
        return now

    def wait_for_reads(count: int) -> None:
        wanted = reads + count
        wait_for(lambda: reads >= wanted)

    monkeypatch.setattr("muster.worker.control.watcher.time", SimpleNamespace(monotonic=monotonic))
    training = Training()
    training.may_answer.clear()
    training.watcher.start()
    training.watcher.ask(e.ProbeWanted(7, (("a", "x:1"),)))
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


def test_a_fault_in_a_probe_does_not_end_the_thread() -> None:
    training = Training()
    training.unreached = RuntimeError("a fault")
    training.watcher.start()
    training.watcher.ask(e.ProbeWanted(1, ()))
    wait_for(lambda: training.probed)
    training.unreached = {}
    training.watcher.ask(e.ProbeWanted(2, ()))
    wait_for(lambda: training.posted)
    assert training.posted[0].round == 2
    training.watcher.close()
