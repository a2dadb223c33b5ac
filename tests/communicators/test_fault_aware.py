"""What stands between the training loop and a backend's communicator, and its ring of last collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from muster.communicators.arrays import describe
from muster.communicators.base import Communicator
from muster.communicators.fault_aware import KEPT_COLLECTIVES, FaultAwareCommunicator, FlightRecorder
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import FINISHED, FinishedWork
from muster.errors import (
    ArrayError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorError,
    MembershipChanged,
    PeerFinishedError,
    PeerLostError,
)
from muster.wire import messages
from muster.wire.codec import decode_worker_message, encode
from tests.worker.session.scripted import StubCommunicator, stub_communicator

X = describe(np.zeros(3, np.float32))
CHANGED = MembershipChanged("over", generation=1)


class Asked:
    """A verdict that remembers what it was asked."""

    def __init__(self, answer: Exception | None = None) -> None:
        self.answer = answer
        self.questions: list[tuple[int, Exception]] = []

    def __call__(self, rank: int, error: Exception) -> Exception:
        self.questions.append((rank, error))
        return self.answer or error


def ignore(communicator: Communicator) -> None:
    return None


def guard(
    inner: StubCommunicator,
    verdict: Asked,
    adopted: Callable[[Communicator], None] = ignore,
    closed: Callable[[Communicator], None] = ignore,
) -> FaultAwareCommunicator:
    ranks = range(len(inner.membership.peers))
    return FaultAwareCommunicator(
        inner, world_ranks=ranks, verdict=verdict, recorder=FlightRecorder(), adopted=adopted, closed=closed
    )


CALLS: list[tuple[str, Callable[[Communicator], object]]] = [
    ("all_reduce", lambda c: c.all_reduce(X, X, ReduceOp.SUM)),
    ("reduce", lambda c: c.reduce(X, X, ReduceOp.SUM, 0)),
    ("broadcast", lambda c: c.broadcast(X, 0)),
    ("all_gather", lambda c: c.all_gather(X, X)),
    ("reduce_scatter", lambda c: c.reduce_scatter(X, X, ReduceOp.SUM)),
    ("gather", lambda c: c.gather(X, X, 0)),
    ("scatter", lambda c: c.scatter(X, X, 0)),
    ("all_to_all", lambda c: c.all_to_all(X, X)),
    ("send", lambda c: c.send(X, 1)),
    ("recv", lambda c: c.recv(X, 1)),
    ("barrier", lambda c: c.barrier()),
    ("split pair", lambda c: c.split("pair", [0, 1])),
]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_every_call_goes_through_and_is_explained(name: str, call: Callable[[Communicator], object]) -> None:
    inner, verdict = stub_communicator(), Asked(CHANGED)
    guarded = guard(inner, verdict)
    call(guarded)
    assert inner.calls == [name]
    inner.error = PeerLostError("reset", rank=1)
    with pytest.raises(MembershipChanged) as caught:
        call(guarded)
    assert verdict.questions == [(1, inner.error)]
    assert caught.value.__cause__ is inner.error


def test_an_error_without_a_change_of_members_stays_as_it_is() -> None:
    inner, verdict = stub_communicator(), Asked()
    inner.error = CollectiveTimeoutError("rank 1 did not come")
    with pytest.raises(CollectiveTimeoutError) as caught:
        guard(inner, verdict).barrier()
    assert caught.value is inner.error
    assert verdict.questions == [(-1, inner.error)]


@pytest.mark.parametrize(
    "error",
    [
        ArrayError("dtype"),
        CollectiveMismatchError("rank 1 calls another"),
        PeerFinishedError("rank 1 has finished", rank=1),
    ],
)
def test_mistakes_of_the_script_need_no_verdict(error: CommunicatorError) -> None:
    inner, verdict = stub_communicator(), Asked(CHANGED)
    inner.error = error
    with pytest.raises(type(error)):
        guard(inner, verdict).barrier()
    assert verdict.questions == []


def test_what_fails_later_is_explained_at_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FinishedWork):
        def wait(self) -> None:
            raise PeerLostError("reset", rank=0)

    inner, verdict = stub_communicator(), Asked(CHANGED)
    monkeypatch.setattr(inner, "_do", lambda name: Failing())
    work = guard(inner, verdict).all_reduce(X, X, ReduceOp.SUM, async_op=True)
    assert work.done()
    with pytest.raises(MembershipChanged):
        work.wait()


def test_a_subgroups_failure_blames_the_world_rank() -> None:
    inner, verdict, adopted = stub_communicator(2, 3), Asked(), list[Communicator]()
    part = guard(inner, verdict, adopted.append).split("ends", [2, 0])
    assert part is not None and adopted == inner.parts
    inner.parts[0].error = PeerLostError("reset", rank=1)
    with pytest.raises(PeerLostError):
        part.barrier()
    assert verdict.questions == [(0, inner.parts[0].error)]


def test_what_has_been_closed_is_told_also_if_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Communicator] = []
    inner = stub_communicator(0, 2)
    part = guard(inner, Asked(), closed=closed.append).split("both", [0, 1])
    assert part is not None
    part.close()
    assert closed == inner.parts

    def fail() -> None:
        assert closed == inner.parts  # until it is over, an abort must find it
        raise PeerLostError("reset", rank=1)

    monkeypatch.setattr(inner, "close", fail)
    with pytest.raises(PeerLostError):
        guard(inner, Asked(), closed=closed.append).close()
    assert closed == [*inner.parts, inner]


def test_a_rank_outside_a_group_gets_nothing() -> None:
    assert guard(stub_communicator(0, 3), Asked()).split("others", [1, 2]) is None


def test_the_deadline_and_the_rest_are_the_backends() -> None:
    inner = stub_communicator()
    guarded = guard(inner, Asked())
    guarded.timeout_s = 5.0
    assert inner.timeout_s == guarded.timeout_s == 5.0
    assert guarded.calls == []
    error = MembershipChanged("over", generation=1)
    guarded.abort(error)
    assert inner.error is error
    guarded.close()
    assert inner.closed


def test_the_scheduler_understands_whatever_is_noted() -> None:
    """It drops the stream of who sends a name that breaks its rules."""
    log = FlightRecorder()
    guarded = FaultAwareCommunicator(
        stub_communicator(),
        world_ranks=range(2),
        verdict=Asked(),
        recorder=log,
        adopted=ignore,
        closed=ignore,
    )
    for _, call in CALLS:
        call(guarded)
    guarded.note("captured_step")
    log.begin("all_reduce", "a\nname" * 50, X)
    sent = encode(messages.Heartbeat(1, 2, 3, 4.0, recent=log.recent()))
    heard = decode_worker_message(sent)
    assert isinstance(heard, messages.Heartbeat)
    assert [one.name for one in heard.recent[-2:]] == ["captured_step", "all_reduce"]


def test_a_launch_of_several_is_explained_when_it_breaks_at_its_end() -> None:
    @contextlib.contextmanager
    def together() -> Iterator[None]:
        yield
        raise PeerLostError("reset", rank=1)

    inner, verdict = stub_communicator(), Asked(CHANGED)
    inner.group = together  # type: ignore[method-assign]
    with pytest.raises(MembershipChanged), guard(inner, verdict).group():
        pass
    assert verdict.questions[0][0] == 1
    wrong = ArrayError("the shape")
    with pytest.raises(ArrayError) as caught, guard(inner, verdict).group():
        raise wrong
    assert caught.value is wrong


def test_whether_a_rank_waits_for_others_is_known_without_a_device() -> None:
    log = FlightRecorder()
    seen: list[bool] = []

    class Looking(FinishedWork):
        def wait(self) -> None:
            seen.append(log.waits())

    inner = stub_communicator()
    guarded = FaultAwareCommunicator(
        inner, world_ranks=range(2), verdict=Asked(), recorder=log, adopted=ignore, closed=ignore
    )
    inner.barrier = lambda: seen.append(log.waits())  # type: ignore[method-assign]
    guarded.barrier()
    assert seen == [True] and not log.waits()
    inner.all_reduce = lambda *_, **__: Looking()  # type: ignore[method-assign]
    work = guarded.all_reduce(X, X, ReduceOp.SUM, async_op=True)
    assert not log.waits(), "it may compute beside it"
    work.wait()
    assert seen == [True, True] and not log.waits()
    log.await_device()
    assert log.waits()
    log.settle()
    guarded.note("captured_step")
    assert not log.waits(), "the host runs ahead"


def test_a_rank_waits_until_a_failure_is_explained_and_not_after_that() -> None:
    log = FlightRecorder()
    seen: list[bool] = []

    def verdict(rank: int, error: Exception) -> Exception:
        seen.append(log.waits())
        return error

    inner = stub_communicator()
    guarded = FaultAwareCommunicator(
        inner, world_ranks=range(2), verdict=verdict, recorder=log, adopted=ignore, closed=ignore
    )
    for error in (PeerLostError("reset", rank=1), ArrayError("dtype")):
        inner.error = error
        with pytest.raises(type(error)):
            guarded.all_reduce(X, X, ReduceOp.SUM)
        assert not log.waits() and log.hanging_s() == 0.0
    assert seen == [True]


def test_on_a_device_the_time_since_the_last_launch_counts() -> None:
    now = [100.0]
    log = FlightRecorder(lambda: now[0])
    log.begin("all_reduce", "world", X).on_device = True
    now[0] = 130.0
    assert (log.hanging_s(), log.late_s()) == (0.0, 30.0)
    log.begin("all_reduce", "world", X).on_device = True
    assert log.late_s() == 0.0
    log.settle()
    now[0] = 200.0
    assert log.late_s() == 0.0


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
