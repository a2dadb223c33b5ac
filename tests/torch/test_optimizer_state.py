"""An optimizer's state, made before its first step, on the CPU: every optimizer that torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import SettingsError
from muster.torch.data_parallel import DataParallel
from muster.torch.optimizer_state import make_optimizer_state
from muster.torch.state import TorchTrainingState
from muster.training.sampler import ShardedSampler
from tests.gpu.threads import ThreadCommunicator, run_ranks

ALL = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)
REFUSED = {"LBFGS", "SparseAdam"}
Make = Callable[[Any], Any]


def by_default(name: str) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters)


VARIANTS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "one by one": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False, decoupled_weight_decay=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "rate tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    "sums begin at one": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=1.0),
    "averaged": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2.0, weight_decay=0.1),
    "two rates": lambda p: torch.optim.Rprop(
        [{"params": [each], "lr": 0.1 / (1 + i)} for i, each in enumerate(p)]
    ),
}


def parameters_of() -> list[Any]:
    """Two matrices: some optimizers take nothing else."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, size, generator=generator)) for size in (4, 2)]


def train(optimizer: Any, parameters: list[Any], steps: int) -> list[Any]:
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * 3) + number
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def check_equal(make: Make) -> None:
    fresh, prepared = parameters_of(), parameters_of()
    plain, optimizer = make(fresh), make(prepared)
    make_optimizer_state(optimizer)
    for ours, theirs in zip(train(optimizer, prepared, 5), train(plain, fresh, 5), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_torch_has_the_optimizers_that_this_is_about() -> None:
    assert {"SGD", "Adam", "AdamW", "NAdam", "Rprop", "ASGD", *REFUSED} <= set(ALL)


@pytest.mark.parametrize("name", [name for name in ALL if name not in REFUSED])
def test_training_is_that_of_a_fresh_optimizer(name: str) -> None:
    check_equal(by_default(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_that_of_a_fresh_optimizer_whatever_its_settings(name: str) -> None:
    check_equal(VARIANTS[name])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_made_or_shared_is_refused(name: str) -> None:
    optimizer = by_default(name)(parameters_of())
    with pytest.raises(SettingsError, match=f"{name} cannot make its state .*Do one step before"):
        make_optimizer_state(optimizer)
    assert not optimizer.state
    step_once(optimizer)
    with pytest.raises(SettingsError, match=f"{name} keeps .* outside tensors"):
        make_optimizer_state(optimizer)


def step_once(optimizer: Any) -> None:
    parameters = optimizer.param_groups[0]["params"]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum(parameter.sin().sum() for parameter in parameters)
        loss.backward()
        for parameter in parameters:
            if isinstance(optimizer, torch.optim.SparseAdam):
                parameter.grad = parameter.grad.to_sparse()
        return loss

    optimizer.step(closure)


def test_dampened_momentum_is_refused_until_there_is_one() -> None:
    def make(parameters: list[Any]) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    fresh, prepared = parameters_of(), parameters_of()
    plain, optimizer = make(fresh), make(prepared)
    with pytest.raises(SettingsError, match=r"SGD with dampening .*Do one step before .* or set dampening=0"):
        make_optimizer_state(optimizer)
    train(optimizer, prepared, 1)
    train(plain, fresh, 1)
    make_optimizer_state(optimizer)
    for ours, theirs in zip(train(optimizer, prepared, 3), train(plain, fresh, 3), strict=True):
        assert torch.equal(ours, theirs)
    make_optimizer_state(
        torch.optim.SGD(parameters_of(), lr=0.1, dampening=0.5)
    )  # without momentum: no matter


def test_nothing_but_the_state_changes() -> None:
    parameters = parameters_of()
    optimizer = torch.optim.NAdam(parameters, lr=0.1, weight_decay=0.1)
    gradient = parameters[0].grad = torch.ones(3, 4)
    groups = [dict(group) for group in optimizer.param_groups]
    make_optimizer_state(optimizer)
    assert parameters[0].grad is gradient and bool((gradient == 1).all()) and parameters[1].grad is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters, parameters_of(), strict=True))
    assert [dict(group) for group in optimizer.param_groups] == groups


def test_state_that_is_there_stays_and_what_lacks_is_added() -> None:
    parameters = parameters_of()
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    parameters[0].grad = torch.ones(3, 4)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[parameters[0]].items()}
    make_optimizer_state(optimizer)
    assert all(torch.equal(optimizer.state[parameters[0]][name], value) for name, value in before.items())
    added = optimizer.state[parameters[1]]
    assert set(added) == set(before) and all(not bool(value.any()) for value in added.values())


class Odd(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """Writes its state in other ways than torch's own."""

    way = "update"

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.way == "update":
                state.update(ones=torch.ones(2))
            elif self.way == "setdefault":
                state.setdefault("ones", torch.ones(2))
            else:
                state = self.state[parameter] = {"ones": torch.ones(2)}
            state["ones"].zero_()


@pytest.mark.parametrize("way", ["update", "setdefault"])
def test_other_ways_to_write_a_state_are_followed(way: str) -> None:
    optimizer = Odd(parameters_of(), lr=0.1)
    optimizer.way = way
    make_optimizer_state(optimizer)
    assert all(values["ones"].tolist() == [1, 1] for values in optimizer.state.values())


def test_a_state_that_cannot_be_followed_is_refused() -> None:
    optimizer = Odd(parameters_of(), lr=0.1)
    optimizer.way = "replace"
    with pytest.raises(SettingsError, match="Odd replaces"):
        make_optimizer_state(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("name", [name for name in ALL if name not in REFUSED])
def test_all_of_it_becomes_part_of_the_training_state(name: str) -> None:
    def run(communicator: ThreadCommunicator) -> None:
        net = torch.nn.Linear(3, 2, bias=False)
        model = DataParallel(net, communicator=communicator, elastic=True)
        optimizer = by_default(name)(net.parameters())
        state = TorchTrainingState(model, optimizer, ShardedSampler(4, 2))
        held = {id(tensor) for tensor in state.arrays.values()}
        train(optimizer, list(net.parameters()), 2)
        values = [value for entries in optimizer.state.values() for value in entries.values()]
        assert {id(value) for value in values} <= held

    run_ranks(1, run)
