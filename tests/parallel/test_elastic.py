"""A divided model through changes of members: the losses are those of one process on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import muster
import muster.torch
from muster.errors import MembershipChanged, SettingsError
from muster.parallel import elastic
from muster.parallel.elastic import ParallelTrainingState, StateLostError
from muster.parallel.planning.costs import Hardware
from muster.training.sampler import ShardedSampler
from muster.training.state import StateMismatchError, share_state
from tests.parallel.divided_job import BATCH, CLASSES, SAMPLES, SLOW_LINKS, WIDTH, data, one_process
from tests.parallel.oracle import close
from tests.parallel.ranks import RankCommunicator, run_ranks


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.LayerNorm(4 * WIDTH)
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))


torch.manual_seed(7)
NET = Net().double()  # made once: ranks are threads, and torch's generator is one


X, Y = data()


class Worker:
    """One worker with its state, which outlives communicators."""

    def __init__(self, whole: nn.Module, communicator: RankCommunicator, **settings: Any) -> None:
        rows = BATCH // communicator.world_size
        self.model = muster.parallelize(
            copy.deepcopy(whole),
            (X[:rows], Y[:rows]),
            loss=nn.CrossEntropyLoss(),
            communicator=communicator,
            elastic=True,
            seed=5,
            **{"machine": SLOW_LINKS}
            | {name: value for name, value in settings.items() if name != "checkpoint"},
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, eps=1e-3)
        self.state = ParallelTrainingState(
            self.model,
            self.optimizer,
            ShardedSampler(SAMPLES, BATCH, seed=3),
            checkpoint=settings.get("checkpoint", ""),
        )
        self.losses: dict[int, float] = {}

    def share(self, communicator: RankCommunicator, source: int, newcomers: tuple[int, ...]) -> None:
        share_state(
            SimpleNamespace(communicator=communicator, state_source_rank=source, newcomer_ranks=newcomers),
            self.state,
        )

    def train(self, steps: int, *, saved: int = -1, break_off: bool = False) -> None:
        for _ in range(steps):
            self.state.begin()
            if self.state.step == saved:
                self.state.save()
            rows = torch.from_numpy(self.state.sampler.batch().indices.copy())
            self.optimizer.zero_grad()
            loss = self.model(X[rows], Y[rows])
            loss.backward()
            self.optimizer.step()
            if break_off:
                return  # in mid-step, its update half done
            self.state.commit()
            self.state.sampler.advance()
            self.state.step += 1
            self.losses[self.state.step] = loss.item()


def generation(
    workers: Sequence[Worker | None],
    steps: int,
    *,
    source: int = 0,
    saved: int = -1,
    broken: tuple[int, ...] = (),
    net: nn.Module = NET,
    **settings: Any,
) -> list[Worker]:
    """Brings workers together (None: a newcomer), and trains; those in ``broken`` do not finish one more."""

    def run(communicator: RankCommunicator) -> Worker:
        worker = workers[communicator.rank] or Worker(net, communicator, **settings)
        newcomers = tuple(rank for rank, each in enumerate(workers) if each is None)
        worker.share(communicator, source, newcomers if source >= 0 else ())
        worker.train(steps, saved=saved)
        if broken:
            worker.train(1, break_off=communicator.rank in broken)
        return worker

    return run_ranks(len(workers), run)


def losses_are(workers: list[Worker], want: list[float]) -> None:
    for worker in workers:
        for step, loss in worker.losses.items():
            close(f"loss of step {step}", torch.tensor(loss), torch.tensor(want[step - 1]), 1e-10)


def test_one_rank_that_is_left_goes_on_alone() -> None:
    """What was summed over ranks, such as BatchNorm's statistics, is then its own."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    (alone,) = generation(generation([None] * 2, 2, source=-1, net=net)[:1], 2)
    assert alone.model.communicator.world_size == 1
    losses_are([alone], one_process(4, copy.deepcopy(net)))


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
def test_a_mesh_may_have_a_dimension_of_one_rank(mesh: tuple[int, int]) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    for machine in (SLOW_LINKS, SLOW_MEMORY):
        workers = generation([None] * 2, 3, source=-1, net=net, mesh=mesh, machine=machine)
        losses_are(workers, one_process(3, copy.deepcopy(net)))


