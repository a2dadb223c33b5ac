"""How tensors of every dtype travel from rank to rank, among threads on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.communicators.arithmetic import ARITHMETIC
from muster.communicators.arrays import describe
from muster.communicators.work import Work
from muster.torch.data_parallel import DataParallel
from muster.torch.transfer import CopiesAside, TensorLibrary, broadcast_tensors
from muster.training.carrier import Carrier
from tests.gpu.threads import ThreadCommunicator, run_ranks

DTYPES = (
    *(torch.bool, torch.int16, torch.complex64, torch.complex128),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn),
)


@pytest.fixture(autouse=True)
def as_strict_as_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads' communicator would take arrays of every dtype."""
    broadcast = ThreadCommunicator.broadcast

    def strict(self: ThreadCommunicator, buffer: Any, root: int, *, async_op: bool = False) -> Work:
        given = describe(buffer)
        assert given.dtype in ARITHMETIC
        return broadcast(self, given.flat, root, async_op=async_op)

    monkeypatch.setattr(ThreadCommunicator, "broadcast", strict)


def numbers(rank: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Other ones on each rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 2).to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast_takes_every_dtype_and_shape(dtype: Any) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        mine = [numbers(communicator.rank, dtype, shape) for shape in ((), (0, 3), (3, 5), (7,))]
        mine.append(numbers(communicator.rank, dtype, (4, 6)).t())  # not contiguous
        broadcast_tensors(communicator, mine, 1)
        return mine

    for result in run_ranks(2, one):
        for tensor, shape in zip(result, ((), (0, 3), (3, 5), (7,)), strict=False):
            assert torch.equal(tensor.to(torch.complex128), numbers(1, dtype, shape).to(torch.complex128))
        expected = numbers(1, dtype, (4, 6)).t()
        assert torch.equal(result[-1].to(torch.complex128), expected.to(torch.complex128))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_of_every_dtype_follow_rank_0(dtype: Any) -> None:
    """At the start and in every step, whatever the communicator can compute with."""

    def one(communicator: ThreadCommunicator) -> Any:
        net = torch.nn.Linear(2, 2)
        net.register_buffer("mask", numbers(communicator.rank, dtype, (3, 3)))
        model = DataParallel(net, communicator=communicator)
        begun = net.mask.clone()
        net.mask.copy_(numbers(communicator.rank + 1, dtype, (3, 3)))
        model(torch.ones(1, 2)).sum().backward()
        return begun, net.mask

    for begun, mask in run_ranks(2, one):
        assert torch.equal(begun.to(torch.complex128), numbers(0, dtype, (3, 3)).to(torch.complex128))
        assert torch.equal(mask.to(torch.complex128), numbers(1, dtype, (3, 3)).to(torch.complex128))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_newcomers_get_state_of_every_dtype(dtype: Any) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        tensors = {"weight": numbers(communicator.rank, dtype, (3, 3))}
        return Carrier(communicator, TensorLibrary(torch.device("cpu"))).receive(tensors, 1)

    for arrays in run_ranks(2, one):
        assert arrays["weight"].dtype == dtype
        received = arrays["weight"].to(torch.complex128)
        assert torch.equal(received, numbers(1, dtype, (3, 3)).to(torch.complex128))


def test_tensors_of_many_dtypes_are_copied_in_one_call_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch launches a kernel for each tensor where a call has several dtypes."""
    calls: list[set[Any]] = []
    copy = torch._foreach_copy_

    def watched(targets: list[Any], sources: list[Any]) -> None:
        calls.append({tensor.dtype for tensor in (*targets, *sources)})
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    tensors = [numbers(1, dtype, (3,)) for dtype in DTYPES for _ in range(4)]
    copies = CopiesAside(tensors)
    for tensor in tensors:
        tensor.fill_(1)
    copies.take()
    for tensor in tensors:
        tensor.zero_()
    copies.put_back()
    assert all(bool((tensor.to(torch.complex128) == 1).all()) for tensor in tensors)
    assert len(calls) == 2 * len(DTYPES) and all(len(dtypes) == 1 for dtypes in calls)
