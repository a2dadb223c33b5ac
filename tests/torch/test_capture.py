"""What a captured step must notice: rates, settings, members, uneven batches, and a capture that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import ArrayError, CollectiveMismatchError, SettingsError, WorkerError
from muster.torch.capture import CaptureError, capture_step
from muster.torch.data_parallel import DataParallel
from muster.torch.sharded_optimizer import ShardedOptimizer
from tests.gpu import graphs
from tests.gpu.threads import _Meeting
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function

STEPS = 12


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.install(monkeypatch)


def make(model: Any, loss: Any = None, **options: Any) -> tuple[Any, Any]:
    """A step, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    graphs.watch(model, optimizer)
    step = capture_step(
        loss or (lambda images, labels: loss_function(model(images), labels)), model, optimizer, **options
    )
    return step, optimizer


def train(
    capture: bool,
    *,
    loaded: Any = None,
    scheduler: Callable[[Any], Any] | None = None,
    before: Callable[[int, Any], None] | None = None,
) -> tuple[Any, list[Any]]:
    """Trains alone; ``before`` may change the optimizer before each step."""
    net = linear_net()
    step, optimizer = make(net, capture=capture)
    if loaded is not None:
        optimizer.load_state_dict(loaded)
    schedule = scheduler(optimizer) if scheduler else None
    for number in range(STEPS):
        if before is not None:
            before(number, optimizer)
        step(*batch_of(6, number))
        if schedule is not None:
            schedule.step()
    return step, [parameter.detach().clone() for parameter in net.parameters()]


