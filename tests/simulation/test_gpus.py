"""A short slice of the simulator with GPUs that break; its ``--gpus`` plays more."""

from __future__ import annotations

import pytest

from tests.simulation.gpu_mutants import GPU_MUTANTS
from tests.simulation.gpus import GpuWorld, play_gpus
from tests.simulation.mutants import hunt

pytestmark = pytest.mark.slow


def test_no_promise_is_broken() -> None:
    refusals = admissions = inside = 0
    for seed in range(16):
        world = GpuWorld(seed)
        world.run()
        refusals, admissions = refusals + world.judge.refusals, admissions + world.judge.admissions
        inside += sum(worker.ended_by == "its GPU failed" for worker in world.processes)
    assert refusals > 8 and admissions > 8 and inside > 1, "little was put to the test"


def test_a_seed_decides_everything() -> None:
    one: list[str] = []
    other: list[str] = []
    play_gpus(3, one)
    play_gpus(3, other)
    assert one == other and len(one) > 50


@pytest.mark.system  # it tests the simulator and its judge, not the product
@pytest.mark.parametrize("name", GPU_MUTANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, told = hunt(GPU_MUTANTS[name], 200, play_gpus)
    assert seed >= 0, "no checker saw it"
    assert told
    assert play_gpus(seed) == "", "the seed is broken without the bug as well"
