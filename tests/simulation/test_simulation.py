"""A short slice of the simulator; ``python -m tests.simulation`` plays as many seeds as one likes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.mutants import MUTANTS, hunt
from tests.simulation.scenario import KINDS
from tests.simulation.world import World, play

pytestmark = pytest.mark.slow

QUICKLY_CAUGHT = (
    "ranks by arrival",
    "two members with rank 0",
    "node id taken while the holder lives",
    "removals not recorded",
    "messages before records",
    "a scheduler without space gives up",
    "a write that failed is passed over",
    "of several decisions one is written",
    "no grace after a restart",
    "assignment not told again",
    "ids go to everybody",
    "generation number reused",
    "state from the youngest",
    "a leave does not wait for the hand-over",
    "who left long ago breaks a step",
    "who has stopped hands nothing over",
    "long waits count beside their steps",
    "worker_min ignored",
    "job always ends well",
    "lost streams ignored",
    "a pause costs the place",
    "the end of a host's stream costs the places",
    "deltas for who does not hold the base",
    "unread words count as silence",
    "silence ignored",
    "a time without a journal makes it patient for good",
    "suspicions ignored",
    "a message after the last one",
    "every goodbye counts as finished",
    "a leave told as the job's end",
    "a broken collective is nobody's but its own",
    "hanging collectives are not aborted",
    "the end of a generation is not seen",
    "cuts ignored",
    "broken pairs are not remembered",
    "of a pair the accuser goes",
    "who was broken with one at fault is suspected",
    "who is suspected goes, or nobody",
    "sides of a cut are compared as wholes",
    "the side of the lowest rank stays",
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


@pytest.mark.parametrize("seed", [1104002500, 1106003547])
def test_no_word_is_forged_for_a_twin_that_looks_for_the_scheduler(seed: int) -> None:
    assert play(seed) == ""


@pytest.mark.parametrize("seed", [1109000432, 1109005488])
def test_a_time_without_a_journal_is_nobodys_silence_even_long_after(seed: int) -> None:
    assert play(seed) == ""


def test_a_seed_decides_everything() -> None:
    one: list[str] = []
    other: list[str] = []
    play(42, one)
    play(42, other)
    assert one == other
    assert len(one) > 50


FAULTS = {
    *("kill", "stop", "freeze", "flood", "pause", "cut", "blip", "drain", "request_leave", "twin", "extra"),
    *("scheduler", "cut_pair", "flap", "hang", "full_disk", "broken_disk", "failing_write"),
    *("uplink_dies", "uplink_stands_still", "lying_member", "flapping_port", "cut_into_halves"),
}


def test_a_few_hundred_seeds_play_every_kind_of_scenario_and_all_faults() -> None:
    kinds: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(600):
        trace: list[str] = []
        kinds[World(seed).scenario.kind] += 1
        play(seed, trace)
        faults.update(line.split("!! ")[1].split()[0] for line in trace if "!! " in line)
        if set(KINDS) <= set(kinds) and set(faults) >= FAULTS:
            return
    raise AssertionError(f"never seen: {(set(KINDS) - set(kinds)) | (FAULTS - set(faults))}")


@pytest.mark.system  # it tests the simulator and its judge, not the product
@pytest.mark.parametrize("name", QUICKLY_CAUGHT)
def test_a_planted_bug_is_caught(name: str) -> None:
    seed, told = hunt(MUTANTS[name], 600)
    assert seed >= 0, "no checker saw it"
    assert told
    assert play(seed) == "", "the seed is broken without the bug as well"