def assert_as_eager(**options: Any) -> Any:
    """Captured steps give what eager ones give; returns the step."""
    step, found = train(True, **options)
    _, expected = train(False, **options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    return step


def set_in(group: str, value: Any, at: int) -> Callable[[int, Any], None]:
    def change(number: int, optimizer: Any) -> None:
        if number == at:
            optimizer.param_groups[0][group] = value

    return change


def test_a_captured_step_gives_what_eager_ones_give() -> None:
    assert assert_as_eager().captured


def falling(number: int, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)


def in_warm_up_and_later(number: int, optimizer: Any) -> None:
    if number in (1, 6):
        optimizer.param_groups[0]["lr"] = 0.05 / (number + 1)


@pytest.mark.parametrize("change", [falling, in_warm_up_and_later, set_in("lr", 0.001, at=8)])
def test_learning_rates_set_by_hand_at_any_time_count(change: Callable[[int, Any], None]) -> None:
    assert assert_as_eager(before=change).captured


def test_a_scheduler_counts_also_after_a_state_was_loaded() -> None:
    loaded = torch.optim.SGD(linear_net().parameters(), lr=0.2, momentum=0.9, fused=True).state_dict()
    step = assert_as_eager(
        loaded=loaded, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    assert step.captured


@pytest.mark.parametrize(("setting", "value"), [("weight_decay", 0.5), ("momentum", 0.1)])
def test_another_setting_is_captured_again(setting: str, value: float) -> None:
    assert assert_as_eager(before=set_in(setting, value, at=6)).captured


def test_a_state_that_is_loaded_later_is_captured_again() -> None:
    def forget(number: int, optimizer: Any) -> None:
        if number == 6:
            state = optimizer.state_dict()
            zeros = {
                key: {name: torch.zeros_like(value) for name, value in values.items()}
                for key, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": zeros})

    assert assert_as_eager(before=forget).captured


def test_parameters_that_are_added_later_are_captured_too() -> None:
    extra = torch.nn.Parameter(torch.ones(2))

    def add(number: int, optimizer: Any) -> None:
        if number == 6:
            optimizer.add_param_group({"params": [extra]})

    assert assert_as_eager(before=add).captured


def test_a_parameter_that_is_frozen_or_a_module_in_another_mode_is_captured_again() -> None:
    """A graph would go on training the one, and dropping out in the other."""

    def run(capture: bool) -> Any:
        net = torch.nn.Sequential(linear_net(), torch.nn.BatchNorm1d(5))
        step, _ = make(net, capture=capture)
        for number in range(STEPS):
            if number == 5:
                net[0][1].weight.requires_grad_(False)
            if number == 9:
                net[1].eval()
            if number == 7:  # between steps anything may be looked at
                net.eval()
                net.train()
            step(*batch_of(6, number))
            assert step.captured is (capture and number in (3, 4, 8))
        return net.state_dict()

    found, expected = run(True), run(False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_buckets_that_the_wrapper_makes_again_are_captured_again() -> None:
    """A graph would write into those that are gone."""

    def one(communicator: graphs.GraphCommunicator, capture: bool) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        step, _ = make(model, capture=capture)
        for number in range(12):
            if number == 6:
                assert step.captured is capture
                model.follow_order(list(range(len(list(model.parameters())))))
            step(*batch_of(4, number))
            assert step.captured is (capture and number not in (0, 1, 2, 6, 7, 8))
        return [parameter.detach().clone() for parameter in model.parameters()]

    [found] = ranks(1, lambda communicator: one(communicator, True))
    [expected] = ranks(1, lambda communicator: one(communicator, False))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_setting_that_changes_in_each_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)

    step = assert_as_eager(scheduler=cycle)
    assert step.reason == "the optimizer's momentum changes in each step, and a graph holds it fixed"
    assert step.reason in caplog.text


def test_a_step_may_outlive_what_it_would_renew() -> None:
    step, optimizer = make(linear_net())
    del step
    optimizer.load_state_dict(optimizer.state_dict())


def ranks(size: int, function: Callable[[graphs.GraphCommunicator], Any]) -> list[Any]:
    """Calls the function on each rank of a communicator."""
    meeting = _Meeting(size)

    def one(rank: int) -> Any:
        try:
            return function(graphs.GraphCommunicator(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]


@pytest.mark.parametrize("counts", [(4, 4), (4, 1), (4, 0)])
@pytest.mark.parametrize("capture", [True, False])
def test_an_uneven_batch_is_averaged_over_all_samples(counts: tuple[int, int], capture: bool) -> None:
    def one(communicator: graphs.GraphCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        step, _ = make(model, capture=capture)
        for number in range(6):
            images, labels = batch_of(8, number)
            step(images[communicator.rank :: 2], labels[communicator.rank :: 2])
        assert step.captured is capture
        images, labels = batch_of(sum(counts), 9)
        mine = slice(0, counts[0]) if communicator.rank == 0 else slice(counts[0], None)
        step(images[mine], labels[mine], samples=counts[communicator.rank])
        step(*batch_of(4, 10))
        assert step.captured is capture
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = linear_net()
    step, _ = make(alone, capture=False)
    for samples, seed in (*((8, number) for number in range(6)), (sum(counts), 9), (4, 10)):
        step(*batch_of(samples, seed))
    for parameters in ranks(2, one):
        for ours, expected in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_captured_step_within_uneven_batch_runs_eagerly() -> None:
    def one(communicator: graphs.GraphCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        step, _ = make(model)
        for number in range(6):
            step(*batch_of(4, number))
        assert step.captured
        with model.uneven_batch(3 + communicator.rank):
            step(*batch_of(3 + communicator.rank, 7))
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = ranks(2, one)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_a_rank_that_goes_on_after_a_broken_step_is_found_by_captured_steps() -> None:
    """Without a wait: what came of one step is read before a later one."""

    def one(communicator: graphs.GraphCommunicator) -> str:
        model = DataParallel(linear_net(), communicator=communicator)
        step, _ = make(model)
        for number in range(6):
            step(*batch_of(4, number))
        assert step.captured
        if communicator.rank:
            images, _ = batch_of(3, 7)
            with pytest.raises(ValueError, match="to match target batch_size"):
                step(images, torch.zeros(2, dtype=torch.int64))
        assert step.captured
        step(*batch_of(4, 8))
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 1 \(w1 on h\) left a training pass"
        ) as caught:
            step(*batch_of(4, 9))
        return str(caught.value)

    first, second = ranks(2, one)
    assert first == second


def test_captured_steps_compare_also_after_the_same_members_meet_again() -> None:
    """A second loop, say: the graph goes on, with what it reads and writes where it was."""

    def one(communicator: graphs.GraphCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator)
        step, _ = make(model)
        for number in range(6):
            step(*batch_of(4, number))
        for rank in (0, 1):
            model.join(communicator, 0)
            step(*batch_of(4, 6))
            assert step.captured
            if communicator.rank == rank:
                with pytest.raises(ValueError, match="to match target batch_size"):
                    step(batch_of(3, 7)[0], torch.zeros(2, dtype=torch.int64))
            step(*batch_of(4, 8))
            with pytest.raises(CollectiveMismatchError, match=f"rank {rank} "):
                step(*batch_of(4, 9))

    ranks(2, one)


def test_a_layer_that_is_added_after_a_capture_is_refused() -> None:
    """The graph would go on without it."""

    def one(communicator: graphs.GraphCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator)
        step, _ = make(model)
        for number in range(6):
            step(*batch_of(4, number))
        model.module.append(torch.nn.Linear(5, 5))
        with pytest.raises(WorkerError, match=r"4\.weight \(and 1 more\) was added"):
            step(*batch_of(4, 7))

    ranks(2, one)


class FailsWhileCaptured(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """Stands for what a graph cannot hold, in the backward pass."""

    @staticmethod
    def forward(context: Any, tensor: Any) -> Any:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        if getattr(graphs._here, "graph", None) is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return gradient


class Uncapturable(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = linear_net()

    def forward(self, images: Any) -> Any:
        hidden = self.net[2](self.net[1](self.net[0](images)))
        return self.net[3](FailsWhileCaptured.apply(hidden))


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_ranks_stay_alike_after_a_capture_that_failed_in_the_backward_pass(weights: str | None) -> None:
    def one(communicator: graphs.GraphCommunicator, capture: bool) -> Any:
        model = DataParallel(Uncapturable(), communicator=communicator, weights=weights)
        dtype = torch.bfloat16 if weights else torch.float32
        step, _ = make(
            model,
            lambda images, labels: loss_function(model(images.to(dtype)).float(), labels),
            capture=capture,
        )
        for number in range(7):
            images, labels = batch_of(8, number)
            step(images[communicator.rank :: 2], labels[communicator.rank :: 2])
        assert not capture or "not permitted" in step.reason
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = ranks(2, lambda communicator: one(communicator, True))
    eager, _ = ranks(2, lambda communicator: one(communicator, False))
    for ours, theirs, expected in zip(first, second, eager, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, expected)


@pytest.mark.parametrize(("steps_before", "fails"), [(0, False), (2, False), (5, False), (5, True)])
def test_a_newcomer_and_a_survivor_capture_in_the_same_step(steps_before: int, fails: bool) -> None:
    alone, both = _Meeting(1), _Meeting(2)
    joined = threading.Barrier(2, timeout=100)

    def member(communicator: graphs.GraphCommunicator, steps: int) -> tuple[Any, Any]:
        module = Uncapturable() if fails else linear_net()
        model = DataParallel(module, communicator=communicator, elastic=True)
        model.join(communicator, 0)
        step, _ = make(model)
        for number in range(steps):
            step(*batch_of(4, number))
        return model, step

    def survivor() -> Any:
        model, step = member(graphs.GraphCommunicator(alone, 0), steps_before)
        joined.wait()
        communicator = graphs.GraphCommunicator(both, 0)
        model.join(communicator, 0)
        return go_on(step, communicator)

    def newcomer() -> Any:
        joined.wait()
        communicator = graphs.GraphCommunicator(both, 1)
        _, step = member(communicator, 0)
        return go_on(step, communicator)

    def go_on(step: Any, communicator: Any) -> Any:
        try:
            for number in range(6):
                step(*batch_of(4, number))
        except BaseException:
            both.barrier.abort()
            raise
        return step.captured, communicator.calls

    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(survivor), pool.submit(newcomer)])
    assert first[0] is second[0] is not fails
    assert first[1] == second[1]


def test_strict_raises_also_for_a_capture_that_fails() -> None:
    net = Uncapturable()
    step, _ = make(net, strict=True)
    for number in range(3):
        step(*batch_of(4, number))
    with pytest.raises(CaptureError, match="not permitted"):
        step(*batch_of(4, 3))


def test_a_batch_that_is_not_all_tensors_is_refused() -> None:
    step, _ = make(linear_net())
    with pytest.raises(ArrayError, match="made of tensors, not of int, str"):
        step(torch.zeros(2), 3, "x")


def test_an_optimizer_of_something_else_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"trains no parameter of this model: make it of model\.param"):
        capture_step(print, linear_net(), torch.optim.SGD(linear_net().parameters(), lr=0.1))


def test_a_sharded_optimizer_is_refused() -> None:
    def one(communicator: graphs.GraphCommunicator) -> None:
        net = linear_net()
        optimizer = ShardedOptimizer(
            net, communicator=communicator, make=lambda part: torch.optim.SGD(part, lr=0.1)
        )
        with pytest.raises(SettingsError, match=r"call its step\(\) without capture_step"):
            capture_step(print, net, optimizer)

    ranks(2, one)


def test_a_step_with_sparse_gradients_says_why_it_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # this needs no graphs
    module = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = capture_step(lambda rows: module(rows).sum(), module, optimizer)
    assert step.reason == "sparse gradients cannot be captured: each step reads how many rows there are"
    before = module.weight.detach().clone()
    step(torch.tensor([3]))
    assert torch.equal(before != module.weight.detach(), (torch.arange(6) == 3)[:, None].expand(6, 2))
