"""The sharded optimizer, among threads on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.worker.errors import ArrayError, SettingsError
from muster.worker.pytorch.data_parallel import DataParallel
from muster.worker.pytorch.sharded_optimizer import ShardedOptimizer
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.worker.pytorch.test_data_parallel import batch_of, linear_net, loss_function

BATCHES = [batch_of(12, seed) for seed in range(8)]
MAKERS = {
    "sgd": lambda part: torch.optim.SGD(part, lr=0.05, momentum=0.9),
    "adamw": lambda part: torch.optim.AdamW(part, lr=1e-2, weight_decay=0.01),
}


def train(net: Any, optimizer: Any, part: slice, batches: Any) -> None:
    for images, labels in batches:
        optimizer.zero_grad()
        loss_function(net(images[part]), labels[part]).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", MAKERS)
def test_it_ends_where_the_undivided_optimizer_does(kind: str) -> None:
    alone = linear_net()
    train(alone, MAKERS[kind](alone.parameters()), slice(None), BATCHES)

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        if communicator.rank:
            torch.nn.init.zeros_(net[1].weight)  # rank 0's parameters are taken
        optimizer = ShardedOptimizer(net, communicator, MAKERS[kind])
        train(net, optimizer, slice(communicator.rank, None, 3), BATCHES)
        return net.state_dict(), optimizer.state_bytes()

    for state, (held, undivided) in run_ranks(3, one):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5)
        assert undivided == 3 * held
        assert held < undivided / 2


def test_its_state_goes_on_with_another_number_of_ranks() -> None:
    alone = linear_net()
    train(alone, MAKERS["adamw"](alone.parameters()), slice(None), BATCHES)

    def before(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        optimizer = ShardedOptimizer(net, communicator, MAKERS["adamw"])
        train(net, optimizer, slice(communicator.rank, None, 2), BATCHES[:4])
        return {k: v.clone() for k, v in net.state_dict().items()}, optimizer.gather_state()

    state, moments = run_ranks(2, before)[0]

    def after(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        net.load_state_dict(state)
        optimizer = ShardedOptimizer(net, communicator, MAKERS["adamw"])
        optimizer.load_state(moments)
        train(net, optimizer, slice(communicator.rank, None, 3), BATCHES[4:])
        return net.state_dict()

    for final in run_ranks(3, after):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(final[name], value, rtol=0, atol=5e-5)


def trained(communicator: ThreadCommunicator, make: Any, width: int = 3) -> tuple[Any, ShardedOptimizer]:
    net = torch.nn.Linear(width, 3)
    optimizer = ShardedOptimizer(net, communicator, make)
    net(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return net, optimizer


class Lamb(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """As libraries call it."""


class OwnLamb(Lamb):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS searches along a line through all parameters, and cannot be divided"),
        (torch.optim.Adafactor, "Adafactor scales its updates by norms of whole parameters"),
        (OwnLamb, "OwnLamb scales its updates by norms of whole parameters"),
    ],
)
def test_an_optimizer_that_does_not_treat_each_element_by_itself_is_refused(make: Any, words: str) -> None:
    """Each rank would compute with the norms, or the line, of its own part."""

    def one(communicator: ThreadCommunicator) -> None:
        with pytest.raises(SettingsError, match=words):
            ShardedOptimizer(linear_net(), communicator, make)

    run_ranks(2, one)


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda model: model, "the module is a DataParallel"),
        (lambda model: torch.nn.Sequential(model), "0 is a DataParallel"),
        (lambda model: model.module, "a DataParallel holds some of these parameters"),
    ],
)
def test_a_module_in_a_data_parallel_is_refused(give: Any, words: str) -> None:
    """Gradients would be averaged twice, in turns that may not fit."""

    def one(communicator: ThreadCommunicator) -> None:
        net = linear_net()
        model = DataParallel(net, communicator=communicator)
        with pytest.raises(SettingsError, match=f"{words}.*give it the bare module"):
            ShardedOptimizer(give(model), communicator, MAKERS["sgd"])

    run_ranks(2, one)


def test_a_module_in_a_sharded_optimizer_is_refused_by_data_parallel() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = linear_net()
        optimizer = ShardedOptimizer(net, communicator, MAKERS["sgd"])
        with pytest.raises(SettingsError, match=r"a ShardedOptimizer averages the gradient of 1\.weight"):
            DataParallel(net, communicator=communicator)
        del optimizer
        DataParallel(net, communicator=communicator)

    run_ranks(2, one)


def test_the_state_of_another_module_is_refused() -> None:
    """Also where both fill as many elements, gaps included."""

    def one(communicator: ThreadCommunicator) -> None:
        _, optimizer = trained(communicator, MAKERS["adamw"])
        state = optimizer.gather_state()
        for other, words in (
            (torch.nn.Linear(4, 3), r"parameter 0 has the shape \[3, 3\] there and \[3, 4\] here"),
            (torch.nn.Linear(3, 3, bias=False), "this module's 1 parameters: it is of 2"),
        ):
            with pytest.raises(ArrayError, match=words):
                ShardedOptimizer(other, communicator, MAKERS["adamw"]).load_state(state)
        with pytest.raises(ArrayError, match="it does not say of which"):
            optimizer.load_state({"exp_avg": state["exp_avg"]})
        optimizer.load_state(state)

    run_ranks(2, one)


def test_state_that_was_saved_before_the_first_step_is_taken() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        fresh = ShardedOptimizer(torch.nn.Linear(3, 3), communicator, MAKERS["adamw"])
        state = fresh.gather_state()
        net, optimizer = trained(communicator, MAKERS["adamw"])
        optimizer.load_state(state)
        assert not optimizer.inner.state
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    run_ranks(2, one)


def test_the_optimizer_takes_its_state_as_it_needs_it() -> None:
    """A checkpoint may have been read to another device: fused optimizers want their step count on theirs."""

    def one(communicator: ThreadCommunicator) -> Any:
        _, optimizer = trained(communicator, lambda part: torch.optim.AdamW(part, fused=True))
        state = optimizer.gather_state()
        optimizer.load_state(state | {"step": state["step"].to(torch.float64)})
        return optimizer.inner.state[optimizer._part]["step"]

    for step in run_ranks(2, one):
        assert step.dtype == torch.float32 and float(step) == 1


@pytest.mark.parametrize("width", [3, 100])
def test_ranks_with_different_modules_are_told_so(width: int) -> None:
    """Also where both have as many elements in another order."""

    def one(communicator: ThreadCommunicator) -> None:
        layers = [torch.nn.Linear(3, 3), torch.nn.Linear(width, 3)]
        net = torch.nn.Sequential(*(layers if communicator.rank else reversed(layers)))
        if width == 3:
            net[communicator.rank].bias = None
        with pytest.raises(ArrayError, match=r"the module on rank 1 differs from rank 0's: "):
            ShardedOptimizer(net, communicator, MAKERS["sgd"])

    run_ranks(2, one)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared_as_torch_optimizers_are_told_to(set_to_none: bool) -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net, optimizer = trained(communicator, MAKERS["sgd"])
        optimizer.zero_grad(set_to_none=set_to_none)
        assert not net.weight.grad.any()

    run_ranks(2, one)


def test_an_unused_parameter_counts_as_zero() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        optimizer = ShardedOptimizer(net, communicator, MAKERS["sgd"])
        before = net[1].weight.detach().clone()
        net[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return torch.equal(before, net[1].weight)

    assert all(run_ranks(2, one))


def test_each_rank_keeps_its_own_buffers() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        net[1].running_mean.fill_(communicator.rank)
        net.eval()
        optimizer = ShardedOptimizer(net, communicator, MAKERS["sgd"])
        net(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        return net[1].running_mean.tolist()

    assert run_ranks(2, one) == [[0, 0], [1, 1]]


def test_a_gradient_that_was_set_to_none_is_zero_and_not_that_of_the_step_before() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        optimizer = ShardedOptimizer(net, communicator, lambda part: torch.optim.SGD(part, lr=1.0))
        (net[0](torch.ones(1, 2)) + net[1](torch.ones(1, 2))).sum().backward()
        before = [net[0].weight.detach().clone(), net[1].weight.detach().clone()]
        net.zero_grad(set_to_none=True)
        net[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return [before[0] - net[0].weight.detach(), before[1] - net[1].weight.detach()]

    for used, unused in run_ranks(2, one):
        assert bool((used == 1).all()) and not bool(unused.any())


def test_gradients_need_no_memory_beside_the_flat_ones() -> None:
    """Backward adds in place, also after somebody has set the module's gradients to None."""
    images, labels = BATCHES[0]

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        optimizer = ShardedOptimizer(net, communicator, lambda part: torch.optim.SGD(part, lr=1.0))
        before = {name: value.clone() for name, value in net.state_dict().items()}
        for repeat in range(2):
            flat = [parameter.grad.data_ptr() for parameter in net.parameters()]
            loss_function(net(images), labels).backward()
            loss_function(net(images), labels).backward()  # accumulates
            assert [parameter.grad.data_ptr() for parameter in net.parameters()] == flat
            if repeat == 0:
                net.zero_grad(set_to_none=True)
                loss_function(net(images), labels).backward()  # once only: the two before are forgotten
                optimizer.step()
                optimizer.zero_grad()
        return {name: before[name] - value for name, value in net.state_dict().items()}

    alone = linear_net()
    loss_function(alone(images), labels).backward()
    for moved in run_ranks(2, one):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(moved[name], parameter.grad, rtol=0, atol=1e-5)


