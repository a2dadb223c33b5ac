"""Modules and loops as people write them: what one process makes of the batch, or a refusal in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import muster
from muster.errors import ArrayError, SettingsError
from muster.parallel.module import ParallelModule
from tests.parallel.as_written import (
    LABELS,
    SPLIT,
    Normed,
    Two,
    X,
    Y,
    divided,
    made,
    part,
    refused,
    same,
    train,
)
from tests.parallel.oracle import SLOW, close
from tests.parallel.ranks import RankCommunicator, run_ranks

# ---------------------------------------------------------------- passes and gradients


def two_passes(model: Any, x: Any, y: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        first, second, third = model(x, y), model(y, x), model(x, x)
        first.backward()
        (second + third).backward()
        optimizer.step()
        losses.append((first + second + third).detach())
    return losses


@pytest.mark.parametrize("settings", [{}, {"strategies": SPLIT}, {"shard_updates": False}])
def test_one_backward_pass_of_several_forward_passes(settings: dict[str, Any]) -> None:
    same(Two, (X, Y), two_passes, **settings)


class Outputs(Two):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        h = self.a(x)
        return {
            "h": h,
            "out": self.b(h),
            "weights": [self.a.weight, self.a.weight.square().sum(1)],
            "mean": h.mean(0),
        }


def outputs_in_turn(model: Any, x: Any, y: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    for number in range(4):
        optimizer.zero_grad()
        found = model(x)
        loss = F.mse_loss(found["out" if number % 2 else "h"], y)
        (loss + sum(w.square().sum() for w in found["weights"]) + found["mean"].sum()).backward()
        seen = [x.detach().clone() for x in (*found["weights"], found["mean"])]
        optimizer.step()
    return seen


@pytest.mark.parametrize("settings", [{}, {"strategies": {"a": {"b0": 2}}}, {"shard_updates": False}])
def test_outputs_that_are_not_of_the_batch_are_whole_and_unused_ones_leave_no_gradient(
    settings: dict[str, Any],
) -> None:
    """As many weights as samples; a parameter without a gradient is not decayed."""
    same(Outputs, (X, Y), outputs_in_turn, fed=1, **settings)


def frozen_later(model: Any, x: Any, y: Any) -> list[Any]:
    model.a.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_what_is_frozen_later_stays_as_it_is() -> None:
    same(Two, (X, Y), frozen_later)


class Frozen(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.requires_grad_(False)


def unfrozen_later(model: Any, x: Any, y: Any) -> list[Any]:
    model.a.weight.requires_grad_(True)
    return train(model, x, y)


def test_what_is_unfrozen_later_is_refused() -> None:
    same(Frozen, (X, Y))
    refused(SettingsError, "a.weight was frozen when the plan was made", Frozen, (X, Y), unfrozen_later)


def test_gradients_of_inputs() -> None:
    bare = made(Two)
    x = X.clone().requires_grad_()
    bare(x, Y).backward()

    def one(communicator: RankCommunicator) -> Any:
        own = part(X, communicator).clone().requires_grad_()
        model = divided(Two, communicator, X.clone().requires_grad_(), Y, strategies=SPLIT)
        model(own, part(Y, communicator)).backward()
        return own.grad

    close("gradient", torch.cat(run_ranks(2, one)), x.grad, 1e-10)

    def unexpected(model: Any, x: Any, y: Any) -> list[Any]:
        return [model(x.clone().requires_grad_(), y)]

    refused(ArrayError, "x requires a gradient", Two, (X, Y), unexpected)


def penalised(model: Any, x: Any, y: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    loss = model(x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    return []


def test_gradients_of_gradients_are_refused() -> None:
    batch = X.clone().requires_grad_(), Y
    refused(RuntimeError, "once_differentiable", Two, batch, penalised, strategies=SPLIT)


# ---------------------------------------------------------------- tensors of the module


def swapped(model: Any, x: Any, y: Any) -> list[Any]:
    """As averages of parameters are put in their place, and buffers set."""
    losses = train(model, x, y)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    losses.append(model(x, y).detach())
    model.norm.running_mean = model.norm.running_mean * 0
    model.eval()
    return [*losses, model(x, y).detach()]


@pytest.mark.parametrize("settings", [{}, {"shard_updates": False}, {"strategies": {"a": {"b0": 2}}}])
def test_tensors_that_are_put_in_the_place_of_others_count(settings: dict[str, Any]) -> None:
    same(Normed, (X, Y), swapped, **settings)


def test_other_parameters_under_the_same_names_are_refused() -> None:
    def functional(model: Any, x: Any, y: Any) -> list[Any]:
        return [torch.func.functional_call(model, {n: p * 0 for n, p in model.named_parameters()}, (x, y))]

    refused(SettingsError, "weight was replaced by another tensor", Two, (X, Y), functional)
    refused(
        SettingsError,
        "cannot be copied",
        Two,
        (X, Y),
        lambda model, *_: [torch.optim.swa_utils.AveragedModel(model)],
    )


def regularised(model: Any, x: Any, y: Any) -> list[Any]:
    """With a term of the loss that reads parameters outside of the module."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, y) + 0.1 * model.b.bias.norm()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    "settings",
    [{"strategies": {"b": {"n": 2}}, "shard_updates": False}, {"shard_updates": True}],
    ids=["parts", "divided updates"],
)
def test_losses_outside_read_whole_parameters_or_none(settings: dict[str, Any]) -> None:
    same(Two, (X, Y), regularised, mode="data_parallel", batch_norm="synchronised")
    words = "a loss outside the recorded forward pass uses b.bias, of which this rank has only a part"
    refused(SettingsError, words, Two, (X, Y), regularised, **settings)
    refused(
        SettingsError,
        words,
        Two,
        (X, Y),
        lambda model, *_: torch.autograd.grad(model.b.bias.sum(), model.b.bias),
        **settings,
    )


