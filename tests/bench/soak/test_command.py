"""The soak's judge: what is right is known before, and what is wrong does not pass."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from muster.bench.recovery.job import WorkerProcess
from muster.bench.soak.command import FloodsFirst, Results, WatchedProcess, is_flat
from muster.bench.soak.job import (
    BATCH,
    BLOCKS,
    SIZE,
    block_digests,
    blocks_of,
    digest_of,
    digest_of_blocks,
    elements_of,
    first_weights,
    mix,
    part,
    rows_of,
)
from muster.training.sampler import ShardedSampler


def worker(directory: Path) -> tuple[WorkerProcess, Path]:
    """A process that has ended, and the record that it leaves."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return WorkerProcess("a", process, directory / "record", directory / "log"), directory / "record"


def step(number: int, digest: str) -> str:
    facts = {"t": 1.0, "what": "step", "step": number, "generation": 1, "world": 3, "rank": 0}
    return json.dumps({**facts, "digest": digest}) + "\n"


def test_a_step_has_one_result_however_many_share_it() -> None:
    for world in (1, 2, 5, 6):
        weights = first_weights()
        samplers = [
            ShardedSampler(720, BATCH, rank=rank, world_size=world, shuffle=False) for rank in range(world)
        ]
        for number in range(12):
            parts = [part(number, each.batch().indices) for each in samplers]
            assert sorted(np.concatenate([each.batch().indices for each in samplers])) == list(
                rows_of(number)
            )
            mix(weights, sum(parts[1:], start=parts[0]))
            for each in samplers:
                each.advance()
        assert digest_of(weights) == Results().right(12)


def test_a_wrong_step_is_found_and_each_is_checked_once(tmp_path: Path) -> None:
    one, record = worker(tmp_path)
    results = Results()
    record.write_text(step(1, Results().right(1)) + step(2, Results().right(2)))
    results.take(one)
    results.take(one)
    assert (results.checked, results.wrong) == (2, [])
    with record.open("a") as file:
        file.write(step(2, Results().right(2)) + step(3, "other"))
    results.take(one)
    assert results.checked == 4
    assert [wrong["step"] for wrong in results.wrong] == [3]
    assert len(one.events) == 1


def test_where_the_weights_are_divided_each_rank_s_part_is_checked(tmp_path: Path) -> None:
    one, record = worker(tmp_path)
    weights, results = first_weights(), Results(divided=True)
    mix(weights, part(0, rows_of(0)))
    lines = []
    for rank in range(5):
        blocks = blocks_of(rank, 5)
        found = digest_of_blocks(block_digests(weights[elements_of(blocks)], blocks))
        lines.append(json.loads(step(1, found)) | {"rank": rank, "world": 5})
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results.take(one)
    assert (results.checked, results.wrong) == (5, [])
    with record.open("a") as file:  # another rank's part is not this one's
        file.write(json.dumps(lines[1] | {"rank": 2}) + "\n")
    results.take(one)
    assert [wrong["rank"] for wrong in results.wrong] == [2]
    with record.open("a") as file:  # and one wrong number in it is found
        weights[-1] += np.uint64(1)
        blocks = blocks_of(4, 5)
        found = digest_of_blocks(block_digests(weights[elements_of(blocks)], blocks))
        file.write(json.dumps(lines[4] | {"digest": found}) + "\n")
    results.take(one)
    assert [wrong["rank"] for wrong in results.wrong] == [2, 4]


@pytest.mark.parametrize("world_size", range(1, 7))
def test_blocks_of_all_ranks_are_the_whole(world_size: int) -> None:
    blocks = [each for rank in range(world_size) for each in blocks_of(rank, world_size)]
    assert blocks == list(range(BLOCKS))
    ends = [elements_of(blocks_of(rank, world_size)) for rank in range(world_size)]
    assert ends[0].start == 0 and ends[-1].stop == SIZE
    assert all(one.stop == other.start for one, other in itertools.pairwise(ends))


def test_a_generation_without_those_that_held_the_state_is_noted(tmp_path: Path) -> None:
    one, record = worker(tmp_path)
    results = Results()
    right = [results.right(number) for number in range(9)]

    def numbered(number: int, generation: int) -> str:
        return json.dumps({**json.loads(step(number, right[number])), "generation": generation}) + "\n"

    made = ((1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (2, 3), (3, 3))
    results = Results()
    record.write_text("".join(numbered(*each) for each in made))
    results.take(one)
    assert results.setbacks == [{"generation": 3, "from_step": 4, "to_step": 2}]
    assert results.wrong == []


def test_growth_shows_after_a_long_run() -> None:
    steady, growing, leaking = WatchedProcess(), WatchedProcess(), WatchedProcess()
    for number in range(400):
        steady.samples.append((100.0 + number % 7, 20))
        growing.samples.append((100.0 + number / 5, 20))
        leaking.samples.append((100.0, 20 + number // 4))
    assert is_flat(steady.summary())
    assert not is_flat(growing.summary())
    assert not is_flat(leaking.summary())
    assert is_flat(WatchedProcess().summary())


class FloodedJob:
    """Stands for a job that is flooded until somebody says that the flood is over."""

    def __init__(self) -> None:
        self.port, self.page, self.flooded = 6667, SimpleNamespace(port=8000), False
        self.ports: list[int] = []

    def flood(self, port: int, seconds: float) -> None:
        self.ports.append(port)
        self.flooded = True


def test_memory_is_judged_once_scheduler_and_page_have_been_flooded_one_flood_after_the_other() -> None:
    job, warm_up = FloodedJob(), FloodsFirst(2)
    for _ in range(2):
        assert not warm_up.over(job)  # type: ignore[arg-type]
        assert not warm_up.over(job)  # type: ignore[arg-type]  # it goes on, and no other begins beside it
        job.flooded = False
    assert warm_up.over(job)  # type: ignore[arg-type]
    assert job.ports == [6667, 8000] * 2
    assert FloodsFirst(0).over(FloodedJob())  # type: ignore[arg-type]