def test_parameters_of_several_dtypes_are_refused() -> None:
    net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double()])
    with pytest.raises(ArrayError, match="one dtype"):
        ShardedOptimizer(net, object(), MAKERS["sgd"])  # type: ignore[arg-type]


def test_a_state_that_the_module_loads_later_counts() -> None:
    """Each rank's part of it was overwritten in the next step, by what the optimizer remembered."""

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        optimizer = ShardedOptimizer(net, communicator, lambda part: torch.optim.SGD(part, lr=0.0))
        net.load_state_dict({name: torch.full_like(v, 0.5) for name, v in net.state_dict().items()})
        optimizer.step()
        return [bool((value == 0.5).all()) for value in net.state_dict().values()]

    assert all(all(held) for held in run_ranks(3, one))


@pytest.mark.parametrize("mean", [True, False])
def test_clipping_sees_the_whole_averaged_gradient(mean: bool) -> None:
    alone = linear_net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0, momentum=0.9)
    norms = []
    for images, labels in BATCHES[:3]:
        optimizer.zero_grad()
        (loss_function(alone(images), labels) * (1 if mean else 3)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3))
        optimizer.step()

    def one(communicator: ThreadCommunicator) -> Any:
        net, found = linear_net(), []
        optimizer = ShardedOptimizer(
            net,
            communicator,
            lambda part: torch.optim.SGD(part, lr=1.0, momentum=0.9),
            gradients_mean=mean,
        )
        part = slice(communicator.rank, None, 3)
        for images, labels in BATCHES[:3]:
            optimizer.zero_grad()
            loss_function(net(images[part]), labels[part]).backward()
            begin = [name for name, _ in communicator.calls].count("reduce_scatter")
            found.append(optimizer.clip_grad_norm_(0.3))
            optimizer.step()
            assert [name for name, _ in communicator.calls].count("reduce_scatter") == begin + 1
        return found, net.state_dict()

    for found, state in run_ranks(3, one):
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-5)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5)