class Extra(Two):
    """Parameters and buffers that the forward pass does not use, or does not save; tied and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.c, self.d = nn.Linear(2, 2), nn.Linear(8, 8), nn.Linear(8, 8)
        self.d.weight = self.c.weight
        self.c.weight.requires_grad_(False)
        self.register_buffer("offset", torch.arange(8.0), persistent=False)
        self.register_buffer("note", torch.ones(3))

    def between(self, h: Any) -> Any:
        return self.d(self.c(h + self.offset))


def loaded(model: Any, x: Any, y: Any) -> list[Any]:
    whole = model.full_state_dict() if isinstance(model, ParallelModule) else model.state_dict()
    loading = model.load_full_state_dict if isinstance(model, ParallelModule) else model.load_state_dict
    whole = {name: value.clone() for name, value in whole.items()}
    losses = train(model, x, y)
    loading({name: value * 2 for name, value in whole.items()})
    return [*losses, model(x, y).detach()]


def test_whole_weights_are_all_that_the_module_saves() -> None:
    same(Extra, (X, Y), loaded)


class SharedNorm(nn.Module):
    """One layer under two names, called twice, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.b = self.a

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.b(self.a(x)), y)


class Averages(Two):
    """A buffer that the forward pass changes twice, and reads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def between(self, h: Any) -> Any:
        h = h - 0.1 * self.mean
        self.mean.mul_(0.9).add_(0.1 * h.mean(0).detach())
        return h - self.mean


class Rolled(Two):
    def between(self, h: Any) -> Any:
        return torch.roll(h, 3)


class Smoothed(Two):
    def forward(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.b(self.a(x)), y, label_smoothing=0.1)


class Distilled(Two):
    """A part that is not trained through, as a teacher is."""

    def forward(self, x: Any, y: Any) -> Any:
        with torch.no_grad():
            target = torch.tanh(self.a(y)) * 2
        return F.mse_loss(self.b(self.a(x)), target) + F.mse_loss(self.a(x), y)


class SamePadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(4, 6, 3, padding="same", groups=2)
        self.norm = nn.InstanceNorm1d(6, affine=True)

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.norm(self.a(x.view(8, 4, 2))).flatten(1)[:, :8], y)


class Regrouped(Two):
    """Half as many rows, of which two ranks cannot take the same number."""

    def forward(self, x: Any, y: Any) -> Any:
        h = torch.tanh(self.a(x)).view(-1, 16)[:, 4:12]
        return F.mse_loss(self.b(h), y.reshape(-1, 16)[:, :8])


class Activated(Two):
    """In-place operators on views that nothing else sees, and on tensors that no view shows."""

    def between(self, h: Any) -> Any:
        h = F.relu(h.view(8, 2, 4), inplace=True).swapaxes(1, 2).reshape(8, 8) * 2
        copy = torch.zeros_like(h)
        copy.copy_(h.mean(0))
        h[torch.tensor([1, 2])] = 3.0
        return F.dropout(h, 0.0).mul_(2) + copy.add_(1)


class Recurrent(Two):
    """A layer of torch's that keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(4, 4, batch_first=True)

    def between(self, h: Any) -> Any:
        return self.body(h.view(-1, 2, 4))[0].flatten(1)


class Renewed(Two):
    """An attribute that is computed again from parameters in each pass, as torch's older weight_norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = self.a.weight * 2

    def between(self, h: Any) -> Any:
        self.scaled = self.a.weight * 2
        return h @ self.scaled


class AllDropped(Two):
    def between(self, h: Any) -> Any:
        return F.dropout(h, 1.0) + h


class Masked(Two):
    """Attention with a row that sees nothing, and dropout so small that it drops nothing."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask

    def between(self, h: Any) -> Any:
        seen = (torch.arange(4) != 1)[:, None].expand(4, 4)
        if self.mask == "float":
            seen = torch.where(seen, 0.0, -torch.inf).to(h.dtype)
        h = h.view(-1, 1, 4, 2)
        return F.scaled_dot_product_attention(h, h, h, seen, dropout_p=1e-13).reshape(-1, 8)


class Overwritten(Two):
    """No gradient passes, so that it is zeros, which the optimizer counts."""

    def between(self, h: Any) -> Any:
        h = h * 1
        h.copy_(torch.ones_like(h[0]))
        return h


