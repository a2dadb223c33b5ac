"""A process group that gets another inner one: who waits is released, and nothing comes through late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    pytest.skip("needs torch 2.9", allow_module_level=True)

import torch.distributed as dist

from muster.errors import CommunicatorAbortedError
from muster.programs.lasting_group import LastingProcessGroup

LIMIT_S = 60
NAME = "lasting-test"


class Pair:
    """Two ranks of a Gloo group in one process: a lasting group over rank 0, and rank 1 as it is."""

    def __init__(self) -> None:
        self.lasting = LastingProcessGroup(0, 2, NAME)
        self.other: Any = None
        self.connect()

    def connect(self) -> None:
        store, made = dist.HashStore(), {}

        def make(rank: int) -> None:
            group = dist.ProcessGroup(store, rank, 2)
            gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LIMIT_S))
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            made[rank] = group

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(LIMIT_S)
        self.other = made[1]
        self.lasting.connect(made[0])


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()


def test_results_and_futures_are_those_of_the_inner_group(pair: Pair) -> None:
    mine, gathered = torch.full((3,), 2.0), [torch.empty(1), torch.empty(1)]
    work = pair.lasting.allreduce([mine], dist.AllreduceOptions())
    pair.other.allreduce([torch.full((3,), 5.0)], dist.AllreduceOptions()).wait()
    work.wait()
    assert work.get_future().wait()[0].tolist() == mine.tolist() == [7.0] * 3
    work = pair.lasting.allgather([gathered], [torch.tensor([1.0])])
    pair.other.allgather([[torch.empty(1), torch.empty(1)]], [torch.tensor([4.0])]).wait()
    work.wait()
    assert [each.item() for each in gathered] == [1.0, 4.0]
    received = torch.empty(1)
    work = pair.lasting.recv([received], 1, 0)
    pair.other.send([torch.tensor([9.0])], 0, 0).wait()
    work.wait()
    assert received.item() == 9.0


def test_who_waits_is_released_and_what_comes_later_is_not_seen(pair: Pair) -> None:
    mine, received = torch.full((3,), 2.0), torch.zeros(1)
    works = [pair.lasting.allreduce([mine], dist.AllreduceOptions()), pair.lasting.recv([received], 1, 0)]
    future, errors = works[0].get_future(), []

    def wait(work: Any) -> None:
        try:
            work.wait()
        except CommunicatorAbortedError as error:
            errors.append(str(error))

    waiting = [threading.Thread(target=wait, args=(work,)) for work in works]
    for each in waiting:
        each.start()
    pair.lasting.break_off("rank 1 was lost")
    for each in waiting:
        each.join(LIMIT_S)
        assert not each.is_alive()
    assert errors == ["rank 1 was lost"] * 2
    with pytest.raises(CommunicatorAbortedError):
        future.wait()
    with pytest.raises(CommunicatorAbortedError):
        pair.lasting.allreduce([mine], dist.AllreduceOptions()).wait()
    # The other end does its part after all: in the next generation nothing of that is seen.
    late = pair.other.allreduce([torch.full((3,), 5.0)], dist.AllreduceOptions())
    pair.connect()
    work = pair.lasting.allreduce([mine], dist.AllreduceOptions())
    pair.other.allreduce([torch.full((3,), 10.0)], dist.AllreduceOptions()).wait()
    work.wait()
    assert mine.tolist() == [12.0] * 3
    assert received.item() == 0.0
    del late


def test_what_torch_does_not_serve_is_raised_though_its_handle_is_never_complete(pair: Pair) -> None:
    whole, options = torch.ones(4), dist.ReduceScatterOptions()
    options.reduceOp = dist._make_nccl_premul_sum(0.5)  # as FSDP2 with a factor for its gradients asks for
    raised: list[Exception] = []

    def wait(work: Any) -> None:
        try:
            work.wait()
        except Exception as error:
            raised.append(error)

    groups = (pair.lasting, pair.other)
    works = [each.reduce_scatter_tensor_coalesced([torch.empty(2)], [whole], options) for each in groups]
    waiting = [threading.Thread(target=wait, args=(work,), daemon=True) for work in works]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join(LIMIT_S)
    assert len(raised) == 2
    assert all("PREMUL_SUM" in str(each) for each in raised)


def test_a_group_that_is_not_connected_yet_rehearses() -> None:
    group = LastingProcessGroup(1, 3, NAME)
    whole = torch.empty(3)
    group.allgather([[whole[0:1], whole[1:2], whole[2:3]]], [torch.tensor([4.0])]).wait()
    assert whole.tolist() == [4.0] * 3
    assert not group.is_connected
