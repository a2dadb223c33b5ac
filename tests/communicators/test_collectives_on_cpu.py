"""``worker.*`` on NCCL, with stand-ins on the CPU: what only NCCL has is reached from there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import muster
from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.communicator import NcclCommunicator
from muster.errors import ArrayError, CommunicatorError
from muster.worker import runtime as process
from muster.worker.session.groups import Groups
from tests.gpu.stand_in import HostArray, OneRankNccl, fake_cupy
from tests.worker.test_collectives import StubSession


class CountingNccl(OneRankNccl):
    """Tells where launches begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("group_") or name == "send":
            self.seen.append(name)
        return super().__getattribute__(name)


class Interface:
    """An array that has CUDA's interface and nothing else, over a NumPy array's memory."""

    def __init__(self, values: npt.NDArray[Any], writable: bool = True) -> None:
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (values.ctypes.data, not writable),
            "version": 3,
        }


class Capsule:
    """An array that has DLPack and nothing else."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingNccl]:
    """A session of one rank whose backend is NCCL."""
    current = SimpleNamespace(ptr=77, done=True, wait_event=lambda event: None)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(current))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    alone = Membership("job", 1, "world", 0, (Peer(0, "w0", 1, "h", "host", ""),), (b"id",))
    library = CountingNccl()
    session: Any = StubSession()
    session.groups = Groups()
    session.groups.enter(NcclCommunicator(library, "comm", "root", alone, device=0, timeout_s=5))
    monkeypatch.setattr(process.process, "session", session)
    yield library


def numbers(size: int = 6) -> npt.NDArray[Any]:
    return np.arange(size, dtype="f4")


def test_a_sum_may_be_scaled_on_the_way(nccl: CountingNccl) -> None:
    half = muster.PreMultipliedSum(0.5)
    for collective in (muster.all_reduce, muster.reduce_scatter, lambda x, op: muster.reduce(x, 0, op)):
        given = HostArray(numbers())
        assert collective(given, op=half).values.tolist() == (numbers() / 2).tolist()
        assert given.values.tolist() == numbers().tolist()


def test_a_scaled_sum_needs_floats(nccl: CountingNccl) -> None:
    with pytest.raises(ArrayError, match="floating-point dtype, not int32"):
        muster.all_reduce(HostArray(np.ones(4, "i4")), op=muster.PreMultipliedSum(0.5))


@pytest.mark.parametrize("kind", [Interface, Capsule])
def test_arrays_that_only_an_interface_describes_are_taken(nccl: CountingNccl, kind: Any) -> None:
    given, out = kind(numbers()), kind(np.zeros(6, "f4"))
    made = muster.all_reduce(given)
    assert (made.shape, made.dtype) == ((6,), np.float32) and made.values.tolist() == numbers().tolist()
    assert muster.all_reduce(given, out=out) is out
    assert out.values.tolist() == numbers().tolist()
    assert muster.all_gather(given, out=out) is out
    assert muster.broadcast(given) is given
    with muster.group():
        muster.send(kind(numbers() + 1), 0)
        assert muster.recv(out, 0) is out
    assert out.values.tolist() == (numbers() + 1).tolist()


@pytest.mark.parametrize("kind", [Interface, Capsule])
def test_what_they_say_is_checked(nccl: CountingNccl, kind: Any) -> None:
    given = kind(numbers())
    with pytest.raises(ArrayError, match=r"shape \(6,\) and dtype float32; it has \(5,\) and float32"):
        muster.all_reduce(given, out=kind(numbers(5)))
    with pytest.raises(ArrayError, match=r"dtype float32; it has .* float64"):
        muster.all_reduce(given, out=kind(np.zeros(6)))


def test_arrays_that_cannot_be_used_are_refused_in_words(nccl: CountingNccl) -> None:
    class Broken:
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("its stream is gone")

    with pytest.raises(ArrayError, match=r"x is a tests\.Broken, which cannot be read through DLPack: its"):
        muster.all_reduce(Broken())
    with pytest.raises(ArrayError, match="read-only"):
        muster.all_reduce(Interface(numbers(), writable=False))
    with pytest.raises(ArrayError, match=r"x is a numpy\.ndarray on the CPU, .* needs an array on a GPU"):
        muster.all_reduce([1.0, 2.0])


def test_several_collectives_start_as_one_launch(nccl: CountingNccl) -> None:
    with muster.group():
        for _ in range(2):
            muster.send(HostArray(numbers()), 0)
            muster.recv(HostArray(numbers()), 0)
    assert nccl.seen == ["group_start", "send", "send", "group_end"]
    with pytest.raises(CommunicatorError, match="async_op inside group"), muster.group():
        muster.all_reduce(HostArray(numbers()), async_op=True)
    assert nccl.seen[-2:] == ["group_start", "group_end"]


def test_an_exchange_with_neighbours_is_one_launch(nccl: CountingNccl) -> None:
    got = HostArray(np.zeros(6, "f4"))
    assert muster.neighbor_exchange({0: HostArray(numbers())}, {0: got}) == {0: got}
    assert nccl.seen[0] == "group_start" and nccl.seen[-1] == "group_end"


def test_groups_within_groups_are_one_until_the_outer_ends(nccl: CountingNccl) -> None:
    with muster.group():
        with muster.group():
            pass
        with pytest.raises(CommunicatorError, match="async_op inside group"):
            muster.all_reduce(HostArray(numbers()), async_op=True)
