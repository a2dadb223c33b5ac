"""The state of a torch model through changes of members; on the CPU, among threads."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from muster.torch.data_parallel import DataParallel
from muster.torch.state import TorchTrainingState
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler
from muster.training.state import StateMismatchError, share_state
from tests.fakes import ElasticWorld, FakeCommunicator, membership_changed
from tests.gpu.threads import ThreadCommunicator, run_ranks

SAMPLES, BATCH = 24, 6
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(SAMPLES, 3, 4, 4, generator=GENERATOR)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Its gradients become ready in another order than its parameters are defined in."""

    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.last = torch.nn.Linear(width, 3)
        self.first = torch.nn.Linear(48, width)
        self.norm = torch.nn.BatchNorm1d(width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.norm(self.first(x.flatten(1)))))


@dataclass
class Place:
    """What the state needs of a session."""

    communicator: ThreadCommunicator
    state_source_rank: int = -1
    newcomer_ranks: tuple[int, ...] = ()


class Member:
    """One rank's training; its objects live through generations."""

    def __init__(self, seed: int, *, momentum: float = 0.9, width: int = 4) -> None:
        self.seed, self.momentum, self.width = seed, momentum, width
        self.state: Any = None

    def enter(
        self, communicator: ThreadCommunicator, source: int = -1, newcomers: tuple[int, ...] = ()
    ) -> int:
        if self.state is None:
            self.net = Net(self.seed, self.width)
            self.model = DataParallel(self.net, communicator=communicator, elastic=True, bucket_bytes=64)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=self.momentum)
            sampler = ShardedSampler(SAMPLES, BATCH, seed=1)
            self.state = TorchTrainingState(self.model, self.optimizer, sampler, samples_per_rank=2)
        return share_state(Place(communicator, source, newcomers), self.state)

    def compute(self) -> None:
        self.state.begin()
        rows = self.state.sampler.batch().indices
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(IMAGES[rows]), LABELS[rows]).backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.compute()
            self.state.commit()
            self.state.sampler.advance()
            self.state.step += 1

    def values(self) -> list[Any]:
        return [tensor.clone() for tensor in self.state.arrays.values()]


def equal(*members: Member) -> bool:
    first, *others = (member.values() for member in members)
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def generation(
    members: list[Member], steps: int, source: int = -1, newcomers: tuple[int, ...] = ()
) -> list[int]:
    def run(communicator: ThreadCommunicator) -> int:
        member = members[communicator.rank]
        found = member.enter(communicator, source, newcomers)
        member.train(steps)
        return found

    return run_ranks(len(members), run)


def test_all_begin_with_the_state_of_the_first_rank() -> None:
    members = [Member(seed) for seed in (1, 2, 3)]
    assert generation(members, 0) == [0, 0, 0]
    assert equal(*members)
    assert torch.equal(members[2].net.first.weight, Net(1).first.weight)
    generation(members, 2)
    assert equal(*members)
    assert members[0].state.sampler.batch_size == 6


def test_a_newcomer_gets_all_and_trains_on_with_the_others() -> None:
    first, second, third = (Member(seed) for seed in (1, 2, 3))
    generation([first, second], 3)
    before = first.values()
    assert generation([first, third, second], 0, source=0, newcomers=(1,)) == [0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(before, third.values(), strict=True))
    assert (third.state.step, third.state.sampler.batch_size) == (3, 6)
    generation([first, third, second], 2)
    assert equal(first, second, third)
    assert third.state.step == 5


def test_newcomers_twice_without_a_step_between_go_back_no_step() -> None:
    first, *others = (Member(seed) for seed in (1, 2, 3, 4))

    def two_steps(communicator: ThreadCommunicator) -> None:
        member = (first, others[0])[communicator.rank]
        member.enter(communicator)
        member.train(2)
        member.state.settle()  # all know the generators of all

    run_ranks(2, two_steps)
    for newcomer in others[1:]:
        generation([first, newcomer], 0, source=0, newcomers=(1,))
        assert (first.state.step, newcomer.state.step) == (2, 2)


def test_a_broken_step_leaves_nothing_behind() -> None:
    members = [Member(1), Member(2)]
    generation(members, 2)
    before = members[0].values()

    def broken(communicator: ThreadCommunicator) -> None:
        members[communicator.rank].model.rebind(communicator)
        members[communicator.rank].compute()  # and no commit: the AllReduce was aborted, say

    run_ranks(2, broken)
    assert not torch.equal(before[0], members[0].values()[0])
    generation(members, 0, source=0)
    assert all(torch.equal(a, b) for a, b in zip(before, members[0].values(), strict=True))
    assert members[0].state.step == 2