class Scaled(nn.Module):
    """Has a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x) * self.scale))


def test_a_parameter_that_is_a_number_goes_from_plan_to_plan() -> None:
    net = Scaled().double()
    want = one_process(6, copy.deepcopy(net))
    workers: list[Worker] = []
    for world in (1, 2, 3):
        source = 0 if workers else -1
        workers = generation([*workers, None], 2, source=source, net=net, machine=SLOW_MEMORY)
        assert any(state.sharded for state in workers[0].model.plan.states) == (world > 1)
        losses_are(workers, want)


def test_what_the_others_have_frozen_is_frozen_for_a_newcomer_too(tmp_path: Path) -> None:
    """And in what comes from a checkpoint; what a broken step froze is not."""

    def freeze(workers: list[Worker]) -> None:
        for worker in workers:
            for parameter in worker.model.up.parameters():
                parameter.requires_grad_(False)

    settings: dict[str, Any] = {"shard_updates": False, "checkpoint": tmp_path / "last"}
    workers = generation([None] * 2, 2, source=-1, **settings)
    workers[0].state.begin()
    freeze(workers)
    workers[0].state.roll_back()
    assert workers[0].model.up.weight.requires_grad
    freeze(workers)
    before = workers[0].model.up.weight.detach().clone()
    workers = generation([*workers, None], 2, saved=2, **settings)
    assert [worker.model.up.weight.requires_grad for worker in workers] == [False] * 3
    assert all(torch.equal(worker.model.up.weight, before) for worker in workers)
    resumed = generation([None] * 2, 1, source=-1, **settings)
    assert [worker.state.step for worker in resumed] == [3, 3]
    assert all(torch.equal(worker.model.up.weight, before) for worker in resumed)


class Partly(nn.Module):
    """Some of it is not trained, or not used at all. All its values are one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(3, 2)
        self.unused.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("count", torch.ones(2))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.fill_(value)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.frozen(self.up(x) * self.scale)))


def test_what_is_not_trained_comes_from_who_holds_it_too() -> None:
    """Each worker begins with values of its own, and has those of rank 0, or of a survivor."""

    def values(workers: list[Worker | None], numbers: list[float], source: int) -> list[Worker]:
        def run(communicator: RankCommunicator) -> Worker:
            rank = communicator.rank
            worker = workers[rank] or Worker(Partly(numbers[rank]).double(), communicator)
            new = tuple(other for other, each in enumerate(workers) if each is None)
            worker.share(communicator, source, new if source >= 0 else ())
            return worker

        return run_ranks(len(workers), run)

    first = values([None, None], [0.5, 2.0], -1)
    grown = values([None, first[1], None], [3.0, 2.0, 4.0], 1)
    for worker in [*first, *grown]:
        whole = [*worker.model.named_parameters(), *worker.model.named_buffers()]
        assert {name for name, tensor in whole if not bool((tensor == 0.5).all())} == set()
        assert len(whole) == 11


SPLIT = {"up": {"n": 2}, "down": {"k": 2}}
"""Each half of the hidden layer is on half of the ranks, in copies."""


@pytest.mark.parametrize("worlds", [(4, 3, 4), (8, 6, 8)])
@pytest.mark.parametrize(
    "ways", [{"shard_updates": False}, {"shard_updates": True}, {"shard_parameters": "always"}]
)
def test_losses_are_those_of_one_process_through_changes(
    worlds: tuple[int, int, int], ways: dict[str, Any], tmp_path: Path
) -> None:
    """A rank dies in mid-step, the others go on; where parts died with it, from the checkpoint."""
    first, second, third = worlds
    want = one_process(9, copy.deepcopy(NET))
    settings: dict[str, Any] = {**ways, "checkpoint": tmp_path / "last"}
    workers = generation([None] * first, 3, source=-1, saved=3, broken=(0, 2), **settings)
    plan = workers[0].model.plan
    survives = "goes on from there" in workers[0].state.survival(range(second, first))
    assert survives != any(state.sharded for state in plan.states) or plan.is_data_parallel
    workers = generation(list(workers[:second]), 2, broken=(1,), **settings)
    assert [worker.state.step for worker in workers] == [6 if rank != 1 else 5 for rank in range(second)]
    workers = generation([*workers, *[None] * (third - second)], 3, **settings)
    assert [worker.state.step for worker in workers] == [8] * third
    losses_are(workers, want)


