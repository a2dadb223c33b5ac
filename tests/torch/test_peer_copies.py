"""Which copy all ranks go back to: the latest of which each rank's part is held by somebody."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from muster.torch.peer_copies import newest_whole


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