class CutOff:
    """A collective that the others never came to."""

    def wait(self) -> None:
        raise membership_changed(1)


def test_whoever_is_a_step_behind_takes_it_from_whoever_finished_it() -> None:
    members = [Member(1), Member(2)]
    generation(members, 2)

    def one_finishes(communicator: ThreadCommunicator) -> None:
        member = members[communicator.rank]
        member.state.enter(communicator, 0)
        member.compute()
        if communicator.rank == 1:
            communicator.all_gather = lambda *_, **__: CutOff()  # type: ignore[assignment, method-assign]
            member.state.commit()
            member.state.sampler.advance()
            member.state.step += 1

    run_ranks(2, one_finishes)
    after = members[1].values()
    assert generation(members, 0, source=0) == [1, 1]
    assert members[0].state.step == 3
    assert all(torch.equal(a, b) for a, b in zip(after, members[0].values(), strict=True))
    generation(members, 1, source=0)
    assert equal(*members)


def test_learning_rates_travel_and_another_model_is_refused() -> None:
    first, second = Member(1), Member(2)
    generation([first], 1)
    first.optimizer.param_groups[0]["lr"] = 0.025
    generation([first, second], 0, source=0, newcomers=(1,))
    assert second.optimizer.param_groups[0]["lr"] == 0.025
    with pytest.raises(StateMismatchError, match=r"first\.weight is"):
        generation([first, Member(3, width=5)], 0, source=0, newcomers=(1,))