def test_parts_that_nobody_else_holds_come_from_the_checkpoint_or_end_the_job(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "semi_auto", "strategies": SPLIT, "shard_updates": False}
    with_checkpoint = settings | {"checkpoint": tmp_path / "last"}
    workers = generation([None] * 2, 3, source=-1, saved=2, **with_checkpoint)
    assert "goes on from" in workers[0].state.survival([1])
    assert str(tmp_path) in workers[0].state.survival([1])
    alone = generation([workers[0], None], 3, **with_checkpoint)
    assert [worker.state.step for worker in alone] == [5, 5]  # from step 2 on
    losses_are(alone, one_process(6, copy.deepcopy(NET)))

    workers = generation([None] * 2, 3, source=-1, **settings)
    assert "training would end" in workers[0].state.survival([1])
    with pytest.raises(StateLostError, match="no checkpoint"):
        generation([workers[0], None], 1, **settings)


def test_each_half_survives_on_its_other_holder() -> None:
    settings: dict[str, Any] = {
        "mode": "semi_auto",
        "strategies": SPLIT,
        "shard_updates": False,
        "mesh": (2, 2),
    }
    workers = generation([None] * 4, 3, source=-1, broken=(3,), **settings)
    assert not workers[0].model.plan.is_data_parallel
    for rank in range(4):
        assert "goes on from there" in workers[0].state.survival([rank])
    again = generation([workers[0], workers[1], workers[2], None], 3, **settings)
    assert [worker.state.step for worker in again] == [7] * 4  # a step that the others finished counts
    losses_are(again, one_process(7, copy.deepcopy(NET)))


def test_schedulers_are_part_of_the_state(tmp_path: Path) -> None:
    """A newcomer's goes on where the others' are, a broken step's is undone; modules are refused."""
    made: dict[int, Any] = {}

    def with_rates(worker: Worker) -> Worker:
        rates = torch.optim.lr_scheduler.StepLR(worker.optimizer, 2, 0.5)
        sampler = ShardedSampler(SAMPLES, BATCH, seed=3)
        worker.state = ParallelTrainingState(
            worker.model, worker.optimizer, sampler, also={"rates": rates}, checkpoint=tmp_path / "last"
        )
        made[id(worker)] = rates
        return worker

    def follow(worker: Worker, steps: int) -> None:
        for _ in range(steps):
            worker.train(1)
            made[id(worker)].step()

    def first(communicator: RankCommunicator) -> Worker:
        worker = with_rates(Worker(NET, communicator))
        worker.share(communicator, -1, ())
        follow(worker, 3)
        worker.state.begin()  # a step that breaks after its rates have changed
        made[id(worker)].step()
        return worker

    workers = run_ranks(2, first)

    def second(communicator: RankCommunicator) -> tuple[int, float]:
        new = communicator.rank == 2
        worker = with_rates(Worker(NET, communicator)) if new else workers[communicator.rank]
        worker.share(communicator, 0, (2,))
        follow(worker, 1)
        rates = made[id(worker)]
        return rates.last_epoch, rates.get_last_lr()[0]

    assert run_ranks(3, second) == [(4, 0.0025)] * 3
    worker = workers[0]
    with pytest.raises(SettingsError, match="average is a Linear, and the plan does not shard its tensors"):
        fresh = run_ranks(1, lambda communicator: Worker(NET, communicator))[0]
        ParallelTrainingState(
            fresh.model, fresh.optimizer, worker.state.sampler, also={"average": nn.Linear(2, 2)}
        )


