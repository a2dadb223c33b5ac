"""The sharded optimizer, among threads on the CPU."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import ArrayError, SettingsError
from muster.torch.data_parallel import DataParallel
from muster.torch.sharded_optimizer import ShardedOptimizer
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function

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
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS[kind])
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
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["adamw"])
        train(net, optimizer, slice(communicator.rank, None, 2), BATCHES[:4])
        return {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()

    state, moments = run_ranks(2, before)[0]

    def after(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        net.load_state_dict(state)
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["adamw"])
        optimizer.load_state_dict(moments)
        train(net, optimizer, slice(communicator.rank, None, 3), BATCHES[4:])
        return net.state_dict()

    for final in run_ranks(3, after):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(final[name], value, rtol=0, atol=5e-5)


def trained(communicator: ThreadCommunicator, make: Any, width: int = 3) -> tuple[Any, ShardedOptimizer]:
    net = torch.nn.Linear(width, 3)
    optimizer = ShardedOptimizer(net, communicator=communicator, make=make)
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
            ShardedOptimizer(linear_net(), communicator=communicator, make=make)

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
            ShardedOptimizer(give(model), communicator=communicator, make=MAKERS["sgd"])

    run_ranks(2, one)


def test_a_module_in_a_sharded_optimizer_is_refused_by_data_parallel() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = linear_net()
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])
        with pytest.raises(SettingsError, match=r"a ShardedOptimizer averages the gradient of 1\.weight"):
            DataParallel(net, communicator=communicator)
        del optimizer
        DataParallel(net, communicator=communicator)

    run_ranks(2, one)


def test_the_state_of_another_module_is_refused() -> None:
    """Also where both fill as many elements, gaps included."""

    def one(communicator: ThreadCommunicator) -> None:
        _, optimizer = trained(communicator, MAKERS["adamw"])
        state = optimizer.state_dict()
        for other, words in (
            (torch.nn.Linear(4, 3), r"exp_avg of parameter 0 has the shape \[3, 3\] there and \[3, 4\] here"),
            (
                torch.nn.Linear(3, 3, bias=False),
                r"has parameter groups with \[2\] parameters, and this optimizer \[1\]",
            ),
        ):
            fresh = ShardedOptimizer(other, communicator=communicator, make=MAKERS["adamw"])
            with pytest.raises(ArrayError, match=words):
                fresh.load_state_dict(state)
        state["state"][1]["step"] += 1
        with pytest.raises(ArrayError, match=r"step is 1\.0 for parameter 0 and 2\.0 for parameter 1"):
            optimizer.load_state_dict(state)

    run_ranks(2, one)


def test_state_that_was_saved_before_the_first_step_is_taken() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        fresh = ShardedOptimizer(torch.nn.Linear(3, 3), communicator=communicator, make=MAKERS["adamw"])
        state = fresh.state_dict()
        net, optimizer = trained(communicator, MAKERS["adamw"])
        optimizer.load_state_dict(state)
        assert not optimizer.inner.state
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    run_ranks(2, one)


def test_the_optimizer_takes_its_state_as_it_needs_it() -> None:
    """A checkpoint may have been read to another device: fused optimizers want their step count on theirs."""

    def one(communicator: ThreadCommunicator) -> Any:
        _, optimizer = trained(communicator, lambda part: torch.optim.AdamW(part, fused=True))
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["step"] = values["step"].to(torch.float64)
        optimizer.load_state_dict(state)
        (values,) = optimizer.inner.state.values()
        return values["step"]

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
            ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])

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
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])
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
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])
        net(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        return net[1].running_mean.tolist()

    assert run_ranks(2, one) == [[0, 0], [1, 1]]


def test_a_gradient_that_was_set_to_none_is_zero_and_not_that_of_the_step_before() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        optimizer = ShardedOptimizer(
            net, communicator=communicator, make=lambda part: torch.optim.SGD(part, lr=1.0)
        )
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
        optimizer = ShardedOptimizer(
            net, communicator=communicator, make=lambda part: torch.optim.SGD(part, lr=1.0)
        )
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
        ShardedOptimizer(net, communicator=object(), make=MAKERS["sgd"])  # type: ignore[arg-type]


def test_a_state_that_the_module_loads_later_counts() -> None:
    """Each rank's part of it was overwritten in the next step, by what the optimizer remembered."""

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        optimizer = ShardedOptimizer(
            net, communicator=communicator, make=lambda part: torch.optim.SGD(part, lr=0.0)
        )
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
            communicator=communicator,
            make=lambda part: torch.optim.SGD(part, lr=1.0, momentum=0.9),
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
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(net(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(SettingsError, match="GradScaler cannot work with a ShardedOptimizer"):
            scaler.step(optimizer)

    run_ranks(1, one)


def test_an_inner_optimizer_of_the_modules_own_parameters_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = torch.nn.Linear(3, 3)
        with pytest.raises(SettingsError, match="must train what it is given, and that alone"):
            ShardedOptimizer(
                net, communicator=communicator, make=lambda part: torch.optim.SGD(net.parameters(), lr=0.1)
            )

    run_ranks(1, one)


def test_a_module_that_was_moved_since_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = torch.nn.Conv2d(2, 2, 3)
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])
        net.to(memory_format=torch.channels_last)
        with pytest.raises(SettingsError, match="moved or converted after its ShardedOptimizer was made"):
            optimizer.step()

    run_ranks(1, one)


