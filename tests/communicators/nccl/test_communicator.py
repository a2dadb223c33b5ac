"""The NCCL communicator without a GPU: arrays, streams, aborts and closing, with an NCCL that records."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from muster.communicators.arrays import SOME_GPU, describe
from muster.communicators.nccl import bootstrap as nccl_handles
from muster.communicators.nccl import communicator as nccl_communicator
from muster.communicators.nccl.communicator import NcclBackend, NcclCommunicator
from muster.communicators.nccl.streams import library_of
from muster.communicators.nccl.warmup import WarmUp
from muster.communicators.reduce_ops import PreMultipliedSum, ReduceOp
from muster.errors import (
    ArrayError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    MembershipChanged,
)
from tests.communicators.nccl.fake_nccl import ENDED, EndedConnection, FakeNccl, RecordingNccl, membership
from tests.gpu.stand_in import FakeEvent, OnGpu, fake_cupy
from tests.waiting import threads_end, wait_for


class Interface:
    def __init__(self, **facts: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 3),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
        } | facts


def facts_of(array: Any) -> tuple[int, int, str, int]:
    found = describe(array)
    return found.address, found.size, found.dtype, found.device


def test_an_interface_is_read() -> None:
    assert facts_of(Interface()) == (4096, 12, "float32", SOME_GPU)
    assert facts_of(Interface(strides=(12, 4))) == (4096, 12, "float32", SOME_GPU)
    assert facts_of(Interface(shape=(1, 3), strides=(99, 4)))[1] == 3
    assert facts_of(Interface(shape=()))[1] == 1


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"strides": (24, 8)}, "not C-contiguous"),
        ({"strides": (4, 16)}, "not C-contiguous"),
        ({"typestr": "<i2", "strides": (6, 4)}, "not C-contiguous"),
        ({"typestr": "<c8"}, "no dtype <c8"),
        ({"data": (4096, True)}, "read-only"),
    ],
)
def test_what_nccl_cannot_take_is_refused(comm: NcclCommunicator, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ArrayError, match=words):
        comm.all_reduce(Interface(**facts), Interface(), ReduceOp.SUM)
    assert calls_of(comm) == []


@pytest.mark.parametrize(
    ("typestr", "number"),
    [("|b1", 1), ("<i2", 6), ("<c8", 4), ("<M8[ns]", 4), ("<c16", None), (">f4", 2), ("<f4", 7)],
)
def test_what_is_only_moved_may_have_a_dtype_that_nccl_does_not_know(
    comm: NcclCommunicator, typestr: str, number: int | None
) -> None:
    array = Interface(typestr=typestr)
    if number is None:
        with pytest.raises(ArrayError, match="no dtype"):
            comm.broadcast(array, 0)
    else:
        comm.broadcast(array, 0)
        assert calls_of(comm)[0][:5] == ("broadcast", 4096, 4096, 12, number)


@pytest.fixture
def torch() -> Any:
    """Loaded before it is hidden: it cannot be loaded twice."""
    return pytest.importorskip("torch")


def test_a_tensor_that_is_only_moved_may_have_any_dtype(
    torch: Any, comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    library = SimpleNamespace(current=lambda: 77)
    monkeypatch.setattr(nccl_communicator, "library_of", lambda name, device: library)
    for dtype, number in ((torch.bool, 1), (torch.complex64, 4), (torch.int16, 6), (torch.bfloat16, 9)):
        comm.broadcast(OnGpu(dtype, torch.strided), 0)
        assert calls_of(comm)[-1] == ("broadcast", 4096, 4096, 3, number, 0, "comm", 77)


def test_a_tensor_whose_conjugate_is_yet_to_be_computed_is_not_moved() -> None:
    """Its memory holds the numbers before."""
    torch = pytest.importorskip("torch")

    class Tensor(torch.Tensor):  # type: ignore[misc,name-defined]
        def get_device(self) -> int:
            return 0

    lazy = torch.ones(3, dtype=torch.complex64).as_subclass(Tensor)
    assert facts_of(lazy)[1:3] == (3, "complex64")
    with pytest.raises(ArrayError, match=r"conjugate.*resolve_conj"):
        describe(lazy.conj())


def test_an_array_on_the_cpu_is_refused_with_the_backend_to_use(comm: NcclCommunicator) -> None:
    words = r'numpy\.ndarray on the CPU, .*cupy\.asarray.*"tcp"'
    with pytest.raises(ArrayError, match=words):
        comm.broadcast(np.zeros(3), 0)
    assert calls_of(comm) == []


def test_a_tensor_on_the_cpu_is_refused_with_what_the_other_backends_take(
    torch: Any, comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    words = r'torch\.Tensor on the CPU, .*tensor\.cuda\(\).*"tcp", which takes NumPy arrays and torch tensors'
    with pytest.raises(ArrayError, match=words):
        comm.broadcast(torch.ones(3, requires_grad=True), 0)


def test_what_ended_an_encrypted_connection_is_told_where_a_communicator_breaks() -> None:
    class Broken(RecordingNccl):
        state = 6

        def comm_get_async_error(self, comm: Any) -> int:
            return self.state

        def get_error_string(self, state: int) -> str:
            return "remote process exited or there was a network error"

        def group_end(self) -> None:
            raise self.NCCLError("system error")

    group = membership(["10.0.0.1:1", "10.0.0.2:1"])
    made = NcclCommunicator(Broken(), "comm", "root", group, device=0, timeout_s=5, plugin=EndedConnection())
    with pytest.raises(CommunicatorError, match=f"network error; the plug-in.*{ENDED}"):
        made.check()
    made.nccl.state = 0
    with pytest.raises(CommunicatorError, match=f"system error; the plug-in.*{ENDED}"), made.group():
        pass


# ---------------------------------------------------------------- the communicator, with a recording NCCL


class FakeArray:
    def __init__(self, size: int, address: int, device: int = 0, dense: bool = True) -> None:
        self.size, self.shape = size, (size,)
        self.dtype = SimpleNamespace(char="f")
        self.flags = SimpleNamespace(c_contiguous=dense)
        self.data = SimpleNamespace(ptr=address, device_id=device)


FakeArray.__module__ = "cupy._core.core"


@pytest.fixture
def current() -> SimpleNamespace:
    return SimpleNamespace(ptr=77, done=True, wait_event=lambda event: None)


@pytest.fixture
def comm(current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> NcclCommunicator:
    """Rank 0 of two; the current stream has the address 77, the communicator's own 88."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(current))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    two = membership(["", ""])
    return NcclCommunicator(RecordingNccl(), "comm", "root", two, device=0, timeout_s=5)


