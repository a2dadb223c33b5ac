"""Training states with snapshots: a replicated one that nobody has any more, and one of objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import muster
from muster.errors import SettingsError
from muster.torch import DataParallel, Snapshots, SnapshotTrainingState, TorchTrainingState
from muster.training.state import StateLostError, share_state
from tests.torch.snapshot_ranks import Job, Process, settle
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function

BATCHES = [batch_of(12, seed) for seed in range(9)]


class Replicated:
    """A TorchTrainingState."""

    def __init__(self, session: Any) -> None:
        self.snapshots = Snapshots(every=2)
        self.net = linear_net()
        model = DataParallel(self.net, communicator=session.communicator, elastic=True)
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = muster.ShardedSampler(96, 12, seed=3)
        self.state: Any = TorchTrainingState(model, self.optimizer, sampler, snapshots=self.snapshots)


class Objects:
    """A SnapshotTrainingState of a ShardedOptimizer; ``more`` goes to the state."""

    def __init__(self, session: Any, **more: Any) -> None:
        self.snapshots = Snapshots(every=2)
        self.net = self.model = linear_net()
        self.optimizer: Any = muster.ShardedOptimizer(
            self.net,
            communicator=session.communicator,
            make=lambda parts: torch.optim.AdamW(parts, lr=1e-2),
            elastic=True,
        )
        objects = {"net": self.net, "optimizer": self.optimizer}
        self.state: Any = SnapshotTrainingState(
            objects, muster.ShardedSampler(96, 12, seed=3), snapshots=self.snapshots, **more
        )


def train(worker: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        worker.state.begin()
        images, labels = BATCHES[worker.state.step]
        worker.optimizer.zero_grad()
        loss_function(worker.model(images[rank::2]), labels[rank::2]).backward()
        worker.optimizer.step()
        worker.state.commit()
        worker.state.sampler.advance()
        worker.state.step += 1


def values(worker: Any) -> list[Any]:
    states = [value for state in worker.optimizer.state.values() for value in state.values()]
    return [each.detach().clone() for each in (*worker.net.state_dict().values(), *states)]


def settle_at(process: Process, step: int) -> None:
    """The snapshot is taken as the next step begins, and goes out when the one before is confirmed."""
    process.worker.state.begin()
    process.worker.snapshots.confirm()
    process.worker.state.roll_back()
    settle(process, step)


def begin(make: Any) -> Any:
    def body(process: Process) -> list[Any]:
        session: Any = process.session
        process.worker = make(session)
        share_state(session, process.worker.state)
        settle_at(process, 0)
        train(process.worker, session.rank, 2)
        settle_at(process, 2)
        kept = values(process.worker)
        train(process.worker, session.rank, 1)
        return kept

    return body


def equal(found: list[Any], want: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_a_replicated_state_that_no_member_has_comes_from_memory(job: Job) -> None:
    """Newcomers may hold its pieces, and not yet the state: with them it is back before any file is read."""
    processes = [job.start("x"), job.start("y")]
    before = job.form(processes, begin(Replicated))

    def recover(process: Process) -> list[Any]:
        worker = process.worker
        with torch.no_grad():
            for parameter in worker.net.parameters():
                parameter.fill_(float("nan"))
        worker.state.step = 77
        assert worker.state.recover(process.session)
        assert worker.state.step == 2
        assert worker.state.sampler.position == 24
        return values(worker)

    found = job.form(processes, recover)
    assert all(equal(one, other) for one, other in zip(found, before, strict=True))


def test_without_snapshots_nothing_is_recovered_so() -> None:
    net = DataParallel(linear_net(), communicator=_alone(), elastic=True)
    state = TorchTrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1), muster.ShardedSampler(96, 12))
    assert not state.recover(None)  # type: ignore[arg-type]


def _alone() -> Any:
    from tests.gpu.threads import run_ranks

    return run_ranks(1, lambda communicator: communicator)[0]


def test_objects_are_divided_again_and_go_back_to_the_snapshot(job: Job) -> None:
    """A newcomer makes its optimizer while the others are still going back, without a word to them."""
    a, b = job.start("x"), job.start("y")
    before = job.form([a, b], begin(Objects))
    b.kill()

    def on(process: Process) -> list[Any]:
        process.worker = process.worker or Objects(process.session)
        share_state(process.session, process.worker.state)  # type: ignore[arg-type]
        assert process.worker.state.step == 2
        return values(process.worker)

    found = job.form([job.start("z"), a], on)
    assert all(equal(one, other) for one, other in zip(found, before, strict=True))


def test_objects_that_are_nowhere_come_from_the_last_checkpoint_or_the_job_ends(job: Job) -> None:
    a, b, c = (job.start(host) for host in "xyz")

    def short(process: Process) -> None:
        process.worker = Objects(process.session)
        share_state(process.session, process.worker.state)  # type: ignore[arg-type]
        process.worker.state.step = 5

    job.form([a, b, c], short)
    b.kill()
    c.kill()

    def on(process: Process) -> None:
        process.worker = process.worker or Objects(process.session)
        share_state(process.session, process.worker.state)  # type: ignore[arg-type]

    with pytest.raises(StateLostError, match="take_up"):
        job.form([a, job.start("v"), job.start("w")], on)


def test_what_is_whole_on_each_rank_is_refused_where_parts_are_meant() -> None:
    model = DataParallel(linear_net(), communicator=_alone())
    with pytest.raises(SettingsError, match="TorchTrainingState"):
        SnapshotTrainingState({"net": model}, muster.ShardedSampler(96, 12), snapshots=Snapshots(every=1))
    with pytest.raises(SettingsError, match="without a state"):
        SnapshotTrainingState(
            {}, muster.ShardedSampler(96, 12), snapshots=Snapshots({"a": torch.zeros(2)}, every=1)
        )