def test_learning_rate_and_momenta_are_saved_with_the_state() -> None:
    """A scheduler that goes on multiplies what the rate was, not what it began with."""

    def one(communicator: ThreadCommunicator) -> Any:
        _, optimizer = trained(communicator, lambda part: torch.optim.AdamW(part, lr=1e-2, betas=(0.5, 0.9)))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        schedule.step()
        _, other = trained(communicator, lambda part: torch.optim.AdamW(part, lr=0.3))
        other.load_state_dict(optimizer.state_dict())
        rate = other.inner.param_groups[0]["lr"]
        goes_on = torch.optim.lr_scheduler.ExponentialLR(other, 0.5, last_epoch=1)
        for group in other.inner.param_groups:
            group["lr"] = rate  # before torch 2.7 the scheduler's beginning was a step of its own
        other.step()
        goes_on.step()
        (group,) = other.inner.param_groups
        return group["lr"], group["betas"], group["initial_lr"], goes_on.get_last_lr()

    for rate, betas, first, last in run_ranks(2, one):
        assert betas == (0.5, 0.9) and first == pytest.approx(0.01)
        assert rate == pytest.approx(0.01 * 0.5**2) and last == [rate]


# ---------------------------------------------------------------- groups


def grouped(module: Any) -> list[dict[str, Any]]:
    """No decay for biases, and a rate of their own."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.2},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 0.003},
    ]


def adamw(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=1e-2)


def sharded(net: Any, communicator: ThreadCommunicator) -> ShardedOptimizer:
    return ShardedOptimizer(net, communicator=communicator, make=adamw, groups=grouped(net))


@pytest.mark.parametrize("ranks", [2, 3])
def test_its_state_with_groups_is_that_of_an_undivided_optimizer_both_ways(ranks: int) -> None:
    """Saved by so many ranks, gone on with undivided; and the other way round."""
    alone = linear_net()
    whole = adamw(grouped(alone))
    train(alone, whole, slice(None), BATCHES[:4])
    middle = {name: value.clone() for name, value in alone.state_dict().items()}
    state = copy.deepcopy(whole.state_dict())
    train(alone, whole, slice(None), BATCHES[4:])

    def one(communicator: ThreadCommunicator) -> Any:
        part = slice(communicator.rank, None, ranks)
        net = linear_net()
        first = sharded(net, communicator)
        train(net, first, part, BATCHES[:4])
        written = first.state_dict()
        net.load_state_dict(middle)
        second = sharded(net, communicator)
        second.load_state_dict(state)
        train(net, second, part, BATCHES[4:])
        return copy.deepcopy(written), net.state_dict()

    for written, final in run_ranks(ranks, one):
        assert written["param_groups"] == state["param_groups"]
        assert written["state"].keys() == state["state"].keys()
        for number, values in written["state"].items():
            torch.testing.assert_close(values, state["state"][number], rtol=1e-3, atol=1e-6)
        adamw(grouped(linear_net())).load_state_dict(written)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(final[name], value, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda net: grouped(net)[:1], r"1\.bias is in no parameter groups"),
        (lambda net: [*grouped(net), grouped(net)[1]], r"1\.bias is in 2 parameter groups"),
        (lambda net: [*grouped(net), {"params": []}], "group 2 has no parameters"),
        (
            lambda net: [*grouped(net), {"params": torch.nn.Parameter(torch.ones(1))}],
            "group 2 has some that are none of the module's, or are frozen",
        ),
    ],
)
def test_groups_that_are_not_all_of_the_module_are_refused(groups: Any, words: str) -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = linear_net()
        with pytest.raises(SettingsError, match=words):
            ShardedOptimizer(net, communicator=communicator, make=adamw, groups=groups(net))

    run_ranks(1, one)


def test_ranks_with_other_groups_are_told_so() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = linear_net()
        groups = grouped(net) if communicator.rank else [{"params": net.parameters()}]
        with pytest.raises(ArrayError, match=r"differs from rank 0's: .*of group"):
            ShardedOptimizer(net, communicator=communicator, make=adamw, groups=groups)

    run_ranks(2, one)


def test_groups_are_not_added_later() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        _, optimizer = trained(communicator, MAKERS["sgd"])
        with pytest.raises(SettingsError, match="takes all its groups when it is made"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})

    run_ranks(1, one)


def test_a_step_may_compute_the_loss_itself() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = torch.nn.Linear(3, 3)
        optimizer = ShardedOptimizer(net, communicator=communicator, make=MAKERS["sgd"])
        before = net.bias.detach().clone()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(torch.ones(1, 3)).sum()
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach()), (before - net.bias.detach()).tolist()

    for loss, moved in run_ranks(2, one):
        assert loss == loss and moved == [pytest.approx(0.05)] * 3


def test_the_session_is_its_second_argument_as_of_a_data_parallel() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        session = SimpleNamespace(communicator=communicator)
        net = torch.nn.Linear(3, 3)
        optimizer = ShardedOptimizer(net, session, make=MAKERS["sgd"])
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert any(name == "reduce_scatter" for name, _ in communicator.calls)

    run_ranks(2, one)
