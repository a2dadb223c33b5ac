"""An ElasticLoop that drives torch's DataLoader, with processes that work ahead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, TensorDataset

from muster.torch.data_parallel import DataParallel
from muster.torch.state import TorchTrainingState
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler
from tests.fakes import ElasticFakeSession, ElasticWorld
from tests.gpu import loaders

SAMPLES = 22
VALUES = torch.arange(float(SAMPLES))


class DeathError(Exception):
    """Plays the death of a process."""


class Facts(Dataset):  # type: ignore[misc]
    """Each sample is its number, what the process that reads it draws, and the group that it is in."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return float(index), float(torch.rand(())), float(os.getpgid(0))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(5)
    yield
    torch.set_rng_state(before)


class Run:
    """One rank's training, with dropout's draws noted."""

    def __init__(self, session: ElasticFakeSession, data: Any = None, **loading: Any) -> None:
        model = DataParallel(torch.nn.Linear(1, 1), session, elastic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sampler = ShardedSampler(SAMPLES, 4, seed=3)
        self.state = TorchTrainingState(model, optimizer, sampler)
        self.model, self.optimizer, self.session = model, optimizer, session
        self.load: Any = DataLoader(data or Facts(), batch_sampler=sampler, **loading) if loading else None
        self.seen: list[Any] = []
        self.drawn: list[float] = []

    def train(self, epochs: int, steps: int = 0, dies_at: int = -1) -> Run:
        for step in ElasticLoop(self.session, self.state, epochs=epochs, steps=steps, load=self.load):
            with step:
                if self.state.step == dies_at:
                    self.session.world.kill(self.session)
                    raise DeathError
                rows = torch.from_numpy(step.batch.indices)
                if self.load is not None:
                    data: Any = step.data
                    assert data[0].tolist() == rows.tolist()
                self.optimizer.zero_grad()
                self.model(VALUES[rows, None]).square().mean().backward()
                self.optimizer.step()
            if step.done:
                self.drawn.append(float(torch.rand(())))
                self.seen.append(step.data)
        return self


def alone(**loading: Any) -> Run:
    world = ElasticWorld(1)
    return Run(world.members[0], **loading)


def test_processes_read_ahead_and_leave_torchs_generators_alone() -> None:
    run = alone(num_workers=2).train(epochs=2)
    torch.manual_seed(5)
    bare = alone().train(epochs=2)
    assert run.drawn == bare.drawn
    groups = {group for _, _, column in run.seen for group in column.tolist()}
    assert groups and os.getpgid(0) not in groups  # a launcher's signal to this one's group ends none
    draws = [draw for _, column, _ in run.seen for draw in column.tolist()]
    assert len(set(draws)) == len(draws)  # another epoch draws again


def test_the_same_run_draws_the_same_in_its_processes() -> None:
    first = alone(num_workers=2).train(epochs=1)
    torch.manual_seed(5)
    again = alone(num_workers=2).train(epochs=1)
    assert [draws.tolist() for _, draws, _ in first.seen] == [draws.tolist() for _, draws, _ in again.seen]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_goes_on_within_an_epoch_with_the_samples_that_are_left(persistent: bool) -> None:
    run = alone(num_workers=1, persistent_workers=persistent).train(epochs=3, steps=3)
    run.train(epochs=3, steps=8)
    run.train(epochs=3)
    numbers = [int(number) for column, *_ in run.seen for number in column.tolist()]
    assert [sorted(numbers[i : i + SAMPLES]) for i in range(0, 3 * SAMPLES, SAMPLES)] == [
        list(range(SAMPLES))
    ] * 3


def test_a_loader_of_ones_own_begins_and_generator_are_kept() -> None:
    begun = torch.zeros(1).share_memory_()

    def begin(number: int) -> None:
        begun.add_(1)

    generator = torch.Generator().manual_seed(1)
    run = alone(num_workers=1, worker_init_fn=begin, generator=generator).train(epochs=2)
    assert float(begun) == 2 and run.load.generator is generator


def test_each_sample_counts_once_when_a_member_dies() -> None:
    world = ElasticWorld(3, least=2)
    runs = [Run(session, TensorDataset(VALUES), num_workers=0) for session in list(world.members)]

    def train(run: Run) -> None:
        with contextlib.suppress(DeathError):
            run.train(2, dies_at=4 if run is runs[1] else -1)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, runs))
    survivors = [runs[0], runs[2]]
    assert all(len(run.seen) == 12 for run in survivors)
    for step in range(12):
        members = runs if step < 4 else survivors
        found = [int(number) for run in members for number in run.seen[step][0].tolist()]
        sampler = ShardedSampler(SAMPLES, 4, seed=3)
        for _ in range(step):
            sampler.advance()
        assert found == sampler.batch().indices.tolist()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [loaders.Row("fork", 2, True), loaders.Row("forkserver", 2, False)], ids=str)
def test_a_killed_worker_takes_its_loaders_processes_along(row: loaders.Row, tmp_path: Path) -> None:
    """None of them keeps what it has inherited, and none is left; tests/gpu/loaders.py tries them all."""
    found = loaders.launched(row, tmp_path)
    assert (found.exit_code, found.restarts, found.refused, found.orphans) == (0, 1, 0, 0), found.text
