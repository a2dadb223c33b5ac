"""A short slice of the simulator; ``python -m tests.simulation`` plays as many seeds as one likes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.mutants import MUTANTS, hunt
from tests.simulation.scenario import KINDS
from tests.simulation.world import World, play

QUICKLY_CAUGHT = (
    "ranks by arrival",
    "two members with rank 0",
    "node id taken while the holder lives",
    "removals not recorded",
    "messages before records",
    "no grace after a restart",
    "assignment not told again",
    "ids go to everybody",
    "generation number reused",
    "state from the youngest",
    "leavers take the state with them",
    "a leave does not wait for the hand-over",
    "worker_min ignored",
    "job always ends well",
    "lost streams ignored",
    "its own absence unnoticed",
    "a pause costs the place",
    "unread words count as silence",
    "late turns count as silence",
    "silence ignored",
    "suspicions ignored",
    "a message after the last one",
    "every goodbye counts as finished",
    "a leave told as the job's end",
    "cuts ignored",
    "worker_min does not hold expulsions back",
    "expelled and taken in at once",
    "hanging ranks go at once",
    "lateness untold",
    "none saves at a suspension",
    "rank off by one on the wire",
    "worker comes back as another",
)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_promise_is_broken(first: int) -> None:
    broken = {seed: told for seed in range(first, first + 50) if (told := play(seed))}
    assert not broken


def test_a_seed_decides_everything() -> None:
    one: list[str] = []
    other: list[str] = []
    play(42, one)
    play(42, other)
    assert one == other
    assert len(one) > 50


def test_the_slice_plays_every_kind_of_scenario_and_many_faults() -> None:
    kinds: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(120):
        trace: list[str] = []
        kinds[World(seed).scenario.kind] += 1
        play(seed, trace)
        faults.update(line.split("!! ")[1].split()[0] for line in trace if "!! " in line)
    assert set(kinds) == set(KINDS)
    assert {
        "kill",
        "stop",
        "freeze",
        "flood",
        "pause",
        "cut",
        "blip",
        "drain",
        "request_leave",
        "twin",
        "extra",
        "scheduler",
        "cut_pair",
        "flap",
        "hang",
    } <= set(faults)


@pytest.mark.parametrize("name", QUICKLY_CAUGHT)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, told = hunt(name, 600)
    assert seed >= 0, "no checker saw it"
    assert told
    assert play(seed) == "", "the seed is broken without the bug as well"


def test_there_are_many_planted_bugs() -> None:
    assert len(MUTANTS) >= 15
