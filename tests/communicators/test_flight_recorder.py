"""The ring of last collectives that hang reports are made of."""

from __future__ import annotations

import numpy as np

from muster.communicators.arrays import describe
from muster.communicators.fault_aware import KEPT_COLLECTIVES, FlightRecorder
from muster.communicators.work import FINISHED

X = describe(np.zeros(3, np.float32))


def test_the_ring_keeps_the_newest_and_shows_what_hangs() -> None:
    log = FlightRecorder()
    for _ in range(KEPT_COLLECTIVES + 3):
        log.begin("all_reduce", "world", X).work = FINISHED
    log.begin("broadcast", "tp0", X)
    recent = log.recent()
    assert len(recent) == KEPT_COLLECTIVES
    assert [one.sequence for one in recent[-3:]] == [KEPT_COLLECTIVES + 2, KEPT_COLLECTIVES + 3, 1]
    last = recent[-1]
    told = (last.name, last.group, last.dtype, last.size_bytes, last.done)
    assert told == ("broadcast", "tp0", "float32", 12, False)
    assert recent[-2].done
    assert log.recent(last_only=True) == (last,)


def test_each_group_counts_for_itself_and_a_new_generation_from_one() -> None:
    log = FlightRecorder()
    for group in ("world", "tp0", "world"):
        log.begin("all_reduce", group, X)
    assert [(one.group, one.sequence) for one in log.recent()] == [("world", 1), ("tp0", 1), ("world", 2)]
    log.clear()
    assert log.recent() == ()
    log.begin("barrier", "world", None)
    assert [(one.sequence, one.dtype, one.size_bytes) for one in log.recent()] == [(1, "", 0)]


def test_what_only_the_device_knows_is_over_once_it_was_waited_for() -> None:
    log = FlightRecorder()
    log.begin("all_reduce", "world", X).on_device = True
    assert [one.done for one in log.recent()] == [False]
    log.settle()
    log.begin("all_reduce", "world", X).on_device = True
    assert [one.done for one in log.recent()] == [True, False]


def test_it_tells_for_how_long_the_oldest_open_collective_has_been_under_way() -> None:
    now = [10.0]
    log = FlightRecorder(lambda: now[0])
    assert log.hanging_s() == 0
    entry = log.begin("all_reduce", "world", X)
    now[0] = 13.0
    log.begin("all_reduce", "world", X)
    assert log.hanging_s() == 3
    entry.work = FINISHED
    assert log.hanging_s() == 0


def test_what_lies_on_the_device_hangs_only_while_the_host_waits_for_it() -> None:
    now = [10.0]
    log = FlightRecorder(lambda: now[0])
    log.begin("all_reduce", "world", X).on_device = True
    now[0] = 20.0
    assert log.hanging_s() == 0
    log.await_device()
    now[0] = 21.5
    assert log.hanging_s() == 1.5
    log.settle()
    assert log.hanging_s() == 0