def normalised(kind: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Two()
        kind(module.a)
        return module

    return make


@pytest.mark.parametrize(
    ("make", "batch", "settings"),
    [
        (SharedNorm, (X, Y), {}),
        (Averages, (X, Y), {}),
        (Rolled, (X, Y), {}),
        (Smoothed, (X, LABELS), {}),
        (Smoothed, (X, LABELS), {"strategies": {"b": {"n": 2}}}),
        (Distilled, (X, Y), {}),
        (Distilled, (X, Y), {"strategies": {"b": {"n": 2}}}),
        (SamePadding, (X, Y), {"strategies": {"a": {"b": 2}}}),
        (Regrouped, (X[:6], Y[:6]), {"mode": "semi_auto"}),
        (Regrouped, (X[:6], Y[:6]), {"strategies": {"a": {"b0": 2}}}),
        (Activated, (X, Y), {}),
        (Overwritten, (X, Y), {}),
        (AllDropped, (X, Y), {}),
        (lambda: Masked("bool"), (X, Y), {}),
        (lambda: Masked("float"), (X, Y), {}),
        (normalised(parametrizations.weight_norm), (X, Y), {}),
        (Renewed, (X, Y), {}),
        (Recurrent, (X, Y), {}),
    ],
    ids=[
        "shared",
        "averages",
        "rolled",
        "ignored",
        "ignored split",
        "teacher",
        "teacher split",
        "same",
        "regrouped",
        "regrouped split",
        "activated",
        "overwritten",
        "all dropped",
        "masked",
        "masked by sums",
        "weight norm",
        "renewed",
        "recurrent",
    ],
)
def test_what_modules_are_made_of(make: Any, batch: Any, settings: dict[str, Any]) -> None:
    same(make, batch, **settings)


# ---------------------------------------------------------------- arguments


class Scaled(Two):
    def forward(self, batch: Any, scale: float = 1.0) -> Any:
        return F.mse_loss(self.b(self.a(batch["x"])) * scale, batch["y"])


def test_dictionaries_of_tensors() -> None:
    bare = made(Scaled)
    want = bare({"x": X, "y": Y}, 2.0)

    def one(communicator: RankCommunicator) -> Any:
        batch = {"y": part(Y, communicator), "x": part(X, communicator)}
        model = muster.parallelize(made(Scaled), (batch, 2.0), communicator=communicator, machine=SLOW)
        with pytest.raises(ArrayError, match=r"Argument 2 was 2.0 when the plan was made, and is 3.0 now"):
            model(batch, 3.0)
        with pytest.raises(ArrayError, match="another structure"):
            model({"x": batch["x"]}, 2.0)
        with pytest.raises(ArrayError, match="another structure"):
            model(batch, 2.0, X)
        with pytest.raises(ArrayError, match=r"as float64 from each rank; it got float32"):
            model({name: x.float() for name, x in batch.items()}, 2.0)
        return model(batch, 2.0)

    for got in run_ranks(2, one):
        close("loss", got.detach(), want.detach(), 1e-10)


# ---------------------------------------------------------------- training and evaluation


def evaluated(model: Any, *batch: Any) -> list[Any]:
    losses = train(model, *batch)
    model.eval()
    losses += [model(*batch).detach(), model(*batch).detach()]
    model.train()
    return losses + train(model, *batch)


class FrozenNorm(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


def test_evaluation_counts_no_batches_and_parts_may_stay_in_it() -> None:
    same(Normed, (X, Y), evaluated)

    def stays(model: Any, x: Any, y: Any) -> list[Any]:
        return train(model, x, y)

    same(FrozenNorm, (X, Y), stays)


class ByMode(Two):
    def between(self, h: Any) -> Any:
        return h * 2 if self.training else h


class AlwaysDropped(Two):
    def between(self, h: Any) -> Any:
        return F.dropout(h, 0.5)


def _with(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    class With(Two):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def between(self, h: Any) -> Any:
            return self.layer(h.view(8, 8, 1)).view(8, 8)

    return With


class InstanceNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.norm(self.a(x).view(8, 4, 2)).view(8, 8), y)


@pytest.mark.parametrize(
    "make",
    [
        ByMode,
        AlwaysDropped,
        _with(lambda: nn.Dropout1d(0.5)),
        _with(nn.AlphaDropout),
        _with(nn.RReLU),
        InstanceNormed,
    ],
    ids=["training flag", "dropout", "whole channels", "alpha dropout", "rrelu", "instance norm"],
)
def test_an_evaluation_that_is_another_graph_is_refused(make: Any) -> None:
    refused(SettingsError, "this module computes something else in evaluation", make, (X, Y), evaluated)


def test_modes_that_a_recorded_pass_would_not_follow_are_refused() -> None:
    def later(model: Any, x: Any, y: Any) -> list[Any]:
        model.norm.eval()
        return train(model, x, y)

    refused(SettingsError, "norm is not in the mode of the whole module", Normed, (X, Y), later)
    refused(SettingsError, r"call net.train\(\) first", lambda: Normed().eval(), (X, Y))