def test_a_state_with_other_parameter_groups_is_refused() -> None:
    """Where the optimizer has no tensors, all else is alike."""

    def state(communicator: ThreadCommunicator, groups: int) -> TorchTrainingState:
        net = Net(1)
        parameters = list(net.parameters())
        parts = [parameters] if groups == 1 else [parameters[:2], parameters[2:]]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.1)
        model = DataParallel(net, communicator=communicator, elastic=True)
        return TorchTrainingState(model, optimizer, ShardedSampler(SAMPLES, BATCH))

    def one(communicator: ThreadCommunicator) -> None:
        words = "in a file is of an optimizer with 1 parameter groups, this has 2.*Make the optimizer with"
        with pytest.raises(StateMismatchError, match=words):
            state(communicator, 2).check(state(communicator, 1).describe(), "a file")

    run_ranks(1, one)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_the_optimizers_first_step_is_that_of_a_fresh_one(kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
    if kind == "SGD":
        options["momentum"] = 0.9
    net = Net(4)
    fresh = copy.deepcopy(net)

    def run(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(net, communicator=communicator, elastic=True)
        optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
        TorchTrainingState(model, optimizer, ShardedSampler(SAMPLES, BATCH))
        return optimizer

    optimizer = run_ranks(1, run)[0]
    reference = getattr(torch.optim, kind)(fresh.parameters(), **options)
    for module, each in ((net, optimizer), (fresh, reference)):
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        each.step()
        each.step()
    for mine, theirs in zip(net.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_rate_that_is_a_tensor_stays_the_one_that_a_captured_step_reads() -> None:
    first, second = Member(1), Member(2)
    for member in (first, second):
        run_ranks(1, member.enter)
        (group,) = member.optimizer.param_groups
        group["lr"] = torch.tensor(0.1)
    held = second.optimizer.param_groups[0]["lr"]
    first.optimizer.param_groups[0]["lr"].fill_(0.025)
    generation([first], 1)
    generation([first, second], 0, source=0, newcomers=(1,))
    assert second.optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.025)


def test_what_the_optimizer_loads_later_is_part_of_the_state() -> None:
    """It brings tensors of its own: a newcomer got the old ones, and a broken step was undone in those."""

    def one(communicator: ThreadCommunicator) -> Any:
        member = Member(seed=1 + communicator.rank)
        member.enter(communicator)
        member.train(1)
        loaded = copy.deepcopy(member.optimizer.state_dict())
        for values in loaded["state"].values():
            values["momentum_buffer"].fill_(7)
        member.optimizer.load_state_dict(loaded)
        member.compute()
        member.state.roll_back()
        return [float(v["momentum_buffer"].mean()) for v in member.optimizer.state.values()]

    assert all(set(means) == {7.0} for means in run_ranks(2, one))


def test_parameters_that_the_optimizer_gets_later_are_part_of_the_state() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = Net(1)
        model = DataParallel(net, communicator=communicator, elastic=True)
        optimizer = torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9)
        state = TorchTrainingState(model, optimizer, ShardedSampler(SAMPLES, BATCH, seed=1))
        share_state(Place(communicator), state)
        optimizer.add_param_group({"params": list(net.first.parameters())})
        state.begin()
        model(IMAGES[:4]).sum().backward()
        optimizer.step()
        state.roll_back()
        return [float(v["momentum_buffer"].abs().sum()) for v in optimizer.state.values()]

    assert run_ranks(2, one) == [[0.0] * 4] * 2


class Late:
    """A job of one whose steps are known to be over, or broken, when they are waited for, as on a GPU.

    Args:
        breaking: the number of the step that breaks; what it leaves behind is no number.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, breaking: int = 0, weights: str | None = None
    ) -> None:
        torch.manual_seed(0)
        self.world = ElasticWorld(1)
        session = self.world.members[0]
        layers = torch.nn.Linear(48, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        net = torch.nn.Sequential(torch.nn.Flatten(), *layers)
        self.model = DataParallel(net, session, elastic=True, weights=weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        sampler = ShardedSampler(SAMPLES, BATCH, seed=1)
        self.state = TorchTrainingState(
            self.model, self.optimizer, sampler, also={"scheduler": self.scheduler}
        )
        self.rng = self.state.rng = np.random.default_rng(0)
        self.numbers: list[int] = []
        self.given: list[Any] = []
        self.waited: list[int] = []
        self.saved: list[tuple[int, Any]] = []
        self._breaking = breaking
        self._marks = 0
        monkeypatch.setattr(FakeCommunicator, "mark", lambda communicator: self.mark())
        monkeypatch.setattr(FakeCommunicator, "synchronize", lambda communicator: None)

    def mark(self) -> Any:
        self._marks += 1
        number, generation = self._marks, self.world.generation

        def wait() -> None:
            self.waited.append(number)
            if number == self._breaking:
                with torch.no_grad():
                    for parameter in (*self.model.parameters(), *self.model.module.parameters()):
                        parameter.fill_(float("nan"))
                with self.world.changed:
                    if self.world.generation == generation:
                        self.world.form(self.world.members, [])
                raise membership_changed(generation)

        return wait

    def train(self, steps: int, load: Any = None, save_at: int = 0) -> list[Any]:
        """Trains; returns the state at the end: arrays, and what stands beside them."""
        loop = ElasticLoop(self.world.members[0], self.state, epochs=3, steps=steps, load=load)
        for step in loop:
            with step:
                self.rng.random()
                self.numbers.append(self.state.step + 1)
                self.given.append(step.data)
                rows = step.batch.indices if load is None else step.data
                self.optimizer.zero_grad()
                scores = self.model(IMAGES[rows].to(self.model.weights_dtype))
                torch.nn.functional.cross_entropy(scores.float(), LABELS[rows]).backward()
                self.optimizer.step()
                self.scheduler.step()
            if save_at and self.state.step == save_at:
                save_at = 0
                description, arrays = self.state.for_checkpoint()
                self.saved.append((json.loads(description)["step"], arrays))
        beside = json.loads(self.state.describe()) | {"run": ""}
        return [tensor.clone() for tensor in self.state.arrays.values()] + [beside]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def test_a_step_is_waited_for_while_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Late(monkeypatch)
    seen: list[list[int]] = []

    def load(batch: Any) -> Any:
        return batch.indices

    loop = ElasticLoop(job.world.members[0], job.state, epochs=1, load=load)
    for step in loop:
        with step:
            seen.append(list(job.waited))
    assert seen == [[], [], [1], [1, 2]]
    assert job.waited == [1, 2, 3, 4]


@pytest.mark.parametrize("loader", ["none", "function", "DataLoader"])
@pytest.mark.parametrize("breaking", [1, 3, 4, 7])
def test_what_broke_and_the_step_after_it_are_redone_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, breaking: int, loader: str
) -> None:
    """Steps 4 and 8 are the last of an epoch; 7 is the last of all."""

    def train(job: Late) -> list[Any]:
        def load(batch: Any) -> Any:
            return batch.indices

        given: Any = {"none": None, "function": load}.get(loader)
        if loader == "DataLoader":
            given = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=job.state.sampler)
        return job.train(7, given)

    unbroken = train(Late(monkeypatch))
    job = Late(monkeypatch, breaking)
    assert same(train(job), unbroken)
    redone = [breaking, breaking + 1] if breaking < 7 else [7]
    assert job.numbers == [*range(1, redone[-1] + 1), *range(breaking, 8)]
    assert job.world.generation == 2
    assert all(job.given[number - 1] is job.given[number - 1 + len(redone)] for number in redone)


@pytest.mark.parametrize("breaking", [1, 4, 7])
def test_what_broke_is_redone_from_the_masters_of_weights_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, breaking: int
) -> None:
    unbroken = Late(monkeypatch, weights="bf16").train(7)
    job = Late(monkeypatch, breaking, weights="bf16")
    assert same(job.train(7), unbroken)
    assert job.numbers.count(breaking) == 2


def test_a_broken_step_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = Late(monkeypatch)
    end = unbroken.train(7, save_at=4)
    job = Late(monkeypatch, breaking=5)
    assert same(job.train(7, save_at=5), end)
    (step, arrays), (before, expected) = job.saved[0], unbroken.saved[0]
    assert step == before == 4
    assert all((arrays[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("breaking", [1, 5])
def test_without_room_for_two_copies_each_step_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaking: int
) -> None:
    """The first step is found to have broken when the second begins, for which there is no room."""
    unbroken = Late(monkeypatch).train(7)
    monkeypatch.setattr("muster.torch.state.memory_bytes", lambda device: 10_000.0)
    job = Late(monkeypatch, breaking)
    assert same(job.train(7), unbroken)
    others = [number for number in job.numbers if number != breaking]
    assert others == [number for number in range(1, 8) if number != breaking]
    assert job.numbers.count(breaking) > 1
    assert caplog.text.count("no room on the GPU for a second copy") == 1


def test_members_change_once_the_last_step_is_known_to_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Late(monkeypatch)
    session = job.world.members[0]
    for step in ElasticLoop(session, job.state, epochs=1):
        if job.state.step == 2 and job.world.generation == 1:
            with job.world.changed:  # the same member once more, in a planned change
                job.world.switch_after, job.world._planned, job.world._planned_newcomers = 3, [session], []
        with step:
            pass
        if step.done and job.state.step == 3:
            assert job.waited == [1, 2]
        if job.world.generation == 2 and job.state.step == 3:
            assert job.waited == [1, 2, 3]
    assert (job.world.generation, job.state.step) == (2, 4)


@pytest.mark.parametrize("what", ["the state", "the loop"])
def test_what_the_host_does_beside_a_step_does_not_grow_with_the_model(what: str) -> None:
    """A GPU that waits for it stands still: 0.3 ms would be a tenth of a step of ResNet-50."""

    def calls(layers: int) -> int:
        world = ElasticWorld(1)
        session = world.members[0]
        net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
        model = DataParallel(net, session, elastic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = TorchTrainingState(model, optimizer, ShardedSampler(SAMPLES, BATCH))
        counted: Counter[str] = Counter()

        def count(frame: Any, event: str, argument: Any) -> None:
            counted[event] += event in ("call", "c_call")

        steps = iter(ElasticLoop(session, state, epochs=1))
        for number in range(3):  # the copies are made in the first
            if number == 2 and what == "the loop":
                sys.setprofile(count)
            with next(steps):
                if number == 2:
                    sys.setprofile(None)
            if number == 1 and what == "the state":
                sys.setprofile(count)
        sys.setprofile(None)
        return sum(counted.values())

    try:
        few, many = calls(2), calls(60)
    finally:
        sys.setprofile(None)
    assert few == many and 0 < few < 400


def test_a_checkpoint_holds_bfloat16_also_where_a_package_gives_numpy_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(np.sctypeDict, "bfloat16", np.float32)  # as ml_dtypes does, with a type of its own
    net = torch.nn.Linear(2, 2).to(torch.bfloat16)
    model = DataParallel(net, ElasticWorld(1).members[0], elastic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchTrainingState(model, optimizer, ShardedSampler(SAMPLES, BATCH, seed=1))
    _, arrays = state.for_checkpoint()
    assert {str(arrays[name].dtype) for name, each in state.arrays.items() if each is not None} == {"float32"}
