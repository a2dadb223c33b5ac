"""The public functions on arrays: shapes, dtypes, outputs. The data plane itself is tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import muster
from muster.errors import ArrayError, CommunicatorError, GroupError, NotInitializedError
from muster.worker import runtime as process
from muster.worker.session.groups import Groups
from tests.worker.session.scripted import StubCommunicator, stub_communicator


class StubSession:
    """As much of a session as the functions need: rank 1 of 2."""

    rank, world_size = 1, 2
    local_rank, local_world_size = 1, 2
    released = False

    def __init__(self) -> None:
        self.communicator: StubCommunicator = stub_communicator(1, 2)
        self.groups = Groups()
        self.groups.enter(self.communicator)

    def group(self, name: str | None) -> Any:
        return self.groups.communicator(name)


@pytest.fixture
def session() -> Iterator[StubSession]:
    made: Any = StubSession()
    process.process.session = made
    yield made
    process.process.session = None


def test_without_a_session_everything_says_so() -> None:
    for call in (muster.get_rank, muster.barrier, muster.get_local_rank):
        with pytest.raises(NotInitializedError, match=r"muster\.init\(\)"):
            call()


X = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: muster.all_reduce(X), (4, 3)),
        (lambda: muster.reduce(X, root=1), (4, 3)),
        (lambda: muster.broadcast(X), (4, 3)),
        (lambda: muster.all_gather(X), (8, 3)),
        (lambda: muster.all_gather(np.float32(1)), (2,)),
        (lambda: muster.reduce_scatter(X), (2, 3)),
        (lambda: muster.gather(X, root=1), (8, 3)),
        (lambda: muster.scatter(X), (2, 3)),
        (lambda: muster.all_to_all(X), (4, 3)),
        (lambda: muster.recv(X, 0), (4, 3)),
    ],
)
def test_results_have_the_right_shape_and_dtype(
    session: StubSession, call: Any, shape: tuple[int, ...]
) -> None:
    result = call()
    assert (result.shape, result.dtype) == (shape, np.float32)


def test_only_the_root_gets_a_result(session: StubSession) -> None:
    assert muster.reduce(X, root=0) is None
    assert muster.gather(X, root=0) is None


def test_out_is_filled_and_returned(session: StubSession) -> None:
    out = np.empty_like(X)
    assert muster.all_reduce(X, out=out) is out
    assert muster.scatter(None, root=0, out=out) is out


def test_numbers_become_arrays(session: StubSession) -> None:
    assert muster.all_reduce(1.5).dtype == np.float64


@pytest.mark.parametrize("call", [muster.all_reduce, muster.broadcast, muster.all_gather])
def test_numpys_scalars_are_numbers(session: StubSession, call: Any) -> None:
    """What array.mean() returns has a shape and a dtype, and is no array that a communicator takes."""
    result = call(np.ones(3, np.float32).mean())
    assert isinstance(result, np.ndarray) and result.dtype == np.float32
    with pytest.raises(ArrayError, match=r"out is a numpy\.float32, which cannot be filled"):
        muster.all_reduce(np.ones(()), out=np.float32(1))


def test_async_gives_the_result_at_wait(session: StubSession) -> None:
    pending = muster.all_gather(X, async_op=True)
    assert pending.done()
    assert pending.wait().shape == (8, 3)
    assert muster.send(X, 0, async_op=True).wait() is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: muster.all_reduce(X, op="avg"), "sum, mean, min, max, prod; it is 'avg'"),
        (lambda: muster.all_reduce(X, out=np.zeros(4, np.float32)), r"must have the shape \(4, 3\)"),
        (lambda: muster.all_reduce(X, out=np.zeros((4, 3))), "float32; it has .* float64"),
        (lambda: muster.reduce_scatter(np.zeros(5)), "divisible by the 2 ranks"),
        (lambda: muster.all_to_all(np.zeros(())), "divisible by the 2 ranks"),
        (lambda: muster.scatter(None), "needs x on its root"),
        (lambda: muster.scatter(None, root=1, out=X), "needs x on its root"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    session: StubSession, call: Any, words: str
) -> None:
    with pytest.raises(ArrayError, match=words):
        call()
    assert session.communicator.calls == []


class OnGpu:
    """Tells what it is through CUDA's interface only."""

    def __init__(self) -> None:
        facts = {"shape": (4, 3), "typestr": "<f4", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = facts


class Capsule:
    """Has DLPack and nothing else."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("it lies on a GPU")


class Convertible(Capsule):
    """NumPy makes an array of it, which may be a copy."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.ones(2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: muster.all_reduce(X, op=muster.PreMultipliedSum(0.5)),
            r"\"stub\" knows no .*by 0\.5 yourself",
        ),
        (lambda: muster.reduce(X, op=muster.PreMultipliedSum(0.5)), "knows no PreMultipliedSum"),
        (lambda: muster.reduce_scatter(X, op=muster.PreMultipliedSum(2)), "knows no PreMultipliedSum"),
        (lambda: muster.all_reduce(OnGpu()), r"x is a tests\.OnGpu on a GPU, and .*\"stub\" .*need NCCL"),
        (lambda: muster.broadcast(Capsule()), r"x is a tests\.Capsule"),
        (lambda: muster.recv(OnGpu(), 0), r"out is a tests\.OnGpu"),
        (lambda: muster.all_reduce(X, out=Capsule()), r"out is a tests\.Capsule"),
        (lambda: muster.all_reduce(X, out=[0.0]), "out is a list, which cannot be filled"),
        (lambda: muster.recv([0.0], 0), "out is a list, which cannot be filled"),
        (lambda: muster.scatter(None, root=0, out=[0.0]), "out is a list, which cannot be filled"),
        (lambda: muster.all_reduce(object()), "x is a object, neither an array nor numbers"),
        (lambda: muster.all_reduce("three"), "x is a str, neither an array nor numbers"),
        (lambda: muster.all_reduce([[1], [2, 3]]), "x cannot become an array"),
    ],
)
def test_what_this_backend_does_not_take_is_refused_in_words(
    session: StubSession, call: Any, words: str
) -> None:
    with pytest.raises(ArrayError, match=words):
        call()
    assert session.communicator.calls == []


