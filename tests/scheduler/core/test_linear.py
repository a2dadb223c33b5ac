"""What an event costs does not grow with the number of members: work is counted, not timed.

Counted are the bytecodes that the core executes, so each member that a loop visits counts. Ten times as many
workers may cost twelve times as much for all events together: sorting, and messages to everybody, once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from muster.scheduler.core import events
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from muster.wire.rank_table import RankTable, RankTableEntry

FEW, MANY = 50, 500
AT_MOST = 12.0

SETTINGS = events.CoreSettings(0, 1, 0, 300.0, 30.0, 1.0, stall_timeout_s=600.0)


def candidate(number: int, size: int, incarnation: int = 1) -> messages.Candidate:
    host = number // 8
    return messages.Candidate(
        node_id=f"node{host}-{number % 8}",
        incarnation=incarnation,
        host=messages.Host(f"id-{host}", f"node{host}", f"10.0.{host // 256}.{host % 256}"),
        device=messages.Device("cuda", number % 8),
        worker_num=size,
        worker_min=0,
        backend="tcp",
        local_index=number % 8,
    )


class Crowd:
    """A job of so many workers; the stream of each has its number."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.size = size
        self.machine = Machine("job", replace(SETTINGS, worker_num=size, **settings))
        self.now = 1.0
        self.records: list[Any] = []

    def feed(self, event: events.Event, *, more: bool = False) -> Decision:
        decision = self.machine.step(event, self.now, more=more)
        self.records += decision.records
        return decision

    @property
    def everybody(self) -> range:
        return range(1, self.size + 1)

    @property
    def phase(self) -> str:
        return self.machine.job.phase.value

    @property
    def generation(self) -> int:
        return self.machine.job.ledger.generation

    def join(self, numbers: Iterable[int], incarnation: int = 1, stream: int = 0, **fields: Any) -> None:
        for number in numbers:
            self.feed(events.Joined(stream + number, candidate(number - 1, self.size, incarnation), **fields))

    def built(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.feed(events.BuiltReported(number, self.generation))

    def heard(self, numbers: Iterable[int], step: int = 0) -> None:
        for number in numbers:
            self.feed(events.Heard(number, self.generation, step, step, 1.0, (), self.generation))

    def lose(self, numbers: Iterable[int]) -> None:
        """All at once, as of hosts whose switch has died."""
        gone = list(numbers)
        for number in gone:
            self.feed(events.SessionLost(number, "reset"), more=number != gone[-1])

    def stand(self) -> Crowd:
        """All are in and have built the group."""
        self.join(self.everybody)
        self.built(self.everybody)
        assert self.phase == "running"
        return self

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.now += 0.001
            self.feed(events.Tick())


def work(action: Callable[[], object]) -> int:
    """How many bytecodes of Muster's own it executes."""
    executed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        if event == "opcode":
            executed += 1
        elif event == "call":
            if "/scheduler/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return executed


Scene = Callable[[int], Callable[[], object]]
"""Brings a crowd of so many about, and says what is counted."""


def joins(size: int) -> Callable[[], object]:
    crowd = Crowd(size)
    return lambda: crowd.join(crowd.everybody)


def joins_by_a_rank_table(size: int) -> Callable[[], object]:
    hosts = [candidate(number, size) for number in range(size)]
    table = RankTable(
        tuple(RankTableEntry(i, each.host.address, each.device.index) for i, each in enumerate(hosts))
    )
    crowd = Crowd(size, rank_table=table)
    return lambda: crowd.join(crowd.everybody)


def joins_while_more_are_waited_for(size: int) -> Callable[[], object]:
    """There are enough for a group, and the workers want to wait for more for a while."""
    crowd = Crowd(size, worker_min=size // 10)
    return lambda: crowd.join(range(1, size), last_call_s=60.0)


def joins_after_all_are_lost(size: int) -> Callable[[], object]:
    """There are enough for a group, and those that held the state are waited for."""
    crowd = Crowd(size, worker_min=size // 10).stand()
    crowd.lose(crowd.everybody)
    assert crowd.phase == "suspended"
    return lambda: crowd.join(range(1, size), incarnation=2, stream=size)


def joins_after_a_suspension(size: int) -> Callable[[], object]:
    crowd = Crowd(size, worker_min=size).stand()
    crowd.lose(range(1, size + 1, 2))
    assert crowd.phase == "suspended"
    return lambda: crowd.join(range(1, size + 1, 2), incarnation=2, stream=size)


def joins_of_newcomers(size: int) -> Callable[[], object]:
    """To a group that stands and has room: the first begins a planned change, the others wait for it."""
    crowd = Crowd(size).stand()
    crowd.lose(range(1, size + 1, 2))
    crowd.built(range(2, size + 1, 2))
    assert crowd.phase == "running"
    return lambda: crowd.join(range(1, size + 1, 2), incarnation=2, stream=size)


def joins_after_a_restart(size: int) -> Callable[[], object]:
    """The scheduler is started again while workers still gather; those that were in come back."""
    crowd = Crowd(size)
    crowd.join(range(1, size))
    crowd.machine = Machine.recover("job", crowd.machine.job.settings, crowd.records, crowd.now)
    return lambda: crowd.join(range(1, size))


def joins_of_new_processes_after_a_restart(size: int) -> Callable[[], object]:
    """Scheduler and workers are started again: the new wait until the old ones' time is over."""
    crowd = Crowd(size).stand()
    crowd.machine = Machine.recover("job", crowd.machine.job.settings, crowd.records, crowd.now)
    return lambda: crowd.join(crowd.everybody, incarnation=2)


def built(size: int) -> Callable[[], object]:
    crowd = Crowd(size)
    crowd.join(crowd.everybody)
    return lambda: crowd.built(crowd.everybody)


def built_by_some_that_leave(size: int) -> Callable[[], object]:
    crowd = Crowd(size).stand()
    crowd.feed(events.SessionLost(1, "reset"))
    crowd.feed(events.LeaveRequested(2, crowd.generation, "drain"))
    crowd.now += 0.001
    return lambda: crowd.built(range(2, size + 1))


def built_late(size: int, *, leaves: bool = False) -> Callable[[], object]:
    """That the group does not get on has been said."""
    crowd = Crowd(size, stall_timeout_s=10.0).stand()
    crowd.feed(events.SessionLost(1, "reset"))
    crowd.heard(range(2, size + 1))
    if leaves:
        crowd.feed(events.LeaveRequested(2, crowd.generation, "drain"))
    crowd.now += 11.0
    crowd.heard(range(2, size + 1))
    crowd.feed(events.Tick())
    assert crowd.machine.job.deadlines.stalled
    return lambda: crowd.built(range(2, size + 1))


def built_late_by_some_that_leave(size: int) -> Callable[[], object]:
    return built_late(size, leaves=True)


def heartbeats(size: int) -> Callable[[], object]:
    crowd = Crowd(size).stand()
    return lambda: crowd.heard([*crowd.everybody, *crowd.everybody], 1)


def heartbeats_of_newcomers(size: int) -> Callable[[], object]:
    """Each begins its first step, while the one that has given them the state wants to leave."""
    crowd = Crowd(size).stand()
    crowd.heard(crowd.everybody, 1)
    crowd.lose(range(2, size + 1))
    crowd.join(range(2, size + 1), incarnation=2, stream=size)
    crowd.built(range(1, 2))
    crowd.feed(events.QuiescedReported(1, crowd.generation, 1))
    crowd.built([1, *range(size + 2, 2 * size + 1)])
    assert crowd.phase == "running" and crowd.machine.job.needed == size
    return lambda: crowd.heard(range(size + 2, 2 * size + 1), 3)


def heartbeats_while_others_join(size: int) -> Callable[[], object]:
    crowd = Crowd(size)
    crowd.join(range(1, size))
    return lambda: crowd.heard(range(1, size))


def leaves_at_the_end(size: int) -> Callable[[], object]:
    crowd = Crowd(size).stand()
    crowd.heard(crowd.everybody, 1)
    return lambda: [crowd.feed(events.LeftCleanly(n, 1, True, "")) for n in crowd.everybody]


def leaves_of_all_that_fail(size: int) -> Callable[[], object]:
    crowd = Crowd(size).stand()
    last = crowd.size
    return lambda: [
        crowd.feed(events.LeftCleanly(n, 1, False, "ValueError"), more=n != last) for n in crowd.everybody
    ]


def requested_leaves(size: int) -> Callable[[], object]:
    """Everybody is asked to go, as by a batch system."""
    crowd = Crowd(size).stand()
    crowd.heard(crowd.everybody, 1)

    def leave() -> None:
        for number in crowd.everybody:
            crowd.feed(events.LeaveRequested(number, 1, "SIGTERM"))
        for number in crowd.everybody:
            crowd.feed(events.QuiescedReported(number, 1, 1))

    return leave


def losses(size: int) -> Callable[[], object]:
    crowd = Crowd(size).stand()
    return lambda: crowd.lose(range(1, size + 1, 2))


def losses_while_others_join(size: int) -> Callable[[], object]:
    crowd = Crowd(size)
    crowd.join(range(1, size))
    return lambda: [crowd.feed(events.SessionLost(number, "reset")) for number in range(1, size)]


def answers_to_probes(size: int) -> Callable[[], object]:
    """Of two hosts: who is asked grows with the hosts, too."""
    crowd = Crowd(size)
    for number in crowd.everybody:
        one = candidate(number - 1, size)
        two = one.replaced(host=messages.Host(f"id-{number % 2}", f"node{number % 2}", ""))
        crowd.feed(events.Joined(number, two, probe_address=f"10.0.0.1:{number}"))
    crowd.built(crowd.everybody)
    crowd.feed(events.PeerLate(1, 1, 10.0))
    asked = crowd.machine.job.probing.number
    answers = [events.ProbeAnswered(number, asked, seconds=0.1) for number in crowd.everybody]
    assert crowd.machine.job.probing.current is not None
    return lambda: [crowd.feed(answer) for answer in answers]


def answers_of_many_hosts(size: int, broken: str = "") -> Callable[[], object]:
    """What is asked grows with the hosts for each worker, what is concluded does not."""
    crowd = Crowd(size)
    crowd.join(crowd.everybody, probe_address="10.0.0.1:1")
    crowd.built(crowd.everybody)
    crowd.feed(events.PeerLate(1, 1, 10.0))
    current = crowd.machine.job.probing.current
    assert current is not None and len(current.asked) == size
    answers = []
    for number, asked in current.asked.items():
        targets = [current.asked[target].candidate for target in asked.targets]
        unreached = tuple((one.node_id, "timeout") for one in targets if one.host.name == broken)
        answers.append(events.ProbeAnswered(number, current.number, unreached, seconds=0.1))
    return lambda: [crowd.feed(answer) for answer in answers]


def answers_that_accuse_a_host(size: int) -> Callable[[], object]:
    return answers_of_many_hosts(size, "node1")


SCENES: list[Scene] = [
    joins,
    joins_by_a_rank_table,
    joins_while_more_are_waited_for,
    joins_after_all_are_lost,
    joins_after_a_suspension,
    joins_of_newcomers,
    joins_after_a_restart,
    joins_of_new_processes_after_a_restart,
    built,
    built_by_some_that_leave,
    built_late,
    built_late_by_some_that_leave,
    heartbeats,
    heartbeats_of_newcomers,
    heartbeats_while_others_join,
    leaves_at_the_end,
    leaves_of_all_that_fail,
    requested_leaves,
    losses,
    losses_while_others_join,
    answers_to_probes,
    answers_of_many_hosts,
    answers_that_accuse_a_host,
]


def compare(scene: Scene, few: int, many: int) -> None:
    one, other = work(scene(few)), work(scene(many))
    assert one > 10 * few, "nothing was counted"
    assert other <= AT_MOST * one, f"{other / one:.1f} times the work for {many // few} times the members"


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_events_cost_what_they_bring_about_however_many_members_there_are(scene: Scene) -> None:
    compare(scene, FEW, MANY)


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_nor_with_5000_of_them(scene: Scene) -> None:
    compare(scene, 10 * FEW, 10 * MANY)


def forming(size: int) -> Crowd:
    crowd = Crowd(size)
    crowd.join(range(1, size))
    return crowd


def building(size: int) -> Crowd:
    crowd = Crowd(size)
    crowd.join(crowd.everybody)
    return crowd


def running(size: int) -> Crowd:
    return Crowd(size).stand()


def below_full_size(size: int) -> Crowd:
    crowd = Crowd(size).stand()
    crowd.lose([1])
    crowd.built(range(2, size + 1))
    return crowd


def quiescing(size: int) -> Crowd:
    crowd = Crowd(size).stand()
    crowd.feed(events.LeaveRequested(1, 1, "drain"))
    return crowd


def suspended(size: int) -> Crowd:
    crowd = Crowd(size, worker_min=size).stand()
    crowd.lose([1])
    return crowd


@pytest.mark.parametrize("phase", [forming, building, running, below_full_size, quiescing, suspended])
def test_a_tick_costs_the_same_however_many_members_there_are(phase: Callable[[int], Crowd]) -> None:
    crowds = [phase(size) for size in (FEW, MANY)]
    assert len({crowd.phase for crowd in crowds}) == 1
    few, many = (work(functools.partial(crowd.tick, 100)) for crowd in crowds)
    assert many <= 1.2 * few
