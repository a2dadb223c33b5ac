"""Snapshots: a state comes back from the memory of ranks that are left, bit for bit, or not at all."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import muster
from muster.errors import SettingsError
from muster.torch import Snapshots
from muster.torch.snapshot_copies import OwnRoom, PartCopier
from muster.torch.snapshot_tensors import TensorMemo, whole_tensor
from muster.torch.transfer import CopiesAside
from muster.training.part_copy import PartCopy
from muster.training.snapshots.parts import PartKey
from tests.torch.snapshot_ranks import Job, Process, settle
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function

BATCHES = [batch_of(12, seed) for seed in range(30)]


class Worker:
    """A module and a ShardedOptimizer, created again in each generation as a new process would."""

    def __init__(self, session: Any, every: int = 2, **settings: Any) -> None:
        self.snapshots = Snapshots(session=session, every=every, **settings)

    def make(self, session: Any) -> dict[str, Any]:
        self.net = linear_net()
        self.optimizer = muster.ShardedOptimizer(
            self.net,
            communicator=session.communicator,
            make=lambda parts: torch.optim.AdamW(parts, lr=1e-2, weight_decay=0.1),
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer.inner, 0.9)
        self.sampler = muster.ShardedSampler(96, 12, seed=3)
        self.draws = torch.Generator().manual_seed(session.rank)
        self.counts = {"seen": 0, "mean": torch.zeros(())}
        return {
            "net": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "sampler": self.sampler,
            "draws": self.draws,
            "counts": self.counts,
        }

    def enter(self, session: Any) -> int | None:
        self.snapshots.use(session)
        return self.snapshots.restore(self.make(session))

    def train(self, session: Any, first: int, steps: int) -> None:
        rank, world = session.rank, session.communicator.world_size
        for step in range(first, first + steps):
            images, labels = BATCHES[step]
            self.optimizer.zero_grad()
            loss_function(self.net(images[rank::world]), labels[rank::world]).backward()
            self.optimizer.step()
            self.schedule.step()
            self.sampler.advance()
            self.counts["seen"] += len(images)
            self.counts["mean"] += torch.rand((), generator=torch.Generator().manual_seed(step))
            torch.rand(3, generator=self.draws)
            self.snapshots.step(step + 1)

    def values(self) -> dict[str, Any]:
        """All of this rank's state."""
        optimizer: Any = self.optimizer
        (state,) = optimizer.state.values()
        return copy.deepcopy(
            {
                "net": dict(self.net.state_dict()),
                "state": state,
                "rate": optimizer.param_groups[0]["lr"],
                "schedule": self.schedule.state_dict(),
                "sampler": self.sampler.state(),
                "draws": self.draws.get_state(),
                "counts": self.counts,
            }
        )


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def begin(job: Job, hosts: str, steps: int, **settings: Any) -> tuple[list[Process], list[Any]]:
    """Trains from the start, one rank on each of these hosts; the values at the last snapshot, by rank."""
    processes = [job.start(host) for host in hosts]

    def body(process: Process) -> Any:
        session = process.session
        process.worker = Worker(session, **settings)
        assert process.worker.enter(session) is None
        settle(process, 0)
        for step in range(0, steps, 2):
            process.worker.train(session, step, 2)
            settle(process, step + 2)
        values = process.worker.values()
        process.worker.train(session, steps, 1)  # which is lost
        return values

    return processes, job.form(processes, body)


def go_on(job: Job, processes: list[Process]) -> list[tuple[int | None, Any]]:
    """Forms the next generation; the step that each rank is at, and its values."""

    def body(process: Process) -> Any:
        if process.worker is None:
            process.worker = Worker(process.session)
        return process.worker.enter(process.session), process.worker.values()

    return job.form(processes, body)


def test_what_a_lost_host_held_comes_back_bit_for_bit(job: Job) -> None:
    (a, b, c, d), before = begin(job, "xxyy", 4)
    for lost in (c, d):
        lost.kill()
    found = go_on(job, [a, b, job.start("z"), job.start("z")])
    assert [step for step, _ in found] == [4] * 4
    assert all(same(values, then) for (_, values), then in zip(found, before, strict=True))


