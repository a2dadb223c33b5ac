"""A short slice of the simulator with drains at a time; its ``--drains`` plays more."""

from __future__ import annotations

import pytest

from tests.simulation.drain_mutants import DRAIN_MUTANTS
from tests.simulation.drains import DrainWorld, play_drains
from tests.simulation.mutants import hunt

pytestmark = pytest.mark.slow


def test_no_promise_is_broken() -> None:
    carried_out = cancelled = 0
    for seed in range(16):
        world = DrainWorld(seed)
        world.run()
        carried_out, cancelled = carried_out + world.judge.carried_out, cancelled + world.judge.cancelled
    assert carried_out > 16 and cancelled > 8, "little was put to the test"


def test_a_seed_decides_everything() -> None:
    one: list[str] = []
    other: list[str] = []
    play_drains(3, one)
    play_drains(3, other)
    assert one == other and len(one) > 50


@pytest.mark.system  # it tests the simulator and its judge, not the product
@pytest.mark.parametrize("name", DRAIN_MUTANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, told = hunt(DRAIN_MUTANTS[name], 200, play_drains)
    assert seed >= 0, "no checker saw it"
    assert told
    assert play_drains(seed) == "", "the seed is broken without the bug as well"
