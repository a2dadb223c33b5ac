"""Products with weights under autocast: casts, gradients and what is made of the weight's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import muster
from tests.parallel.oracle import SLOW, whole_gradients
from tests.parallel.ranks import RankCommunicator, run_ranks

torch.set_num_threads(1)
WIDTH = 48


class Products(nn.Module):
    """Each way to write a product with a weight, one of which two layers share."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH) / 7)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.first.weight.requires_grad = not frozen

    def forward(self, x: Any, y: Any) -> Any:
        x = self.second(torch.tanh(self.first(x)))
        x = torch.tanh(torch.addmm(self.bias, x.flatten(0, 1), self.turned)) @ self.turned
        return F.mse_loss(F.linear(x, self.second.weight).float(), y.flatten(0, 1))


class Seen(TorchDispatchMode):
    """Operators whose results have a weight's size."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        whole = isinstance(result, torch.Tensor) and result.numel() == WIDTH * WIDTH
        if whole and function._opname not in ("t", "detach"):  # views
            self.ops.append(function._opname)
        return result


def batch() -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(6)
    return torch.randn(4, 3, WIDTH, generator=draw), torch.randn(4, 3, WIDTH, generator=draw)


def on_ranks(size: int, check: Callable[[Any, RankCommunicator], Any], **options: Any) -> list[Any]:
    """What the check makes of the divided module, ``size`` times."""
    net = options.pop("net", None)
    # Made one after the other: ranks are threads, and draw from one generator.
    nets = [Products() if net is None else net for _ in range(size)]

    def one(communicator: RankCommunicator) -> Any:
        settings: dict[str, Any] = {
            "mode": "semi_auto",
            "machine": SLOW,
            "dataset_strategy": "full_batch",
        } | options
        model = muster.parallelize(
            nets[communicator.rank], batch(), communicator=communicator, autocast=torch.bfloat16, **settings
        )
        return check(model, communicator)

    return run_ranks(size, one)


@pytest.mark.parametrize(
    "strategies", [{}, {"first": {"n": 2}, "second": {"k": 2}}, {"first": {"k": 2}, "addmm": {"n": 2}}]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_autocast(strategies: dict[str, Any], frozen: bool) -> None:
    net = Products(frozen=frozen)
    with torch.autocast("cpu", torch.bfloat16):
        want = net(*batch())
    want.backward()

    def check(model: Any, communicator: RankCommunicator) -> Any:
        loss = model(*batch())
        loss.backward()
        return loss.item(), whole_gradients(model)

    for loss, grads in on_ranks(2, check, net=net, strategies=strategies):
        assert loss == pytest.approx(want.item(), rel=1e-2)
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                apart = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
                assert apart < 2e-2, f"{name} is {apart:.3f} off"


def test_each_weight_is_cast_once_in_a_pass_however_many_layers_use_it() -> None:
    def check(model: Any, communicator: RankCommunicator) -> Any:
        for _ in range(2):
            with Seen() as seen:
                loss = model(*batch())
            loss.backward()
        return seen.ops.count("_to_copy")

    assert on_ranks(1, check) == [3]


def test_a_weights_gradient_is_made_once_and_not_copied() -> None:
    """On a CPU its float32 is a cast; a GPU writes it."""

    def check(model: Any, communicator: RankCommunicator) -> Any:
        loss = model(*batch())
        with Seen() as seen:
            loss.backward()
        return sorted(seen.ops)

    uses = 5  # of three weights, two of which have two gradients that are added
    assert on_ranks(1, check) == [["_to_copy"] * uses + ["add"] * 2 + ["mm"] * uses]


def test_evaluation_and_other_precisions_go_torchs_way() -> None:
    def check(model: Any, communicator: RankCommunicator) -> Any:
        with torch.no_grad():
            return model(*batch()).item()

    want = Products()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert on_ranks(2, check)[0] == pytest.approx(want(*batch()).item(), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True])
def test_a_gpu_writes_the_gradient_in_float32_unrounded(turned: bool) -> None:
    from muster.parallel.functions.products import Product

    if not torch.cuda.is_available() or not hasattr(torch.ops.aten.mm, "dtype"):
        pytest.skip("needs a GPU and torch 2.8")
    draw = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(512, 256, generator=draw, device="cuda", dtype=torch.bfloat16)
    shape = (256, 384) if turned else (384, 256)
    weight = torch.randn(shape, generator=draw, device="cuda").requires_grad_()
    grad = torch.randn(512, 384, generator=draw, device="cuda", dtype=torch.bfloat16)
    Product.apply(x, weight, None, weight.detach().bfloat16(), turned, False).backward(grad)
    want = x.double().t() @ grad.double()
    torch.testing.assert_close(weight.grad.double(), want if turned else want.t(), atol=1e-3, rtol=1e-5)