def test_it_goes_on_as_the_run_that_lost_nobody(job: Job) -> None:
    (a, b, c), _ = begin(job, "xyz", 4)
    whole = job.form([a, b, c], lambda process: (process.worker.enter(process.session), 0)[1])
    assert whole == [0, 0, 0]
    c.kill()

    def on(process: Process) -> Any:
        process.worker = process.worker or Worker(process.session)
        step = process.worker.enter(process.session)
        process.worker.train(process.session, step, 3)
        return process.worker.values()

    found = job.form([job.start("w"), b, a], on)  # in another order, too
    other = Job()
    try:
        begin(other, "xyz", 4)
        want = other.form(
            other.processes,
            lambda p: (p.worker.enter(p.session), p.worker.train(p.session, 4, 3), p.worker.values())[2],
        )
    finally:
        other.close()
    assert all(same(one, two) for one, two in zip(found, want, strict=True))


@pytest.mark.parametrize("hosts", ["z", "zzz"])
def test_another_number_of_ranks_goes_on_with_the_same_state(job: Job, hosts: str) -> None:
    (a, b, _), before = begin(job, "xyz", 4)
    found = go_on(job, [a, b, *(job.start(host) for host in hosts[1:])])
    assert {step for step, _ in found} == {4}
    for _, values in found:
        assert same(values["net"], before[0]["net"])
        assert values["sampler"] == before[0]["sampler"]
        assert values["rate"] == before[0]["rate"]
        assert same(values["counts"], before[0]["counts"])

    def moments(rows: list[Any]) -> Any:
        whole = torch.cat([row["state"]["exp_avg"] for row in rows])
        return whole[: sum(each.numel() + -each.numel() % 64 for each in before[0]["net"].values())]

    assert torch.equal(moments([values for _, values in found]), moments(before))


def test_the_next_partners_soon_have_the_copies_too(job: Job) -> None:
    """So that a second loss is survived, of those who came for the first."""
    (a, b, c), before = begin(job, "xyz", 4)
    c.kill()
    newcomer = job.start("w")

    def enter(process: Process) -> None:
        process.worker = process.worker or Worker(process.session)
        process.worker.enter(process.session)
        settle(process, 4)

    job.form([a, b, newcomer], enter)
    newcomer.kill()
    found = go_on(job, [a, b, job.start("v")])
    assert all(same(values, then) for (_, values), then in zip(found, before, strict=True))


def test_a_part_that_is_nowhere_is_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    (a, _, _), _ = begin(job, "xyz", 2)
    with caplog.at_level(logging.WARNING, "muster.worker"):
        found = go_on(job, [a, job.start("v"), job.start("w")])
    assert [step for step, _ in found] == [None] * 3
    assert "the parts of ranks" in caplog.text
    assert "step 2" in caplog.text


