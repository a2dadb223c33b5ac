"""Operations of a group of four ranks of which the second is missing."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from muster.errors import WorkerError
from muster.programs.fewer_ranks import FewerRanks

FEWER = FewerRanks([0, 2, 3], 4)


@pytest.mark.parametrize(
    ("operation", "given", "made"),
    [(dist.ReduceOp.SUM, 3.0, 4.0), (dist.ReduceOp.AVG, 3.0, 3.0), (dist.ReduceOp.MAX, 3.0, 3.0)],
)
def test_a_sum_is_scaled_as_if_the_missing_rank_had_given_the_mean(
    operation: Any, given: float, made: float
) -> None:
    options, tensor = dist.AllreduceOptions(), torch.tensor([given])
    options.reduceOp = operation
    assert FEWER.arguments("allreduce", ([tensor], options))[0][0].item() == made


def test_whole_numbers_are_not_scaled() -> None:
    counted = torch.tensor([3])
    FEWER.arguments("allreduce", ([counted], dist.AllreduceOptions()))
    assert counted.item() == 3


@pytest.mark.parametrize(("root", "found"), [(0, 0), (2, 1), (3, 2), (1, 0)])
def test_a_broadcast_comes_from_its_root_or_from_the_first(root: int, found: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    FEWER.arguments("broadcast", ([torch.ones(1)], options))
    assert options.rootRank == found


def test_what_the_missing_rank_would_give_is_zeros() -> None:
    outputs = [torch.ones(1) for _ in range(4)]
    (given,), _ = FEWER.arguments("allgather", ([outputs], [torch.ones(1)]))
    assert [id(each) for each in given] == [id(outputs[at]) for at in (0, 2, 3)]
    assert [each.item() for each in outputs] == [1, 0, 1, 1]


def test_messages_go_to_the_rank_that_is_meant() -> None:
    assert FEWER.arguments("send", ([torch.ones(1)], 3, 7))[1:] == (2, 7)


def test_what_needs_all_ranks_is_refused() -> None:
    with pytest.raises(WorkerError, match="_reduce_scatter_base needs all ranks"):
        FEWER.arguments("_reduce_scatter_base", (torch.ones(1), torch.ones(4)))
