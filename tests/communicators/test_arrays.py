"""What is known of an array, what is refused before anything is sent, and how values are combined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.communicators.base import (
    ARITHMETIC,
    HOST,
    Description,
    HostCommunicator,
    Membership,
    Peer,
    ReduceOp,
    check_apart,
    describe,
)
from muster.communicators.tcp.communicator import TcpCommunicator
from muster.communicators.tcp.endpoint import Endpoint
from muster.errors import ArrayError


@pytest.fixture
def alone() -> HostCommunicator:
    """A communicator of one rank, which moves nothing and refuses as all of its kind do."""
    membership = Membership("job", 1, "world", 0, (Peer(0, "w0", 0, "h", "host", ""),))
    return TcpCommunicator(membership, Endpoint(None), path="", timeout_s=5)


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (object(), "neither an array nor numbers"),
        (np.ones(4)[::2], "contiguous"),
        (np.ones(4, ">f4"), "dtype"),
        (np.ones(4, complex), "complex"),
        (np.array(["a"]), "dtype"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "masked, and masks do not travel"),
    ],
)
def test_what_cannot_be_sent_is_refused(alone: HostCommunicator, array: object, word: str) -> None:
    with pytest.raises(ArrayError, match=word):
        alone.broadcast(array, 0)


def test_a_read_only_array_cannot_receive(alone: HostCommunicator) -> None:
    array = np.ones(3)
    array.flags.writeable = False
    alone.all_reduce(array, np.zeros(3), ReduceOp.SUM)
    with pytest.raises(ArrayError, match="read-only"):
        alone.all_reduce(array, array, ReduceOp.SUM)
    with pytest.raises(ArrayError, match="read-only"):
        alone.all_gather(array, array)
    with pytest.raises(ArrayError, match="read-only"):
        alone.all_gather([1.0], [0.0])


def test_a_description_is_flat_and_of_the_same_memory() -> None:
    array = np.zeros((2, 3), "f4")
    found = describe(array)
    found.flat[:] = 7
    assert (array == 7).all()
    assert (found.dtype, found.shape, found.size, found.nbytes) == ("float32", (2, 3), 6, 24)
    assert found.device == HOST and found.array is array
    assert describe(found) is found, "what is described once stays so"
    assert describe(np.array(5.0)).flat.shape == (1,)
    assert describe(array.view(np.matrix)).flat.shape == (6,)


def test_what_is_made_of_numbers_is_said_to_be() -> None:
    assert describe([1.0, 2.0]).is_made and describe(np.float32(1)).is_made
    assert describe(np.float32(1)).shape == ()
    assert not describe(np.ones(1)).is_made


def test_overlap_is_all_or_nothing() -> None:
    whole = np.zeros(10, "f4")

    def apart(part: Any, offset: int | None = 0) -> None:
        check_apart(describe(whole), describe(part), offset)

    apart(whole)
    apart(whole[4:6], 4)
    apart(np.zeros(10, "f4"))
    for part, offset in ((whole[1:], 0), (whole[4:6], 3), (whole, None)):
        with pytest.raises(ArrayError, match="overlap"):
            apart(part, offset)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("i4", ReduceOp.MEAN), ("u1", ReduceOp.MEAN), ("?", ReduceOp.SUM), ("?", ReduceOp.MEAN)],
)
def test_operations_without_meaning_are_refused(alone: HostCommunicator, dtype: str, op: ReduceOp) -> None:
    with pytest.raises(ArrayError, match="not defined"):
        alone.all_reduce(np.zeros(1, dtype), np.zeros(1, dtype), op)


def test_booleans_take_min_max_and_product() -> None:
    parts = [np.array([True, True, False]), np.array([True, False, False])]
    out = np.zeros(3, bool)
    for op, wanted in (
        (ReduceOp.MIN, [True, False, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.PROD, [True, False, False]),
    ):
        ARITHMETIC["bool"].reduce_all(op, parts, out)
        assert out.tolist() == wanted


def test_the_mean_is_the_sum_divided_once() -> None:
    out = np.zeros(2, "f4")
    ARITHMETIC["float32"].reduce_all(ReduceOp.MEAN, [np.full(2, v, "f4") for v in (1, 2, 6)], out)
    assert out.tolist() == [3.0, 3.0]
    assert out.dtype == np.float32


def test_a_mean_of_halves_overflows_only_where_it_is_too_large_itself() -> None:
    out = np.zeros(2, "f2")
    numbers = ARITHMETIC["float16"]
    parts = [np.array([60000, 1], "f2") for _ in range(3)]
    numbers.reduce_all(ReduceOp.MEAN, parts, out)
    assert out.tolist() == [60000, 1]
    numbers.reduce_all(ReduceOp.SUM, parts, out)
    assert out.tolist() == [np.inf, 3]


# ---------------------------------------------------------------- torch


def test_a_tensor_is_described_as_an_array_is() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3, requires_grad=True)
    found = describe(tensor)
    assert (found.dtype, found.shape, found.device) == ("float32", (2, 3), HOST)
    found.flat[:] = 7
    assert tensor.detach().eq(7).all()
    short = torch.ones(3, dtype=torch.bfloat16)
    found = describe(short)
    assert (found.dtype, found.itemsize, found.flat.dtype) == ("bfloat16", 2, np.uint16)
    found.flat[:] = 0
    assert short.eq(0).all()
    assert found.new((2,)).array.dtype == torch.bfloat16


def test_tensors_that_cannot_be_sent_are_refused(alone: HostCommunicator) -> None:
    torch = pytest.importorskip("torch")
    for tensor, words in (
        (torch.ones(4)[::2], "contiguous"),
        (torch.ones(4).to_sparse(), "contiguous"),
        (torch.ones(4, device="meta"), "is on meta"),
        (torch.ones(4, dtype=torch.complex64), "complex64, which cannot be communicated"),
        (torch.ones(4, dtype=torch.complex64).conj(), r"conjugate.*resolve_conj"),
    ):
        with pytest.raises(ArrayError, match=words):
            alone.broadcast(tensor, 0)


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    ties = (generator.integers(0, 2**16, 1000).astype(np.uint32) << 16) + 0x8000
    wide = np.concatenate([bits, ties, np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0x7F7FFFFF], "u4")])
    numbers, values = ARITHMETIC["bfloat16"], wide.view(np.float32)
    found = np.empty(values.shape, np.uint16)
    numbers.narrow(values.copy(), found)
    wanted = torch.from_numpy(values).to(torch.bfloat16)
    result = torch.from_numpy(found).view(torch.bfloat16)
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0))
    back = numbers.widen(found)
    assert np.array_equal(back, result.float().numpy(), equal_nan=True)


def test_a_description_holds_its_memory() -> None:
    found: Description = describe(np.arange(3))
    assert found.flat.tolist() == [0, 1, 2]