def calls_of(comm: NcclCommunicator) -> list[tuple[Any, ...]]:
    """Without the polling."""
    return [call for call in comm.nccl.calls if call[0] != "comm_get_async_error"]


def test_collectives_go_to_the_callers_stream_and_async_ones_to_our_own(comm: NcclCommunicator) -> None:
    small, large = FakeArray(8, 4096), FakeArray(16, 8192)
    comm.all_reduce(small, small, ReduceOp.SUM).wait()
    comm.all_reduce(small, small, ReduceOp.MEAN, async_op=True).wait()
    comm.all_gather(small, large)
    comm.reduce_scatter(large, small, ReduceOp.MAX)
    comm.scatter(large, small, 0)
    assert calls_of(comm) == [
        ("all_reduce", 4096, 4096, 8, 7, 0, "comm", 77),
        ("all_reduce", 4096, 4096, 8, 7, 4, "comm", 88),
        ("all_gather", 4096, 8192, 8, 7, "comm", 77),
        ("reduce_scatter", 8192, 4096, 8, 7, 2, "comm", 77),
        ("group_start",),
        ("recv", 4096, 8, 7, 0, "comm", 77),
        ("send", 8192, 8, 7, 0, "comm", 77),
        ("send", 8192 + 32, 8, 7, 1, "comm", 77),
        ("group_end",),
    ]


def test_nothing_is_issued_for_arrays_that_do_not_fit(comm: NcclCommunicator) -> None:
    good = FakeArray(8, 4096)
    for bad, words in (
        (FakeArray(9, 1), "do not fit"),
        (FakeArray(8, 1, dense=False), "not C-contiguous"),
        (FakeArray(8, 1, device=1), "on GPU 1, the communicator of rank 0 on GPU 0"),
    ):
        with pytest.raises(ArrayError, match=words):
            comm.all_reduce(good, bad, ReduceOp.SUM)
    with pytest.raises(ArrayError, match="divided"):
        comm.all_to_all(FakeArray(7, 1), FakeArray(7, 2))
    with pytest.raises(ArrayError, match="itself"):
        comm.send(good, 0)
    whole = FakeArray(8, 4096)
    whole.dtype = SimpleNamespace(char="i")
    with pytest.raises(ArrayError, match="mean of int32"):
        comm.all_reduce(whole, whole, ReduceOp.MEAN, async_op=True)
    assert calls_of(comm) == []


