"""Which copy all ranks go back to: the latest of which each rank's part is held by somebody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.torch.peer_copies import PeerCopies, newest_whole, partners_on


def holds(*steps: tuple[int, int], rank: int, size: int = 3) -> list[list[int]]:
    """Its own parts and those of the rank before it."""
    return [[owner, *step] for step in steps for owner in (rank, (rank - 1) % size)]


def test_a_lost_rank_s_part_comes_from_the_rank_after_it() -> None:
    said = [holds((1, 4), rank=0), [], holds((1, 4), rank=2)]
    assert newest_whole(said) == ((1, 4), [0, 2, 2])


def test_two_lost_ranks_beside_each_other_take_a_part_along() -> None:
    assert newest_whole([holds((1, 4), rank=0), [], []]) is None
    assert newest_whole([[], [], []]) is None


def test_a_copy_that_not_all_have_taken_does_not_count() -> None:
    said = [holds((1, 4), (1, 8), rank=0), holds((1, 4), rank=1), holds((1, 4), rank=2)]
    assert newest_whole(said) == ((1, 4), [0, 1, 2])


def test_of_two_generations_the_later_counts() -> None:
    both = [holds((1, 8), (2, 4), rank=rank) for rank in range(3)]
    assert newest_whole(both) == ((2, 4), [0, 1, 2])


def test_partners_are_on_another_host_where_there_is_one() -> None:
    assert partners_on([0, 0, 1, 1]) == ((2,), (3,), (0,), (1,))
    assert all(mine % 2 != rank % 2 for rank, (mine,) in enumerate(partners_on([0, 1, 0, 1])))
    for rank, (mine,) in enumerate(partners_on([0, 0, 0, 1])):
        assert mine == 3 if rank < 3 else mine < 3
    assert partners_on([0, 0]) == ((1,), (0,))
    assert partners_on([0]) == ((),)


def _two_hosts(rank: int, path: str) -> None:
    os.environ["GROUP_RANK"] = str(rank // 2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    parts: list[Any] = [torch.full((5 << 20,), each, dtype=torch.uint8) for each in range(4)]
    copies = PeerCopies(rank, 4)
    copies.take((1, 4), parts[rank])
    assert copies.holds == sorted([[rank, 1, 4], [(rank + 2) % 4, 1, 4]])
    if rank < 2:  # all of host 0 is lost, and others come in its place
        copies = PeerCopies(rank, 4)
    said: list[Any] = [None] * 4
    torch.distributed.all_gather_object(said, copies.holds)
    found = newest_whole(said)
    assert found == ((1, 4), [2, 3, 2, 3])
    got = copies.restore(*found)
    assert torch.equal(got, torch.full_like(got, rank))
    copies.take((2, 4), got)
    assert len(copies.holds) == 2
    if rank == 1:
        got[-1] ^= 1
        assert copies.holds == [[3, 2, 4]]
    torch.distributed.all_gather_object(said, copies.holds)
    assert newest_whole(said) == ((2, 4), [0, 3, 2, 3])  # the damaged copy is not used, the partner's is
    torch.distributed.destroy_process_group()


def test_a_lost_host_s_parts_come_from_the_other_one_and_a_flipped_copy_is_not_used(tmp_path: Path) -> None:
    from torch.multiprocessing import spawn

    spawn(_two_hosts, (str(tmp_path / "meeting"),), nprocs=4)
