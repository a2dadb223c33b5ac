"""A divided model whose lost parts come from other ranks' memory, without a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import muster
from muster.parallel.elastic import ParallelTrainingState, StateLostError
from muster.torch import Snapshots
from muster.training.state import share_state
from tests.parallel.divided_job import BATCH, CLASSES, SAMPLES, SLOW_LINKS, WIDTH, data
from tests.torch.snapshot_ranks import Job, Process, settle

X, Y = data()
torch.manual_seed(7)
NET = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, CLASSES)).double()


class Worker:
    def __init__(self, session: Any) -> None:
        self.snapshots = Snapshots(every=2)
        ranks = session.communicator.world_size
        self.model = muster.parallelize(
            copy.deepcopy(NET),
            (X[: BATCH // ranks], Y[: BATCH // ranks]),
            loss=nn.CrossEntropyLoss(),
            communicator=session.communicator,
            mode="semi_auto",
            strategies={"0": {"n": ranks}, "2": {"k": ranks}},
            machine=SLOW_LINKS,
            elastic=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.state = ParallelTrainingState(
            self.model,
            self.optimizer,
            muster.ShardedSampler(SAMPLES, BATCH, seed=3),
            snapshots=self.snapshots,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state.begin()
            rows = torch.from_numpy(self.state.sampler.batch().indices.copy())
            self.optimizer.zero_grad()
            self.model(X[rows], Y[rows]).backward()
            self.optimizer.step()
            self.state.commit()
            self.state.sampler.advance()
            self.state.step += 1

    def values(self) -> list[Any]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [each.detach().clone() for each in (*self.model.parameters(), *states)]


def enter(process: Process, source: int, newcomers: tuple[int, ...]) -> Worker:
    session = process.session
    assert session is not None
    if process.worker is None:
        process.worker = Worker(session)
    session.state_source_rank, session.newcomer_ranks = source, newcomers
    share_state(session, process.worker.state)
    worker: Worker = process.worker
    return worker


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def begin(process: Process) -> list[Any]:
    """Trains five steps, the last of which no snapshot has; the values after four."""
    worker = enter(process, -1, ())
    settle_at(process, 0, worker)
    worker.train(2)
    settle_at(process, 2, worker)
    worker.train(2)
    settle_at(process, 4, worker)
    values = worker.values()
    worker.train(1)
    return values


def settle_at(process: Process, step: int, worker: Worker) -> None:
    """The snapshot of a step is taken as the next one begins."""
    worker.state.begin()
    worker.state.roll_back()
    settle(process, step)


def test_lost_parts_come_from_other_ranks_memory_bit_for_bit(job: Job) -> None:
    a, b = job.start("x"), job.start("y")
    before = job.form([a, b], begin)
    b.kill()
    c = job.start("z")
    found = job.form([a, c], lambda p: (enter(p, 0, (1,)).state.step, p.worker.values()))
    assert [step for step, _ in found] == [4, 4]
    for (_, values), then in zip(found, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(values, then, strict=True))


def test_where_both_copies_are_lost_it_says_so(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = job.start("x"), job.start("y"), job.start("z")
    job.form([a, b, c], begin)
    b.kill()
    c.kill()
    with caplog.at_level(logging.WARNING, "muster.worker"), pytest.raises(StateLostError, match="snapshots="):
        job.form([a, job.start("v"), job.start("w")], lambda p: enter(p, 0, (1, 2)).state.step)
    assert "nobody holds the parts" in caplog.text