@pytest.mark.parametrize(
    ("call", "at", "legal"),
    [
        ("all_reduce", 0, True),
        ("all_reduce", 4, False),
        ("all_reduce", -28, False),
        ("all_reduce", 32, True),  # right behind
        ("reduce", 12, False),
        ("all_gather", 0, True),  # rank 0 of two: its part is the first
        ("all_gather", -32, False),
        ("gather", -4, False),
        ("reduce_scatter", 0, True),
        ("reduce_scatter", 32, False),
        ("scatter", 32, False),
        ("all_to_all", 0, False),
        ("all_to_all", 32, True),
    ],
)
def test_arrays_share_memory_in_place_or_not_at_all(
    comm: NcclCommunicator, call: str, at: int, legal: bool
) -> None:
    """NCCL would send what it has overwritten already."""
    send, recv = FakeArray(8, 4096), FakeArray(8, 4096 + at)
    if call in ("all_gather", "gather"):
        recv = FakeArray(16, 4096 + at)
    elif call in ("reduce_scatter", "scatter"):
        send = FakeArray(16, 4096)
    others = {"all_reduce": (ReduceOp.SUM,), "reduce": (ReduceOp.SUM, 0), "reduce_scatter": (ReduceOp.SUM,)}
    more = others.get(call, (0,) if call in ("gather", "scatter") else ())
    with contextlib.nullcontext() if legal else pytest.raises(ArrayError, match="overlap in part"):
        getattr(comm, call)(send, recv, *more)
    assert bool(calls_of(comm)) is legal


@pytest.mark.parametrize(("stream", "waits"), [(None, []), (77, []), (55, [55])])
def test_an_exported_array_is_taken_after_what_its_stream_does(
    comm: NcclCommunicator, current: SimpleNamespace, stream: int | None, waits: list[int]
) -> None:
    seen: list[int] = []
    current.wait_event = lambda event: seen.append(event.stream.ptr)
    comm.all_reduce(Interface(stream=stream), Interface(), ReduceOp.SUM)
    assert seen == waits


@pytest.mark.parametrize(
    ("current", "stream", "waits"),
    [
        *[(0, 0, []), (0, 1, []), (77, 77, []), (0, 55, [55]), (77, 1, ["default"])],
        (77, 2, ["everything"]),  # torch cannot name a thread's default stream
    ],
)
def test_torch_takes_an_exported_array_after_what_its_stream_does(
    monkeypatch: pytest.MonkeyPatch, current: int, stream: int, waits: list[Any]
) -> None:
    seen: list[Any] = []
    cuda = SimpleNamespace(
        current_stream=lambda _: SimpleNamespace(wait_stream=seen.append),
        default_stream=lambda _: "default",
        ExternalStream=lambda address, _: address,
        synchronize=lambda _: seen.append("everything"),
    )
    torch: Any = ModuleType("torch")
    torch.cuda, torch.device = cuda, lambda *_: None
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: current)
    monkeypatch.setitem(sys.modules, "torch", torch)
    library_of("torch", 0).follow_exported(stream)
    assert seen == waits