def test_loss_scaling_is_refused() -> None:
    """It would unscale what is left of the step before, and the step take scaled gradients."""

    def one(communicator: ThreadCommunicator) -> None:
        net = torch.nn.Linear(3, 3)
        optimizer = ShardedOptimizer(net, communicator, MAKERS["sgd"])
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(net(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(SettingsError, match="GradScaler cannot work with a ShardedOptimizer"):
            scaler.step(optimizer)

    run_ranks(1, one)


def test_an_inner_optimizer_of_the_modules_own_parameters_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = torch.nn.Linear(3, 3)
        with pytest.raises(SettingsError, match="must train what it is given, and that alone"):
            ShardedOptimizer(net, communicator, lambda part: torch.optim.SGD(net.parameters(), lr=0.1))

    run_ranks(1, one)


def test_a_module_that_was_moved_since_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = torch.nn.Conv2d(2, 2, 3)
        optimizer = ShardedOptimizer(net, communicator, MAKERS["sgd"])
        net.to(memory_format=torch.channels_last)
        with pytest.raises(SettingsError, match="moved or converted after its ShardedOptimizer was made"):
            optimizer.step()

    run_ranks(1, one)


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_learning_rate_and_momenta_are_saved_with_the_state(lr: Any) -> None:
    """A scheduler that goes on multiplies what the rate was, not what it began with."""

    def make(part: Any, lr: Any = 1e-2) -> Any:
        return torch.optim.AdamW(part, lr=lr, betas=(0.5, 0.9), capturable=isinstance(lr, torch.Tensor))

    def one(communicator: ThreadCommunicator) -> Any:
        _, optimizer = trained(communicator, make)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, 0.5)
        optimizer.step()
        schedule.step()
        state = optimizer.gather_state()
        other = ShardedOptimizer(
            torch.nn.Linear(3, 3), communicator, lambda part: torch.optim.AdamW(part, lr=lr)
        )
        other.load_state(state)
        (group,) = other.param_groups
        assert type(group["lr"]) is type(lr)
        other.load_state({name: value for name, value in state.items() if name != "settings"})
        return float(group["lr"]), group["betas"], group["initial_lr"], group["capturable"]

    assert all(
        found == (pytest.approx(0.005), (0.5, 0.9), pytest.approx(0.01), False) for found in run_ranks(2, one)
    )
