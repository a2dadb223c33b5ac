"""A short slice of the simulator with several schedulers; its ``--schedulers`` plays more."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.cluster import FAULTS, FULL, play_cluster
from tests.simulation.cluster_mutants import CLUSTER_MUTANTS
from tests.simulation.launchers import SAID
from tests.simulation.mutants import hunt

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    log = logging.getLogger("scheduler")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_no_promise_is_broken(first: int) -> None:
    broken = {seed: told for seed in range(first, first + 40) if (told := play_cluster(seed))}
    assert not broken


def test_all_faults_and_takeovers_are_played() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        trace: list[str] = []
        play_cluster(seed, trace)
        lines = [line.split("!! ")[1] for line in trace if "!! " in line]
        seen.update(fault for fault in set(FAULTS) for line in lines if line.startswith(f"{fault} scheduler"))
        seen[FULL] += any(line.startswith(FULL) for line in lines)
        seen["takeovers"] += max(0, sum(line.endswith(" leads") for line in lines) - 1)
        seen["forged words"] += any("a forger says" in line for line in lines)
        seen["a launcher's word that counted"] += any(SAID in line for line in trace)
    assert {FULL, *FAULTS, "forged words", "a launcher's word that counted"} <= set(+seen)
    assert seen["takeovers"] >= 20


@pytest.mark.system  # it tests the simulator and its judge, not the product
@pytest.mark.parametrize("name", CLUSTER_MUTANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, told = hunt(CLUSTER_MUTANTS[name], 100, play_cluster)
    assert seed >= 0, "no checker saw it"
    assert told
    assert play_cluster(seed) == "", "the seed is broken without the bug as well"