def test_a_kind_of_cupy_array_goes_to_cupys_stream_also_where_torch_is_loaded(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(FakeArray):
        pass

    monkeypatch.setitem(sys.modules, "torch", cast("Any", None))
    comm.all_reduce(Own(8, 4096), Own(8, 8192), ReduceOp.SUM)
    assert calls_of(comm)[0][-1] == 77


def test_a_handle_is_not_done_while_its_stream_is_busy(
    comm: NcclCommunicator, current: SimpleNamespace
) -> None:
    array = FakeArray(8, 4096)
    first = comm.all_reduce(array, array, ReduceOp.SUM)
    assert first.done()
    second = comm.all_reduce(array, array, ReduceOp.SUM)
    current.done = False
    assert not second.done()


def test_a_rank_may_send_to_itself_within_a_group_only(comm: NcclCommunicator) -> None:
    with comm.group():
        comm.send(FakeArray(8, 4096), 0)
        comm.recv(FakeArray(8, 8192), 0)
    assert [call[0] for call in calls_of(comm)] == ["group_start", "send", "recv", "group_end"]


def test_an_abort_releases_graphs_frees_both_communicators_and_stays(comm: NcclCommunicator) -> None:
    released: list[int] = []
    comm.before_end(lambda: released.append(1))
    forget = comm.before_end(lambda: released.append(2))
    forget()
    comm.abort(MembershipChanged("rank 1 is gone", generation=3))
    comm.abort(MembershipChanged("later news", generation=4))
    threads_end("muster-nccl-abort")
    assert released == [1]
    assert sorted(calls_of(comm)) == [("comm_abort", "comm"), ("comm_abort", "root")]
    with pytest.raises(MembershipChanged, match="rank 1 is gone"):
        comm.all_reduce(FakeArray(1, 1), FakeArray(1, 1), ReduceOp.SUM)
    comm.close()
    assert len(calls_of(comm)) == 2


def test_async_is_refused_within_a_group_which_ends_all_the_same(comm: NcclCommunicator) -> None:
    array = FakeArray(8, 4096)
    with pytest.raises(CommunicatorError, match="async_op"), comm.group():
        comm.all_reduce(array, array, ReduceOp.SUM, async_op=True)
    assert calls_of(comm) == [("group_start",), ("group_end",)]


def test_an_abort_within_a_group_waits_for_its_end(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that NCCL never sees the end of holds back all that its thread issues later."""
    monkeypatch.setattr(NcclCommunicator, "leave_wait_s", 60)
    array, change = FakeArray(8, 4096), MembershipChanged("rank 1 is gone", generation=3)
    aborting = threading.Thread(target=comm.abort, args=(change,))
    with pytest.raises(MembershipChanged), comm.group():
        comm.all_reduce(array, array, ReduceOp.SUM)
        aborting.start()
        aborting.join(0.1)
        assert aborting.is_alive()  # it waits for the group's end
        comm.all_reduce(array, array, ReduceOp.SUM)
    aborting.join()
    threads_end("muster-nccl-abort")
    assert [call[0] for call in calls_of(comm)] == [
        "group_start",
        "all_reduce",
        "group_end",
        "comm_abort",
        "comm_abort",
    ]


def test_a_change_that_comes_within_a_group_is_told_at_its_end(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclCommunicator, "leave_wait_s", 0)
    with pytest.raises(MembershipChanged, match="rank 1 is gone"), comm.group():
        comm.abort(MembershipChanged("rank 1 is gone", generation=3))
    threads_end("muster-nccl-abort")
    assert "group_end" not in [call[0] for call in calls_of(comm)]  # too late: the communicator is gone


def test_an_abort_reaches_the_groups_that_were_split_off(comm: NcclCommunicator) -> None:
    child = comm.split("pair", [1, 0])
    assert child is not None
    grandchild = child.split("one", [child.rank])
    assert grandchild is not None and comm.split("other", [1]) is None
    released: list[str] = []
    child.before_end(lambda: released.append("graph of the pair"))
    comm.abort(MembershipChanged("rank 1 is gone", generation=3))
    threads_end("muster-nccl-abort")
    for each in (comm, child, grandchild):
        with pytest.raises(MembershipChanged, match="rank 1 is gone"):
            each.all_reduce(FakeArray(1, 1), FakeArray(1, 1), ReduceOp.SUM)
    aborted = {call[1] for call in calls_of(comm) if call[0] == "comm_abort"}
    assert aborted == {"comm", "root", "child of root", "child of child of root"}
    assert released == ["graph of the pair"]


def test_closing_ends_what_the_communicator_has_made(comm: NcclCommunicator) -> None:
    comm.nccl.red_op_create_pre_mul_sum = lambda *arguments: 9
    child = comm.split("pair", [0, 1])
    assert child is not None
    array, steps = FakeArray(8, 4096), comm.nccl.calls
    comm.before_end(lambda: steps.append(("graph released",)))
    child.before_end(lambda: steps.append(("child's graph released",)))
    for factor in (0.5, 0.5, 0.25):
        comm.all_reduce(array, array, PreMultipliedSum(factor))
    comm.close()
    comm.close()
    assert [call for call in calls_of(comm) if call[0] != "all_reduce"] == [
        ("child's graph released",),
        ("comm_destroy", "child of root"),
        ("graph released",),  # before the communicator whose kernels it holds
        ("red_op_destroy", 9, "comm"),
        ("red_op_destroy", 9, "comm"),
        ("comm_destroy", "comm"),
        ("comm_destroy", "root"),
    ]


class HangingNccl(RecordingNccl):
    """Destroying waits for an abort: a peer never destroyed its part."""

    def __init__(self, hangs: str = "comm_destroy") -> None:
        super().__init__()
        self.hangs = hangs
        self.entered, self.freed = threading.Event(), threading.Event()

    def comm_destroy(self, comm: str) -> None:
        self.calls.append(("comm_destroy", comm))
        self.wait("comm_destroy")

    def comm_abort(self, comm: str) -> None:
        self.calls.append(("comm_abort", comm))
        self.freed.set()

    def wait(self, name: str) -> None:
        if name == self.hangs:
            self.entered.set()
            assert self.freed.wait(30)


def hanging(comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch, nccl: HangingNccl) -> NcclCommunicator:
    monkeypatch.setattr(NcclCommunicator, "destroy_wait_s", 0)
    return NcclCommunicator(nccl, "comm", "root", comm.membership, device=0, timeout_s=60)


@pytest.mark.parametrize(
    ("hangs", "destroyed"), [("comm_destroy", ["comm"]), ("giving up a graph", []), ("nothing", None)]
)
def test_an_abort_ends_a_close_that_hangs(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch, hangs: str, destroyed: list[str] | None
) -> None:
    nccl = HangingNccl(hangs)
    closed = hanging(comm, monkeypatch, nccl)
    closed.before_end(lambda: nccl.wait("giving up a graph"))
    closing = threading.Thread(target=closed.close)
    closing.start()
    if destroyed is None:
        closing.join(30)
    else:
        assert nccl.entered.wait(30)
    closed.abort(MembershipChanged("rank 1 is gone", generation=3))
    closing.join(30)
    assert not closing.is_alive()
    threads_end("muster-nccl-abort")
    aborted = sorted(call[1] for call in nccl.calls if call[0] == "comm_abort")
    assert aborted == ([] if destroyed is None else ["comm", "root"])  # each is freed, and only once more
    ended = [call[1] for call in nccl.calls if call[0] == "comm_destroy"]
    assert ended == (["comm", "root"] if destroyed is None else destroyed)
    with pytest.raises(CommunicatorAbortedError, match="closed"):
        closed.barrier()


def test_an_abort_leaves_a_close_that_goes_on_to_itself(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL must not free one communicator in two threads."""
    nccl = HangingNccl()
    closed = hanging(comm, monkeypatch, nccl)
    monkeypatch.setattr(NcclCommunicator, "destroy_wait_s", 60)
    closing = threading.Thread(target=closed.close)
    change = MembershipChanged("rank 1 is gone", generation=3)
    aborting = threading.Thread(target=closed.abort, args=(change,))
    closing.start()
    assert nccl.entered.wait(30)
    aborting.start()
    aborting.join(0.1)
    assert aborting.is_alive()
    nccl.freed.set()  # the peer came after all
    closing.join(30)
    aborting.join(30)
    assert [call for call in nccl.calls if "comm" in call[0]] == [
        ("comm_destroy", "comm"),
        ("comm_destroy", "root"),
    ]


def test_a_close_that_nobody_aborts_ends_at_the_deadline(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = HangingNccl()
    closed = hanging(comm, monkeypatch, nccl)
    closed.timeout_s = 0.01
    closed.close()
    assert nccl.freed.wait(60)
    threads_end("muster-nccl-abort")


def test_the_abort_of_a_generation_reaches_a_group_that_is_being_closed(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = HangingNccl()
    world = hanging(comm, monkeypatch, nccl)
    child = world.split("pair", [0, 1])
    assert child is not None
    closing = threading.Thread(target=child.close)
    closing.start()
    assert nccl.entered.wait(30)
    world.abort(MembershipChanged("rank 1 is gone", generation=3))
    closing.join(30)
    assert not closing.is_alive() and ("comm_abort", "child of root") in nccl.calls


def test_what_fails_while_closing_keeps_nothing_alive(
    comm: NcclCommunicator, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any) -> None:
        raise RecordingNccl.NCCLError("unhandled cuda error")

    def fail() -> None:
        raise RuntimeError("the graph is in use")

    comm.all_reduce(FakeArray(8, 4096), FakeArray(8, 4096), PreMultipliedSum(0.5))
    comm.nccl.red_op_destroy = refuse
    comm.before_end(fail)
    comm.close()
    assert [call for call in calls_of(comm) if call[0] == "comm_destroy"] == [
        ("comm_destroy", "comm"),
        ("comm_destroy", "root"),
    ]
    assert "resource of group 'world' was not released: the graph is in use" in caplog.text


def test_groups_that_were_closed_are_not_kept(comm: NcclCommunicator) -> None:
    made = []
    for _ in range(10):
        child = comm.split("pair", [0, 1])
        assert child is not None
        child.close()
        made.append(weakref.ref(child))
    open_child = comm.split("pair", [0, 1])
    assert open_child is not None
    comm.split("other", [0])
    del child
    # The threads that would have ended a close that hangs may hold theirs for a moment.
    wait_for(lambda: gc.collect() >= 0 and not any(each() for each in made))
    comm.close()
    with pytest.raises(CommunicatorAbortedError, match="closed"):  # what is open is closed along with it
        open_child.barrier()


def test_few_factors_are_kept(comm: NcclCommunicator) -> None:
    numbers = itertools.count(100)
    comm.nccl.red_op_create_pre_mul_sum = lambda *arguments: next(numbers)
    array = FakeArray(8, 4096)

    def destroyed() -> list[int]:
        return [call[1] for call in calls_of(comm) if call[0] == "red_op_destroy"]

    def reduce(factors: range) -> None:
        for factor in factors:
            comm.all_reduce(array, array, PreMultipliedSum(1 / factor))

    reduce(range(1, 21))
    assert destroyed() == [100, 101, 102, 103]
    with comm.group():  # what is issued inside is launched at its end, and needs its operation until then
        reduce(range(21, 41))
        assert destroyed() == [100, 101, 102, 103]
    reduce(range(41, 42))
    assert destroyed() == list(range(100, 125))
    comm.close()
    assert destroyed() == list(range(100, 141))


def test_an_operation_that_does_not_exist_is_refused_in_words(comm: NcclCommunicator) -> None:
    array, wrong = FakeArray(8, 4096), cast("ReduceOp", "avg")
    words = "op must be one of sum, mean, min, max, prod; it is 'avg'"
    with pytest.raises(ArrayError, match=words):
        comm.all_reduce(array, array, wrong)
    with pytest.raises(ArrayError, match=words):
        comm.reduce(array, array, wrong, 0)


def test_a_group_of_nobody_is_refused(comm: NcclCommunicator) -> None:
    with pytest.raises(ArrayError, match="group 'none' must have at least one rank, and each only once"):
        comm.split("none", [])
    assert calls_of(comm) == []


def test_what_nccl_refuses_at_the_start_of_a_group_is_told_in_words(comm: NcclCommunicator) -> None:
    def refuse() -> None:
        raise RecordingNccl.NCCLError("invalid usage")

    comm.nccl.group_start = refuse
    with pytest.raises(CommunicatorError, match=r"refused a call on rank 0 .*invalid usage"), comm.group():
        pass


# ---------------------------------------------------------------- whose stream is waited for


class Streams:
    """CuPy with events that know which stream they were recorded on, beside a torch that nobody uses."""

    def __init__(self, current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[Any] = []
        recorded = self.recorded

        class Event(FakeEvent):
            def record(self, stream: Any) -> None:
                recorded.append(stream)

        fake: Any = fake_cupy(current)
        fake.cuda.Event = Event
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))


def test_what_is_waited_for_is_the_stream_of_the_library_whose_arrays_there_were(
    comm: NcclCommunicator, current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(current, monkeypatch)
    comm.broadcast(FakeArray(8, 4096), 0)
    comm.synchronize()
    assert streams.recorded == [current]
    child = comm.split("pair", [0, 1])
    assert child is not None
    child.barrier()
    *before, own = streams.recorded
    assert before == [current, current] and own.ptr == 88  # the barrier's stream follows the current one


@pytest.mark.parametrize("step_s", [0.0005, 0.0065, 0.0115])
def test_a_wait_for_a_step_ends_soon_after_it(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """A loop waits after each step: what it comes too late, the GPU stands idle."""
    array, now = FakeArray(8, 4096), [100.0]
    comm.all_reduce(array, array, ReduceOp.SUM)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(nccl_communicator, "time", clock)
    monkeypatch.setattr(FakeEvent, "done", property(lambda event: now[0] >= 100 + step_s))
    comm.synchronize()
    assert step_s <= now[0] - 100 <= step_s * 1.04 + 20e-6


def test_the_deadline_counts_where_the_host_waits_and_nowhere_else(
    comm: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = FakeArray(8, 4096)
    comm.all_reduce(array, array, ReduceOp.SUM)
    monkeypatch.setattr(FakeEvent, "done", False)
    comm.timeout_s = 0
    comm.all_reduce(array, array, ReduceOp.SUM).wait()
    comm.all_reduce(array, array, ReduceOp.SUM, async_op=True).wait()
    for wait in (comm.synchronize, comm.barrier):
        with pytest.raises(
            CollectiveTimeoutError, match=r"complete within 0 s on rank 0; waited for rank 1 \(w1"
        ):
            wait()


# ---------------------------------------------------------------- before joining


class SlowDevices:
    """CuPy whose context takes until ``ready`` is set; counts who made which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready, self.used = threading.Event(), list[tuple[int, str]]()
        fake: Any = fake_cupy(SimpleNamespace(ptr=77))
        fake.cuda.Device = lambda index: SimpleNamespace(use=lambda: self._use(index))
        fake.cuda.runtime = SimpleNamespace(
            free=lambda pointer: None,
            getDevice=lambda: self.used[-1][0],
            getDeviceProperties=lambda index: {"name": b"NVIDIA H200"},
        )
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(nccl_handles, "load_bindings", lambda: LoadedNccl(polls=0))

    def _use(self, index: int) -> None:
        self.ready.wait(60)
        self.used.append((index, threading.current_thread().name))


class LoadedNccl(FakeNccl):
    def get_version(self) -> int:
        return 22809

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: name


@pytest.mark.parametrize(
    ("version", "warned"), [(22802, False), (22803, True), (22808, True), (22809, False), (23200, False)]
)
def test_releases_that_break_when_a_communicator_is_built_again_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: int, warned: bool
) -> None:
    monkeypatch.setattr(nccl_handles, "load_bindings", lambda: SimpleNamespace(get_version=lambda: version))
    NcclBackend().close()
    assert ("install 2.28.9 or later" in caplog.text) == warned


@pytest.mark.parametrize("offered", [True, False])
def test_nccl_s_own_tls_is_used_where_its_traffic_is_sealed_and_the_build_has_it(
    monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    """What all ranks must have alike says so: a rank without TLS could not meet the others."""
    monkeypatch.setattr(nccl_handles, "load_bindings", lambda: SimpleNamespace(get_version=lambda: 23203))
    monkeypatch.setattr(nccl_communicator, "offers_tls", lambda nccl: offered)
    backend = NcclBackend()
    assert backend.bootstrap_tls is None and backend.facts == {"nccl": "2.32.3"}
    backend.seal(EndedConnection())
    assert (backend.bootstrap_tls is not None) is offered
    assert backend.facts == {"nccl": "2.32.3"} | ({"nccl_bootstrap": "TLS"} if offered else {})


def test_the_gpu_is_made_ready_while_the_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = SlowDevices(monkeypatch)
    begun = WarmUp(2)
    backend = NcclBackend(warm_up=begun)
    begun.load()  # returns, though the device is not there yet
    assert devices.used == []
    threading.Timer(0.05, devices.ready.set).start()
    comm = backend.connect(membership([""]), timeout_s=60, cancelled=lambda: None)
    name = threading.current_thread().name
    assert [used for used in devices.used if used[1] != name] == [(2, "muster-nccl-warm-up")]
    assert devices.used[0] == (2, "muster-nccl-warm-up")
    comm.close()
    backend.close()


def test_a_gpu_that_is_not_known_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = SlowDevices(monkeypatch)
    devices.ready.set()
    begun = WarmUp(-1)
    backend = NcclBackend(warm_up=begun)
    begun.load()
    backend.close()
    assert devices.used == []


def test_what_fails_beforehand_is_told_when_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = SlowDevices(monkeypatch)

    def broken(index: int) -> None:
        raise RuntimeError("no such device")

    devices._use = broken  # type: ignore[method-assign]
    devices.ready.set()
    begun = WarmUp(7)
    backend = NcclBackend(device_index=7, warm_up=begun)
    begun.load()
    with pytest.raises(CommunicatorError, match="GPU 7 cannot be used on this host: no such device"):
        backend.connect(membership([""]), timeout_s=60, cancelled=lambda: None)
    backend.close()
