"""A short slice of the simulator with snapshots in peers' memory; its ``--snapshots`` plays more."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import hunt
from tests.simulation.snapshot_mutants import SNAPSHOT_MUTANTS
from tests.simulation.snapshots import SnapshotWorld, play_snapshots

pytestmark = pytest.mark.slow


def test_no_promise_is_broken() -> None:
    restored = counted = 0
    for seed in range(16):
        world = SnapshotWorld(seed)
        world.run()
        restored, counted = restored + world.watch.restored, counted + world.watch.counted
    assert restored > 10 and counted > 100, "little was put to the test"


def test_a_seed_decides_everything() -> None:
    one: list[str] = []
    other: list[str] = []
    play_snapshots(3, one)
    play_snapshots(3, other)
    assert one == other and len(one) > 50


@pytest.mark.system  # it tests the simulator and its judge, not the product
@pytest.mark.parametrize("name", SNAPSHOT_MUTANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, told = hunt(SNAPSHOT_MUTANTS[name], 100, play_snapshots)
    assert seed >= 0, "no checker saw it"
    assert told
    assert play_snapshots(seed) == "", "the seed is broken without the bug as well"
