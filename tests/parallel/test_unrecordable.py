"""What a recorded pass would not show is refused by its line, and trains data parallel instead."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.errors import SettingsError
from muster.parallel.untraced import TraceError
from tests.parallel.as_written import (
    Step,
    Two,
    X,
    Y,
    divided,
    part,
    refused,
    same,
)
from tests.parallel.ranks import RankCommunicator, run_ranks


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return -grad


class Adversarial(Two):
    def between(self, h: Any) -> Any:
        return _Reversed.apply(h)


class Hooked(Two):
    def between(self, h: Any) -> Any:
        h.register_hook(lambda grad: grad * 0.1)
        return h


class Heated(Two):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def between(self, h: Any) -> Any:
        return h * self.temperature


def heats(model: Any, x: Any, y: Any) -> list[Any]:
    model.note = "the script's own"
    model.temperature = 0.5
    return []


def damps(model: Any, x: Any, y: Any) -> list[Any]:
    model.a.weight.register_hook(lambda grad: grad * 0.1)
    return [model(x, y)]


def listens(model: Any, x: Any, y: Any) -> list[Any]:
    model.a.register_forward_hook(lambda *_: None)
    return [model(x, y)]


def casts(model: Any, x: Any, y: Any) -> list[Any]:
    with torch.autocast("cpu", torch.float16):
        return [model(x, y)]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (heats, "temperature was recorded with its old value"),
        (damps, "a.weight has a hook, which a recorded graph cannot run"),
        (listens, "a has a hook, which a recorded graph cannot run"),
        (casts, "a GradScaler sees the gradients of one rank's parts"),
    ],
)
def test_what_a_recorded_pass_would_not_follow_is_refused_later_too(step: Step, words: str) -> None:
    refused(SettingsError, words, Heated, (X, Y), step)


class HookedParameter(Two):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.a.weight.register_hook(lambda grad: grad * 0.1)


class HookedLayer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda *_: None)


class Counting(Two):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def between(self, h: Any) -> Any:
        self.passes += 1
        return h * self.passes


class Complex(Two):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def between(self, h: Any) -> Any:
        return (h.to(self.c.dtype) @ self.c).real


class Written(Two):
    def between(self, h: Any) -> Any:
        out = torch.zeros(8, 8, dtype=h.dtype)
        torch.mul(h.detach(), 2, out=out)
        return h + out


class Skipping(Two):
    def between(self, h: Any) -> Any:
        return h * 2 if random.random() < 0.5 else h


class Noisy(Two):
    def between(self, h: Any) -> Any:
        return h * np.random.rand()


class TiedByMemory(Two):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.b.weight.data = self.a.weight.data


class Selecting(Two):
    def between(self, h: Any) -> Any:
        return h - h[h > 0].mean()


class Unregistered(Two):
    def __init__(self) -> None:
        super().__init__()
        self.c = torch.rand(8, 8, dtype=torch.float64, requires_grad=True)

    def between(self, h: Any) -> Any:
        return h @ self.c


class Cast(Two):
    def between(self, h: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.a(h)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Adversarial, "has a gradient of its own, _Reversed"),
        (Hooked, "hangs a hook on a tensor"),
        (HookedParameter, "The parameter a.weight has a hook"),
        (HookedLayer, "b has a hook on its gradient"),
        (Counting, "changes Counting.passes"),
        (Complex, "The parameter c is complex"),
        (Written, "writes into its argument out"),
        (Cast, r"holds a torch.autocast of its own"),
        (Skipping, "draws random numbers by Python or NumPy"),
        (Noisy, "draws random numbers by Python or NumPy"),
        (TiedByMemory, r"a\.weight and b\.weight share memory"),
        (Selecting, r"as_written\.py:\d+ makes a tensor whose shape depends on values"),
        (Unregistered, "c requires a gradient, but is not a parameter"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_recorded_pass_would_leave_out_is_refused(make: Any, words: str) -> None:
    refused(TraceError, words, make, (X, Y))


def doing(change: Callable[[Any, Any], Any]) -> Callable[[], nn.Module]:
    """A module that does that to itself, and to what is between its layers."""

    class Doing(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(8))
            self.held = torch.ones(8)

        def between(self, h: Any) -> Any:
            h = h * 1
            change(self, h)
            return h * self.mean * self.held

    return Doing


@pytest.mark.parametrize(
    "change",
    [
        lambda _, h: h[:, 0].mul_(2),
        lambda _, h: h.view(8, 2, 4)[:, 0].add_(1),
        lambda _, h: h.swapaxes(0, 1).mul_(torch.arange(8)),
        lambda _, h: h.diagonal().mul_(2),
        lambda _, h: h.unfold(1, 4, 4).mul_(2),
        lambda _, h: h.mT.mul_(2),
        lambda _, h: h.as_strided((8,), (9,)).mul_(2),
        lambda _, h: h.tensor_split(2, 1)[0].mul_(2),
        lambda _, h: torch.atleast_3d(h).mul_(2),
        lambda _, h: torch.einsum("ij->ji", h).mul_(2),
        pytest.param(
            lambda _, h: F.dropout(F.dropout(h, 0.0), 0.5, False).mul_(2),
            marks=pytest.mark.skipif(torch.__version__ >= (2, 14), reason="what torch 2.14 records is right"),
        ),
        lambda self, _: self.mean[0].add_(1),
        lambda self, _: self.mean[2:4].copy_(torch.ones(2)),
    ],
    ids=[
        "rows",
        "view",
        "swapaxes",
        "diagonal",
        "unfold",
        "mT",
        "strided",
        "split",
        "atleast",
        "einsum",
        "dropout",
        "buffer",
        "part",
    ],
)
def test_changes_through_a_view_are_refused_by_their_line(change: Callable[[Any, Any], Any]) -> None:
    words = r"as_written\.py:\d+ changes a tensor in place that is also"
    refused(TraceError, words, doing(change), (X, Y))


class Normalising(Two):
    def forward(self, x: Any, y: Any) -> Any:
        return super().forward(x.sub_(0.5), y)


class NormalisingPart(Two):
    def forward(self, x: Any, y: Any) -> Any:
        return super().forward(x.double().view(-1, 4).sub_(0.5).view(-1, 8), y)


def test_arguments_that_the_forward_pass_changes_are_refused() -> None:
    """The caller's own tensors change in one process."""
    refused(TraceError, r"test_unrecordable\.py:\d+ changes an argument", Normalising, (X, Y))
    refused(TraceError, "changes a tensor in place that is also seen", NormalisingPart, (X, Y))


