"""What reads a tensor's memory by strides does the same with parts, and with what came from other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from muster import parallelize
from muster.errors import ArrayError
from muster.parallel.planning.problem import Pin
from muster.parallel.planning.search import solve
from muster.parallel.untraced import TraceError
from tests.parallel.oracle import Case
from tests.parallel.ranks import RankCommunicator, run_ranks

torch.set_num_threads(1)


class Layer(nn.Module):
    """A linear layer and what is done with its result."""

    def __init__(self, then: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.then = nn.Linear(8, 8).double(), then

    def forward(self, x: Any) -> Any:
        return self.then(self.linear(x))


ANGLES = torch.polar(torch.ones(4, 4).double(), torch.arange(16.0).double().view(4, 4) / 10)


def turned(x: Any) -> Any:
    """Rotary embeddings by complex numbers, of [samples, tokens, width]."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * ANGLES).flatten(-2).pow(3).mean()


def turned_by_heads(x: Any) -> Any:
    """The same of transposed heads, whose parts have other strides than the whole."""
    heads = x.view(4, 4, 2, 4).permute(0, 2, 3, 1).transpose(2, 3)
    pairs = torch.view_as_complex(heads.reshape(4, 2, 4, 2, 2))
    turned = torch.view_as_real(pairs * ANGLES[:, :2]).flatten(3)
    return turned.matmul(heads.transpose(2, 3)).square().mean()


def conjugated(x: Any) -> Any:
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    products = (pairs * pairs.transpose(0, 1).conj()).sum(0)
    return torch.view_as_real(products.conj() * (1 + 2j)).square().mean() + pairs.imag.pow(3).mean()


def squared(part: Any) -> Any:
    return part.square().sum()


FORWARD: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "as_strided": (lambda h: squared(h.as_strided((3, 4), (8, 2), 1)) + squared(h), (8, 8)),
    "as_strided of a transposed tensor": (lambda h: squared(h.t().as_strided((3, 4), (1, 2), 1)), (8, 8)),
    "as_strided of a part": (lambda h: squared(h[2:6].as_strided((3, 4), (8, 1), 17)), (8, 8)),
    "as_strided with repeats": (lambda h: squared(h.as_strided((8, 3), (8, 0))), (8, 8)),
    "as_strided of patches": (
        lambda h: squared(h.as_strided((4, 2, 3, 4), (32, 8, 2, 1)) * ANGLES.real[1]), (4, 4, 8)),
    "as_strided that copies": (
        lambda h: squared(torch.ops.aten.as_strided_copy(h.t(), [4, 2], [1, 8], 3)), (8, 8)),
    "another dtype": (lambda h: squared(h) * h.t().contiguous().view(torch.int64).sum().bool(), (8, 8)),
    "complex rotary embeddings": (turned, (4, 4, 8)),
    "complex rotary embeddings of heads": (turned_by_heads, (4, 4, 8)),
    "conjugates": (conjugated, (4, 4, 8)),
}  # fmt: skip


def _first(key: str) -> Pin:
    return lambda _, state: state.key == key


@pytest.mark.parametrize("name", FORWARD)
def test_strides_are_those_of_one_process(name: str) -> None:
    then, shape = FORWARD[name]
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(shape, generator=draw, dtype=torch.float64),)]
    one = Case(name, module=Layer(then), batches=batches)
    for axis in ("b0", "n"):
        pinned = one.problem((2,), {"linear": _first(axis)})
        solution = solve(pinned)
        assert solution is not None
        one.check(one.plan(pinned, solution.choice))
    for mesh, seed in (((2,), 1), ((2, 2), 13), ((4,), 2), ((4,), 3)):
        one.check(one.random_plan(mesh, seed))


class Strided(nn.Module):
    """Reads its input by strides, in the default mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(4, 4).double())

    def forward(self, x: Any) -> Any:
        return (x.as_strided((4, 4), (8, 2)) * self.weight).square().sum() + x.sum()


def test_an_input_in_the_default_mode() -> None:
    batch = torch.arange(32.0).double().view(4, 8)
    module = Strided()
    want = module(batch)

    def go(communicator: RankCommunicator) -> Any:
        part = batch.chunk(2)[communicator.rank]
        model = parallelize(Strided(), (part,), communicator=communicator)
        loss = model(part).detach()
        with pytest.raises(ArrayError, match=r"reads x by strides, .* Pass it as \.contiguous\(\)"):
            model(torch.rand(8, 2).double().t())
        return loss

    for loss in run_ranks(2, go):
        torch.testing.assert_close(loss, want.detach())


def scattered(h: Any) -> Any:
    return torch.as_strided_scatter(h, torch.zeros(4, 2).double(), (4, 2), (8, 1)).sum()


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (
            lambda h: h[:, :4].as_strided((8, 4), (8, 1)).sum(),
            "reads memory outside its tensor's own elements",
        ),
        (
            lambda h: h[4:].as_strided((8, 4), (8, 1), 0).sum(),
            "outside its tensor's own elements by as_strided",
        ),
        (lambda h: h.sum(0, True).expand(8, 8).as_strided((8,), (1,)).sum(), r"Call \.contiguous\(\) before"),
        (scattered, "calls as_strided_scatter, for which there is no rule"),
    ],
)
def test_what_cannot_be_read_by_strides_is_refused(then: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(TraceError, match=rf"test_strides\.py:\d+ .*{words}") as raised:
        Case("refused", module=Layer(then), batches=[(torch.rand(8, 8).double(),)])
    assert raised.value.line.startswith("test_strides.py:")
    assert raised.value.remedy
