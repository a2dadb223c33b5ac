"""Who goes on when ranks are missing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from muster.torch.replica_groups import active_ranks, replica_of, what_it_holds
from muster.torch.snapshot_tensors import ObjectParts


def test_ranks_go_on_whose_replica_is_whole() -> None:
    assert active_ranks([[0], None, [2], [3]]) == [0, 2, 3]
    assert active_ranks([[0, 1], [0, 1], [2, 3], None]) == [0, 1]
    assert active_ranks([[0, 1], None, None, [2, 3]]) == []


def test_a_model_that_does_not_say_how_it_is_divided_needs_all_ranks() -> None:
    assert replica_of({"net": torch.nn.Linear(2, 2)}) is None
    assert replica_of({"optimizer": 3}) is None


def test_replicas_hold_the_same_parts() -> None:
    def held(width: int) -> str:
        return what_it_holds(ObjectParts({"net": torch.nn.Linear(2, width)}).snapshot_tensors(0, 1))

    assert held(2) == held(2) != held(3)