@torch.library.custom_op("muster_tests::doubled", mutates_args={"x"})  # type: ignore[untyped-decorator]
def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("muster_tests::noted", mutates_args=())  # type: ignore[untyped-decorator]
def noted(x: torch.Tensor) -> None:
    return None


noted.register_fake(lambda x: None)


def noting(_: Any, h: Any) -> None:
    with torch.no_grad():
        noted(h)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, h: torch._foreach_mul_([h], 2.0), "writes into its argument self"),
        (lambda self, _: torch._foreach_add_([self.mean], 1.0), "writes into its argument self"),
        (lambda _, h: doubled(h.detach()), "writes into its argument x"),
        (noting, "no tensor"),
        (lambda self, _: self.held.add_(1), "and has not registered. Make it a buffer"),
    ],
    ids=["foreach", "foreach on a buffer", "custom", "nothing", "no buffer"],
)
def test_operators_without_a_result_and_tensors_that_are_no_buffers_are_refused(
    change: Callable[[Any, Any], Any], words: str
) -> None:
    refused(TraceError, words, doing(change), (X, Y))


def infers(_: Any, h: Any) -> Any:
    with torch.inference_mode():
        return h * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, h: torch.vmap(lambda row: row * row.sum())(h), "transforms a function"),
        (lambda _, h: torch.func.grad(lambda x: x.square().sum())(h), "transforms a function"),
        (lambda _, h: torch.func.jvp(torch.sin, (h,), (h,)), "transforms a function"),
        (lambda _, h: torch.func.functionalize(torch.sin)(h), "transforms a function"),
        (infers, "has a torch.inference_mode"),
        (torch.inference_mode()(infers), "has a torch.inference_mode"),
    ],
    ids=["vmap", "grad", "jvp", "functionalize", "inference", "inference as a decorator"],
)
def test_what_a_graph_cannot_show_is_refused_by_its_line(change: Any, words: str) -> None:
    refused(TraceError, rf"{words}.* at test_unrecordable.py:\d+", doing(change), (X, Y))


class Remembering(Two):
    """What changes is not an attribute, but what one holds."""

    def __init__(self, change: Callable[[Any, Any], Any] = lambda *_: None) -> None:
        super().__init__()
        self.change = change
        self.stats: dict[str, Any] = {"mean": torch.ones(8), "passes": 0}
        self.history: list[Any] = []
        self.nested = {"sizes": (1, [2])}
        self.kept, self.note = torch.ones(8), types.SimpleNamespace(passes=0)
        self.cache: Any = None

    def between(self, h: Any) -> Any:
        self.change(self, h)
        return h * self.kept * self.stats["mean"]


def decays(self: Any, h: Any) -> None:
    self.kept = self.kept * 0.5


def remembers(self: Any, h: Any) -> None:
    if not hasattr(self, "average"):
        self.average = h.detach().mean(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda self, h: self.stats.update(mean=h.detach().mean(0)), r"Remembering.stats\['mean'\]"),
        (lambda self, _: self.stats.update(passes=self.stats["passes"] + 1), r"stats\['passes'\]"),
        (lambda self, h: self.stats.update(last=h), r"stats\['last'\]"),
        (lambda self, h: self.history.append(h.detach().mean()), "Remembering.history"),
        (lambda self, _: self.nested["sizes"][1].append(2), r"nested\['sizes'\]\[1\]"),
        (lambda self, _: setattr(self.note, "passes", self.note.passes + 1), "note.passes"),
        (decays, "Remembering.kept"),
        (remembers, "Remembering.average"),
    ],
    ids=["tensor", "number", "new", "list", "nested", "object", "tensor attribute", "looked for"],
)
def test_what_attributes_hold_and_the_forward_pass_changes_is_refused(change: Any, words: str) -> None:
    refused(TraceError, f"The forward pass changes .*{words}", lambda: Remembering(change), (X, Y))


class Passing(Remembering):
    """What is put away in a pass and not looked for in the next one changes nothing."""

    def between(self, h: Any) -> Any:
        self.cache, self.shape = h, tuple(h.shape)
        h = self.cache * len(self.shape)
        self.cache = None
        return super().between(h)


def test_attributes_that_the_next_pass_does_not_see_are_no_matter() -> None:
    same(Passing, (X, Y))


def counts_all(self: Any, h: Any) -> None:
    self.stats["passes"] += 1
    self.history.append(1)
    self.kept.add_(1)
    self.note.passes += 1


def test_what_is_refused_trains_data_parallel_instead() -> None:
    """And is as it was: nothing was counted while it was recorded."""

    def one(communicator: RankCommunicator) -> Any:
        model = divided(lambda: Remembering(counts_all), communicator, X, Y)
        assert isinstance(model, muster.DataParallel)
        model(part(X, communicator), part(Y, communicator))
        net = model.module
        return net.stats["passes"], net.history, net.kept.tolist(), net.note.passes

    assert run_ranks(2, one) == [(1, [1], [2.0] * 8, 1)] * 2
