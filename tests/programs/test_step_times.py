"""Where the time of a torch program's steps goes: what is counted, by whom, and how often."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from muster.programs.step_times import FSDP_MODULES, OTHER_OPTIMIZER_S, ProgramSteps, ProgramWaits
from muster.wire.messages import StepTimes
from tests.waiting import wait_for


class FakeEvent:
    """An event of a GPU that is reached when the test says so."""

    at_ms: ClassVar[float] = 0.0
    reached: ClassVar[bool] = True

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded_ms = -1.0

    def record(self) -> None:
        self.recorded_ms = FakeEvent.at_ms

    def query(self) -> bool:
        return FakeEvent.reached

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.recorded_ms - self.recorded_ms


class Program:
    """A program by a clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sent: list[StepTimes] = []
        self.waits = ProgramWaits(lambda: self.now)
        self.steps = ProgramSteps(self.waits, self.sent.append, lambda: self.now)
        for name, value in {"MUSTER_GENERATION": "1", "WORLD_SIZE": "4", "RANK": "0"}.items():
            monkeypatch.setenv(name, value)

    def step(self, optimizer: object, computed_s: float, waited_s: float = 0.0, data_s: float = 0.0) -> None:
        if data_s:
            self.now += data_s
            self.steps.note_data(data_s)
        self.now += computed_s
        with self.waits.waiting():
            self.now += waited_s
        self.steps.optimizer_stepped(optimizer)


class Optimizer:
    pass


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def test_steps_are_told_about_once_a_second_and_the_first_not_at_all(program: Program) -> None:
    sgd = Optimizer()
    program.step(sgd, 50.0)  # it began long before
    program.step(sgd, 0.25, 0.125, 0.5)
    assert program.sent == [StepTimes(1, (0.25, 0.25, 0.125, 0.125, 0.5, 0.5, 0.0), 0)]
    program.step(sgd, 0.25)
    program.step(sgd, 0.5)
    assert len(program.sent) == 1
    program.step(sgd, 0.25)
    assert program.sent[1:] == [StepTimes(3, (1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0), 0)]


