"""Each sample once an epoch: workers killed at random, jobs killed and resumed on other numbers of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.bench.recovery.job import WorkerProcess
from muster.bench.snapshots.forked import ForkedJob
from muster.training import checkpoint
from muster.training.part_files import whole_checkpoints
from tests.end_to_end.counting_job import EPOCHS, SAMPLES, SAVE_EVERY

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
LIMIT_S = 150.0
LAUNCHES = (3, 2, 4)
"""How many ranks each launch has; the last one is let go on to the end."""


class CountedJob(ForkedJob):
    """One launch; its workers' DataLoaders have a process each.

    Args:
        directory: for keys, logs and records; is made.
        kind: which state the job has.
        ranks: workers; one less is enough to go on.
        folder: the checkpoints of all launches.
    """

    def __init__(self, directory: Path, kind: str, ranks: int, folder: Path) -> None:
        directory.mkdir()
        self.pace = directory / "pace"
        self.pace.write_text("0.1")
        super().__init__(
            directory,
            "tests.end_to_end.counting_job",
            workers=ranks,
            worker_min=max(1, ranks - 1),
            command=[kind, str(folder)],
            env={
                "MUSTER_BENCH_PACE": str(self.pace),
                "MS_TOPO_TIMEOUT": "120",
                "MS_NODE_TIMEOUT": "20",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        self.start_scheduler()
        for _ in range(ranks):
            self.start()
        self.wait("all train", lambda: self.training(ranks), LIMIT_S)

    def start(self) -> None:
        self.start_worker(f"node-{len(self.workers)}")

    def newest(self) -> int:
        """The furthest step that one of the living has finished in the newest generation."""
        steps = [each for worker in self.living() for each in worker.steps()[-1:]]
        return max((each["generation"], each["step"]) for each in steps)[1] if steps else 0

    def go_on(self, chance: random.Random, least: int, most: int) -> None:
        """Waits for some steps, and then for a moment."""
        until = self.newest() + chance.randint(least, most)
        self.wait(f"step {until}", lambda: self.newest() >= until, LIMIT_S)

    def lose(self, victim: WorkerProcess) -> None:
        """Kills a worker, waits until the others have gone on without it, and starts another."""
        generation = max(worker.steps()[-1]["generation"] for worker in self.living())
        victim.kill()

        def all_newer(ranks: int) -> bool:
            return self.training(ranks) and all(
                worker.steps()[-1]["generation"] > generation for worker in self.living()
            )

        self.wait("the others train on", lambda: all_newer(self.size - 1), LIMIT_S)
        self.start()
        self.wait("the newcomer trains", lambda: self.training(self.size), LIMIT_S)

    def await_end(self) -> None:
        """Lets the job come to its end."""
        self.pace.unlink()
        self.wait("the end", lambda: not self.living(), 4 * LIMIT_S, may_end=True)

    def kill_all(self, chance: random.Random) -> None:
        """Kills workers and scheduler, as a power failure does."""
        for worker in chance.sample(self.living(), self.size):
            worker.kill()
        self.kill_scheduler()


def is_saved(kind: str, folder: Path) -> bool:
    """Whether there is a checkpoint of a step: it is written beside the training, and may be late."""
    if not folder.is_dir():
        return False
    if kind == "whole":
        return bool(checkpoint.find(folder))
    return any(int(name.rpartition(".")[2]) > 0 for name in whole_checkpoints(folder))


def redone(jobs: list[CountedJob]) -> int:
    """How many steps were done more than once, over all launches."""
    found: dict[int, set[tuple[int, int]]] = {}
    for number, job in enumerate(jobs):
        for worker in job.workers:
            for step in worker.steps():
                found.setdefault(step["step"], set()).add((number, step["generation"]))
    return sum(len(times) - 1 for times in found.values())


@pytest.mark.parametrize("kind", ["divided", "whole"])
def test_each_sample_counts_once_an_epoch_through_kills_and_resumes(kind: str, tmp_path: Path) -> None:
    """The counts are part of the state, so they are of the steps that count; all of them are 1 at the end."""
    chance = random.Random(f"{kind} 3")
    folder, jobs = tmp_path / "checkpoints", list[Any]()
    for number, ranks in enumerate(LAUNCHES):
        with CountedJob(tmp_path / f"launch-{number}", kind, ranks, folder) as job:
            jobs.append(job)
            begun_at = min(each["step"] for each in job.workers[0].events if each["what"] == "shared")
            assert (begun_at > 0) == (number > 0)
            job.go_on(chance, 1, 12)
            job.lose(chance.choice(job.living()))
            if number < len(LAUNCHES) - 1:
                job.go_on(chance, 3 * SAVE_EVERY, 4 * SAVE_EVERY)
                job.wait("a checkpoint is whole", lambda: is_saved(kind, folder), LIMIT_S)
                job.kill_all(chance)
                continue
            job.await_end()
            counts = [torch.load(path) for path in sorted(job.directory.glob("counts_*.pt"))]
    assert len(counts) == LAUNCHES[-1]
    for found in counts:
        assert found.shape == (EPOCHS, SAMPLES)
        assert torch.equal(found, torch.ones_like(found))
    assert redone(jobs) > 0
