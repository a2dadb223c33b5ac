"""The contract's functions on the NCCL communicator of one rank, without a GPU.

What several ranks do to one another is NCCL's affair and needs GPUs; what is refused, in which words, and
what a result and a handle mean does not.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from muster.communicators.arithmetic import undefined_mean
from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.communicator import NcclCommunicator
from muster.communicators.reduce_ops import PreMultipliedSum, ReduceOp
from muster.errors import ArrayError
from tests.contracts import bodies
from tests.contracts.agents import Place
from tests.contracts.kits import Kit, NumpyArray
from tests.gpu.stand_in import HostArray, OneRankNccl, fake_cupy


class StandInKit(Kit):
    def array(self, values: NumpyArray) -> Any:
        return HostArray(values.copy())

    def numpy(self, array: Any) -> NumpyArray:
        return cast("NumpyArray", array.values)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """One rank; the current stream is idle."""
    current = SimpleNamespace(ptr=77, done=True, wait_event=lambda event: None)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(current))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    alone = Membership("job", 1, "world", 0, (Peer(0, "w0", 1, "h", "host", ""),), (b"id",))
    comm = NcclCommunicator(OneRankNccl(), "comm", "root", alone, device=0, timeout_s=5)
    return Place(comm, StandInKit("stand-in", "nccl", divides_last=False), cast("Any", None), alone)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_every_element_is_reduced(place: Place, op: ReduceOp, dtype: str) -> None:
    bodies.all_reduce(place, dtype, op)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 120_001])
def test_every_element_is_scaled(place: Place, size: int) -> None:
    comm: Any = place.comm
    for collective in (comm.all_reduce, comm.reduce_scatter, lambda *a: comm.reduce(*a, 0)):
        array = place.kit.array(np.arange(size, dtype="f4"))
        collective(array, array, PreMultipliedSum(0.5)).wait()
        bodies.equal(place, array, np.arange(size, dtype="f4") / 2)


def test_the_other_collectives(place: Place) -> None:
    bodies.rooted(place, "f4")
    bodies.shuffles(place, "i4")
    bodies.in_place_shuffles(place, 10)
    bodies.asynchronous(place, 5)
    bodies.barriers(place)


@pytest.mark.parametrize("dtype", ["?", "i2", "u2", "c8"])
def test_what_nccl_cannot_compute_with_is_moved_all_the_same(place: Place, dtype: str) -> None:
    comm: Any = place.comm
    values = np.arange(6).astype(dtype)
    given = place.kit.array(values)
    comm.broadcast(given, 0)
    assert np.array_equal(given.values, values)
    moves: dict[str, Any] = {
        "all_gather": comm.all_gather,
        "gather": lambda *arrays: comm.gather(*arrays, 0),
        "scatter": lambda *arrays: comm.scatter(*arrays, 0),
        "all_to_all": comm.all_to_all,
        "send and recv": lambda send, recv: (comm.send(send, 0), comm.recv(recv, 0)),
    }
    for name, move in moves.items():
        result = place.kit.array(np.zeros_like(values))
        with comm.group():
            move(given, result)
        assert np.array_equal(result.values, values), name
    for reduction in (comm.all_reduce, comm.reduce_scatter, lambda *arrays: comm.reduce(*arrays, 0)):
        with pytest.raises(ArrayError, match=f"NCCL has no dtype {values.dtype}"):
            reduction(given, given, ReduceOp.SUM)


def test_wrong_arrays_are_refused_as_on_the_cpu(place: Place) -> None:
    shown = bodies.refusals(place)
    assert (
        shown[3]
        == str(undefined_mean("int32"))
        == "The mean of int32 is not defined. Use sum, or a float dtype."
    )
    assert shown[4:6] == [f"root is {root}; the group 'world' has ranks 0 to 0." for root in (1, -1)]
    assert shown[7] == "Rank 0 cannot send to or receive from itself."


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u4", "i8", "u8"])
def test_the_mean_of_whole_numbers_is_refused_in_every_reduction(place: Place, dtype: str) -> None:
    comm: Any = place.comm
    array = place.kit.array(np.full(4, 3, dtype))
    for collective in (comm.all_reduce, comm.reduce_scatter, lambda *a: comm.reduce(*a, 0)):
        for op in (ReduceOp.MEAN, "mean"):
            with pytest.raises(ArrayError, match="mean"):
                collective(array, array, op)


def test_a_closed_communicator_says_so(place: Place) -> None:
    assert bodies.use_after_close(place) == "CommunicatorAbortedError"