def test_what_lies_between_two_generations_is_no_step(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd = Optimizer()
    program.step(sgd, 1.0)
    program.step(sgd, 1.0)
    monkeypatch.setenv("MUSTER_GENERATION", "2")
    program.step(sgd, 70.0)
    program.step(sgd, 2.0)
    assert [each.seconds[0] for each in program.sent] == [1.0, 2.0]


def test_what_a_program_says_it_waited_for_data_counts_where_its_loader_is_not_seen(program: Program) -> None:
    sgd = Optimizer()
    program.step(sgd, 1.0)
    program.now += 0.5
    program.steps.note_data(0.5, is_reported=True)
    program.steps.optimizer_stepped(sgd)
    program.step(sgd, 1.0, data_s=0.25)
    program.now += 1.0
    program.steps.note_data(0.5, is_reported=True)
    program.steps.optimizer_stepped(sgd)
    assert [each.seconds[4] for each in program.sent] == [0.5, 0.25, 0.0]


def test_of_several_optimizers_the_first_says_when_a_step_ends_as_long_as_it_makes_some(
    program: Program,
) -> None:
    first, second = Optimizer(), Optimizer()
    program.step(first, 1.0)
    for _ in range(3):
        program.step(second, 1.0)
        program.step(first, 1.0)
    assert [each.steps for each in program.sent] == [1, 1, 1]
    assert program.sent[0].seconds[0] == 2.0
    program.now += OTHER_OPTIMIZER_S
    program.step(second, 1.0)
    program.step(second, 1.0)
    assert program.sent[-1].seconds[0] == 1.0
    del first, second
    program.step(Optimizer(), 3.0)  # of one that is gone nothing is expected
    assert program.sent[-1].seconds[0] == 3.0


def test_waits_of_other_threads_and_within_another_do_not_count(program: Program) -> None:
    def in_thread() -> None:
        with program.waits.waiting():
            program.now += 1.0

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert program.waits.waited_s == 0.0
    with program.waits.waiting(), program.waits.waiting():
        program.now += 1.0
    assert program.waits.waited_s == 1.0


def test_waits_of_a_thread_that_goes_backward_count(program: Program) -> None:
    """As autograd's do for a GPU."""
    x = torch.ones(1, requires_grad=True)

    def waits(_gradient: object) -> None:
        with program.waits.waiting():
            program.now += 1.0

    x.register_hook(waits)
    thread = threading.Thread(target=x.sum().backward)
    thread.start()
    thread.join()
    assert program.waits.waited_s == 1.0


def test_a_wait_that_broke_off_in_another_thread_hides_no_later_one(program: Program) -> None:
    program.waits.begin()
    program.waits.give_up()
    with program.waits.waiting():
        program.now += 1.0
    assert program.waits.waited_s == 1.0


def test_on_a_gpu_streams_wait_and_what_is_not_over_counts_the_next_time(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(FakeEvent, "at_ms", 0.0)

    def wait(milliseconds: float) -> None:
        with program.waits.waiting():
            FakeEvent.at_ms += milliseconds

    assert program.waits.take_device_wait() is None
    wait(250.0)
    wait(125.0)
    monkeypatch.setattr(FakeEvent, "reached", False)
    assert program.waits.take_device_wait() == 0.0
    monkeypatch.setattr(FakeEvent, "reached", True)
    assert program.waits.take_device_wait() == 0.375
    assert program.waits.take_device_wait() == 0.0


def sum_of(rank: int, folder: Path) -> float:
    """What a program with a step watch of its own has waited: rank 0 for the other, which comes later."""
    import time

    import torch.distributed as dist

    from muster.programs import step_times

    dist.barrier()
    before = step_times.WAITS.waited_s
    if rank == 0:
        (folder / "comes").touch()
    else:
        wait_for((folder / "comes").exists)
        time.sleep(2.0)
    dist.all_reduce(torch.ones(3))
    return step_times.WAITS.waited_s - before


def test_muster_s_own_groups_count_what_their_callers_wait(tmp_path: Path) -> None:
    """What the call itself takes, both wait; so they are compared."""
    from tests.programs import ranks

    first, second = ranks.run(2, None, tmp_path, sum_of, tmp_path)
    assert first > second + 0.5


class PlayedStream:
    """A stream of a GPU that is not there; what it waits for takes time."""

    current: ClassVar[PlayedStream]

    def wait_event(self, event: PlayedEvent) -> None:
        torch.cuda.Stream.wait_event(self, event)


class PlayedEvent:
    def __init__(self, milliseconds: float) -> None:
        self._milliseconds = milliseconds

    def wait(self, _stream: PlayedStream) -> None:
        FakeEvent.at_ms += self._milliseconds


COMPUTES, GATHERS = PlayedStream(), PlayedStream()


class ShardedGroup:
    """As FSDP2's: it gathers on a stream of its own, and makes the one that computes wait for that."""

    device = torch.device("cuda")

    def wait_for_unshard(self) -> None:
        import torch.distributed as dist

        PlayedStream.current = GATHERS
        GATHERS.wait_event(PlayedEvent(500.0))  # for what is computed
        dist.all_reduce(torch.ones(1))
        PlayedStream.current = COMPUTES
        COMPUTES.wait_event(PlayedEvent(125.0))


def played_gpu(_rank: int) -> dict[str, Any]:
    """What counts of the waits of a GPU that is played, of a program with a step watch of its own."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    from muster.programs import step_times

    def all_reduce(tensor: Any, async_op: bool = False) -> None:
        """As with NCCL: on the current stream."""
        FakeEvent.at_ms += 250.0

    for name in FSDP_MODULES:  # by torch's version there is one
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    sharding: Any = next(sys.modules[name] for name in FSDP_MODULES if name in sys.modules)
    played: Any = {"Event": FakeEvent, "current_stream": lambda: PlayedStream.current}
    played |= {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: False}
    for name, value in played.items():
        setattr(torch.cuda, name, value)
    PlayedStream.current = COMPUTES
    dist.all_reduce = c10d.all_reduce = all_reduce
    sharding.FSDPParamGroup = ShardedGroup
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.environ |= {"MUSTER_AGENT_FD": str(theirs.fileno()), "MUSTER_AGENT_PID": str(os.getpid())}
        step_times.install()
        weight = torch.nn.Parameter(torch.ones(1))
        torch.optim.SGD([weight], 0.1).step()  # what the program uses is there now
        waits, found = step_times.WAITS, {}
        dist.all_reduce(weight)
        found["on the stream that computes"] = waits.take_device_wait()
        dist.all_reduce(weight, async_op=True)
        COMPUTES.wait_event(PlayedEvent(1000.0))
        found["for something else"] = waits.take_device_wait()
        thread = threading.Thread(target=ShardedGroup().wait_for_unshard)
        thread.start()
        thread.join()
        found["for FSDP2"] = waits.take_device_wait()
    return found


def test_of_a_gpu_counts_what_its_stream_that_computes_waits_for_collectives(tmp_path: Any) -> None:
    from tests.programs import ranks

    [found] = ranks.run(1, None, tmp_path, played_gpu)
    assert {name: round(seconds, 3) for name, seconds in found.items()} == {
        "on the stream that computes": 0.25,
        "for something else": 0.0,
        "for FSDP2": 0.125,
    }