def test_what_is_not_done_in_place_leaves_its_argument_alone_and_what_is_returns_it(
    session: StubSession,
) -> None:
    assert muster.broadcast(X) is X and muster.recv(X, 0) is X
    assert muster.all_reduce(X) is not X and muster.all_reduce(X, out=X) is X
    assert muster.broadcast([1.0, 2.0]).shape == (2,)
    assert muster.broadcast(Convertible()).shape == (2,)


def test_several_collectives_in_one_launch_need_nccl(session: StubSession) -> None:
    words = r'"stub" starts each collective by itself.*async_op=True'
    with pytest.raises(CommunicatorError, match=words), muster.group():
        muster.all_reduce(X)
    assert session.communicator.calls == []


def test_ranks_and_groups(session: StubSession) -> None:
    assert (muster.get_rank(), muster.get_group_size()) == (1, 2)
    assert (muster.get_local_rank(), muster.get_local_rank_size(), muster.get_local_size()) == (1, 2, 2)
    muster.create_group("swapped", [1, 0])
    assert muster.get_rank("swapped") == 0
    assert muster.get_world_rank_from_group_rank("swapped", 0) == 1
    assert muster.get_group_rank_from_world_rank(0, "swapped") == 1
    muster.barrier("swapped")
    assert session.communicator.parts[0].calls == ["barrier"]
    muster.create_group("first", [0])
    assert muster.get_group_size("first") == 1
    with pytest.raises(GroupError, match="World rank 1 is not in the group 'first'"):
        muster.get_group_rank_from_world_rank(1, "first")
    with pytest.raises(GroupError, match="ranks 0 to 0, not 1"):
        muster.get_world_rank_from_group_rank("first", 1)
    muster.destroy_group("first")
    with pytest.raises(GroupError):
        muster.get_group_size("first")
