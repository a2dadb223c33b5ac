"""What a rank that is alone gets of its collectives: what it would get if all gave what it gives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from muster.programs.rehearsal import rehearse

RANK, SIZE = 1, 3


def row() -> object:
    return torch.arange(2.0)


def test_what_is_gathered_are_copies_of_ones_own() -> None:
    parts = [torch.empty(2) for _ in range(SIZE)]
    whole, other = torch.empty(SIZE * 2), torch.empty(SIZE * 2)
    rehearse("allgather", ([parts], [row()]), RANK, SIZE)
    rehearse("_allgather_base", (whole, row()), RANK, SIZE)
    rehearse("allgather_into_tensor_coalesced", ([other], [row()]), RANK, SIZE)
    assert [each.tolist() for each in parts] == [[0, 1]] * SIZE
    assert whole.tolist() == other.tolist() == [0, 1] * SIZE


def test_the_part_that_is_gathered_may_lie_in_the_result() -> None:
    whole = torch.arange(6.0)
    rehearse("_allgather_base", (whole, whole[2:4]), RANK, SIZE)
    assert whole.tolist() == [2, 3] * SIZE
    rehearse("_reduce_scatter_base", (whole[:2], torch.arange(6.0)), RANK, SIZE)
    assert whole[:2].tolist() == [2, 3]


def test_what_is_scattered_is_this_rank_s_part() -> None:
    outputs = [torch.empty(2) for _ in range(3)]
    parts = [torch.full((2,), float(rank)) for rank in range(SIZE)]
    rehearse("reduce_scatter", ([outputs[0]], [parts]), RANK, SIZE)
    rehearse("scatter", ([outputs[1]], [parts]), RANK, SIZE)
    rehearse("reduce_scatter_tensor_coalesced", ([outputs[2]], [torch.cat(parts)]), RANK, SIZE)
    assert [each.tolist() for each in outputs] == [[RANK, RANK]] * 3


def test_sums_and_broadcasts_leave_what_is_there_and_messages_are_ones() -> None:
    tensor, received, resized = torch.arange(2.0), torch.zeros(2), torch.ones(3)
    for name in ("allreduce", "broadcast", "reduce", "send"):
        rehearse(name, ([tensor],), RANK, SIZE)
    rehearse("recv", ([received], 0, 0), RANK, SIZE)
    rehearse("alltoall", ([resized], [tensor]), RANK, SIZE)
    rehearse("barrier", (), RANK, SIZE)
    assert tensor.tolist() == [0, 1]
    assert received.tolist() == [1, 1]
    assert resized.tolist() == [0, 0, 0]
