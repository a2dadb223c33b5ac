"""What communicators on the host refuse before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest

from muster.communicators.host_communicator import HostCommunicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.reduce_ops import ReduceOp
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
        (np.ma.masked_array([1.0, 2.0], [False, True]), "a masked array, whose mask would be lost"),
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


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("i4", ReduceOp.MEAN), ("u1", ReduceOp.MEAN), ("?", ReduceOp.SUM), ("?", ReduceOp.MEAN)],
)
def test_operations_without_meaning_are_refused(alone: HostCommunicator, dtype: str, op: ReduceOp) -> None:
    with pytest.raises(ArrayError, match="not defined"):
        alone.all_reduce(np.zeros(1, dtype), np.zeros(1, dtype), op)


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