def test_a_state_of_the_other_kind_is_refused() -> None:
    def one(communicator: RankCommunicator) -> None:
        model = muster.parallelize(copy.deepcopy(NET), (X[:4],), communicator=communicator)
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = ShardedSampler(SAMPLES, BATCH)
        with pytest.raises(SettingsError, match=r"needs a model of parallelize\(elastic=True\)"):
            ParallelTrainingState(model, optimizer, sampler)
        with pytest.raises(SettingsError, match="not a ParallelModule"):
            muster.torch.TorchTrainingState(model, optimizer, sampler)

    run_ranks(1, one)


def test_ranks_that_hold_parts_by_different_plans_come_together() -> None:
    """A change of members met two of them after a redistribution, and two before."""
    four = generation([None] * 4, 3, source=-1, machine=SLOW_MEMORY)
    assert any(state.sharded for state in four[0].model.plan.states)
    two = generation([None] * 2, 3, source=-1, machine=SLOW_MEMORY)  # at the same state, in two parts
    again = generation([four[2], four[3], *two], 3)
    assert [worker.state.step for worker in again] == [6] * 4
    losses_are(again, one_process(6, copy.deepcopy(NET)))


def test_what_was_being_read_from_a_checkpoint_is_nobodys_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members change again during the reading: those that read hold zeros, which go to nobody."""
    settings: dict[str, Any] = {"machine": SLOW_MEMORY, "checkpoint": tmp_path / "last"}
    workers = generation([None] * 4, 3, source=-1, saved=2, **settings)
    with monkeypatch.context() as broken:
        broken.setattr(elastic, "load_divided", _broken_off)
        with pytest.raises(MembershipChanged):
            generation([workers[0], workers[1]], 1, **settings)
    again = generation([workers[0], workers[1]], 3, **settings)
    assert [worker.state.step for worker in again] == [5, 5]
    for worker in again:
        worker.losses = {step: loss for step, loss in worker.losses.items() if step > 2}
    losses_are(again, one_process(6, copy.deepcopy(NET)))


def _broken_off(*_: Any) -> Any:
    raise MembershipChanged("again", generation=2)


def test_a_rank_with_another_model_is_refused() -> None:
    def run(communicator: RankCommunicator) -> str:
        other = copy.deepcopy(NET)
        if communicator.rank == 1:
            other.down = nn.Linear(4 * WIDTH, CLASSES, bias=False).double()
        worker = Worker(other, communicator)
        with pytest.raises(StateMismatchError) as refused:
            worker.share(communicator, -1, ())
        return str(refused.value)

    assert all("another than rank 0's" in text for text in run_ranks(2, run))


def test_a_batch_that_does_not_divide_is_refused_in_words() -> None:
    model = generation([None] * 4, 1, source=-1)[0].model

    def run(communicator: RankCommunicator) -> None:
        with pytest.raises(SettingsError, match="5"):
            model.plan_for(communicator)

    run_ranks(5, run)


SLOW_MEMORY = Hardware(
    "slow memory", flops_per_s=1e15, memory_bytes_per_s=1e5, bus_bytes_per_s=1e12, latency_s=1e-9, launch_s=0
)
"""Where updates take long the search divides them."""


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b"), ("a", "a", "a", "a")])
def test_what_must_survive_is_on_two_hosts(hosts: tuple[str, ...]) -> None:
    """Of each host, or of each rank where there is one host only, everything is somewhere else, too."""

    def run(communicator: RankCommunicator) -> list[str]:
        peers = tuple(replace(peer, host_id=hosts[peer.rank]) for peer in communicator.membership.peers)
        communicator.membership = replace(communicator.membership, peers=peers)
        worker = Worker(NET, communicator, survive=1, machine=SLOW_MEMORY)
        worker.share(communicator, -1, ())
        worker.train(1)
        gone = (
            [[r for r in range(4) if hosts[r] == h] for h in "ab"]
            if "b" in hosts
            else [[r] for r in range(4)]
        )
        return [worker.state.survival(ranks) for ranks in gone]

    for sentences in run_ranks(4, run):
        assert all("goes on from there" in text for text in sentences), sentences
    plain = generation([None] * 4, 1, source=-1, machine=SLOW_MEMORY)[0]
    assert "nobody holds" in plain.state.survival([0]), "the search would have survived by itself"