def flip(copy: PartCopy, other: PartCopy) -> None:
    copy.data[len(copy.data) // 2] ^= 4


def tear(copy: PartCopy, other: PartCopy) -> None:
    half = len(copy.data) // 2
    copy.data[half:] = other.data[half:]


def age(copy: PartCopy, other: PartCopy) -> None:
    copy.data[:] = other.data


@pytest.mark.parametrize("harm", [flip, tear, age])
def test_a_harmed_copy_is_noticed_and_not_used(job: Job, harm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of the lost rank's part there was one copy only: better nothing than something else."""
    older = Job()
    try:
        (p, _), _ = begin(older, "xy", 2)
        old = {each.key.rank: each for each in p.worker.snapshots.held.all()}[1]
        (a, b), _ = begin(job, "xy", 4)
        held = a.worker.snapshots.held
        (kept,) = [each for each in held.all() if each.key.rank == 1]
        harm(kept, old)
    finally:
        older.close()
    b.kill()
    with caplog.at_level(logging.ERROR, "muster.worker"):
        found = go_on(job, [a, job.start("z")])
    assert [step for step, _ in found] == [None, None]
    assert "damaged" in caplog.text


def test_what_changes_after_a_step_is_not_in_its_copy(job: Job) -> None:
    """The copy is complete when step() returns, or reads what the next step does not write."""

    def body(process: Process) -> Any:
        weights = torch.full((1 << 20,), 1.0)
        process.worker = worker = type("W", (), {})()
        worker.snapshots = Snapshots({"weights": weights}, process.session, every=1)
        worker.snapshots.restore()
        weights.fill_(7.0)
        settle(process, 0)
        held = worker.snapshots.held.all()
        return [bytes(each.data) == torch.full((1 << 19,), 1.0).numpy().tobytes() for each in held]

    processes = [job.start("x"), job.start("y")]
    assert job.form(processes, body) == [[True, True], [True, True]]


def test_partners_are_on_other_hosts_and_memory_is_told(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "muster.worker"):
        processes, _ = begin(job, "xxyy", 2)
    for process in processes:
        keys: list[PartKey] = [each.key for each in process.worker.snapshots.held.all()]
        own = job.processes.index(process)
        others = {key.rank for key in keys} - {own}
        assert len(others) == 1
        assert {processes[rank].host for rank in others}.isdisjoint({process.host})
        assert len(keys) <= 4
    assert "Snapshots take" in caplog.text
    assert "of host memory a rank" in caplog.text


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1, "copies": 0}, {"every": 1, "mbytes_per_s": -1}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Snapshots({}, **wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kept", [False, True])
def test_on_a_gpu_later_work_changes_nothing_of_a_copy_under_way(kept: bool) -> None:
    """Neither in the tensors themselves, nor in the copies that are made for the next step."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.full((1 << 22,), float(number), device=device) for number in range(8)]
    aside = CopiesAside(tensors)
    copier = PartCopier([whole_tensor(str(n), each, 0, 1) for n, each in enumerate(tensors)], device)
    room = OwnRoom(copier.size, pinned=True)
    for turn in range(5):
        want = [each[0].item() for each in tensors]
        aside.take()
        read = copier.take(room, aside.copy_of if kept else None)
        for each in tensors:
            each.add_(100.0)
        copier.wait_until_read(aside.copy_of)
        aside.take()
        read.wait()
        found = room.host[: copier.size].view(torch.float32).view(8, -1)
        assert [row.min().item() for row in found] == want, turn
        assert [row.max().item() for row in found] == want, turn


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kept", [False, True])
def test_a_copy_that_is_dropped_is_not_taken_for_a_whole_one(kept: bool) -> None:
    """Its memory and what it would have read are free at once; what was read whole stays so."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.full((1 << 24,), 1.0, device=device)]
    aside = CopiesAside(tensors)
    copier = PartCopier([whole_tensor("0", tensors[0], 0, 1)], device)
    first, second = OwnRoom(copier.size, pinned=True), OwnRoom(copier.size, pinned=True)
    source = aside.copy_of if kept else None
    whole = copier.take(first, source)
    whole.wait()
    dropped = copier.take(second, source)
    dropped.drop()
    copier.wait_until_read(aside.copy_of)
    second.host.fill_(7)
    torch.cuda.synchronize()
    assert second.host.min().item() == 7
    with pytest.raises(RuntimeError, match="dropped"):
        dropped.wait()
    whole.wait()
    assert first.host.view(torch.float32).min().item() == 1.0


def test_a_tensor_that_stays_is_described_once_and_one_that_moves_anew() -> None:
    memo, stays, moves = TensorMemo(), torch.ones(4), torch.ones(4)
    passes = []
    for rank, world_size in ((0, 2), (0, 2), (1, 2)):
        memo.begin(rank, world_size)
        passes.append([memo.whole("stays", stays), memo.whole("moves", moves)])
        moves.data = torch.zeros(3)
    assert passes[1][0] is passes[0][0]
    assert passes[1][1].shape == (3,)
    assert passes[1][1].own_flat().tolist() == [0.0]
    assert passes[2][0].own != passes[0][0].own, "another rank's piece"


def test_a_copy_kept_aside_is_found_by_the_memory_of_its_tensor() -> None:
    """Also of a view into a flat tensor, and in channels-last order; of nothing else."""
    flat, image = torch.arange(100.0), torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    aside = CopiesAside([flat, image])
    for tensor in (flat[10:60], image):
        view = whole_tensor("", tensor, 1, 3).own_flat()
        before = view.clone()
        view.add_(1.0)
        assert torch.equal(aside.copy_of(view), before)
    assert aside.copy_of(torch.zeros(3)) is None
