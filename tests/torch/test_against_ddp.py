"""DataParallel against torch's DistributedDataParallel (gloo), bit for bit: one table of what users train.

Two processes serve the whole table. In each case both wrappers train the same module from the same beginning
(rank 0's; each rank makes another one) on the same batches (others on each rank), and losses, gradients and
parameters must be the same bits, on both ranks, whether gradients are packed or reduced where they are. With
two ranks that can be asked: a sum of two numbers has one order, and halves are exact. So no case has a
tolerance.

Buffers are compared on rank 0 alone: DistributedDataParallel brings rank 0's to the others before a forward
pass, DataParallel after a backward pass, so that in the end the others' are one update apart. Left out is
what DistributedDataParallel does not reduce (a second backward pass through one graph; test_torch_modules.py
has it) or takes on GPUs only (SyncBatchNorm; it has its own tests).
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.contracts.agents import Agents, Place

RANKS = 2


class Side:
    """One of the two wrappers, for a case; ours with ``caps`` of its own."""

    def __init__(self, place: Place, ours: bool, **caps: int) -> None:
        self.ours, self.rank, self._communicator, self._caps = ours, place.comm.rank, place.comm, caps
        self.seen: dict[str, Any] = {}

    def wrap(self, module: Any, *, unused: bool = False, small: bool = False) -> Any:
        """The wrapped module; ``unused``: not all ranks use all parameters; ``small``: in many buckets."""
        if self.ours:
            from muster.torch.data_parallel import DataParallel

            caps: dict[str, Any] = dict(self._caps)
            if small:
                caps |= {"bucket_bytes": 256, "first_bytes": 64, "last_bytes": 64}
            return DataParallel(module, communicator=self._communicator, **caps)
        cap = {"bucket_cap_mb": 1e-4} if small else {}
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused, **cap)

    def session(self) -> Any:
        """Inside, this process is in a job, as it is where a wrapper is read from a file."""
        session = SimpleNamespace(communicator=self._communicator)
        return mock.patch("muster.worker.runtime.current", lambda: session)

    def note(self, name: str, value: Any) -> None:
        """What must be the same on both sides; of a module parameters, gradients, and rank 0's buffers."""
        if isinstance(value, nn.Module):
            for key, parameter in value.named_parameters():
                self.note(f"{name}.{key}", parameter)
                self.note(f"{name}.{key}.grad", parameter.grad)
            for key, buffer in value.named_buffers() if self.rank == 0 else ():
                self.note(f"{name}.{key}", buffer)
            return
        if isinstance(value, torch.Tensor) and value.is_sparse:
            self.note(f"{name}.layout", str(value.layout))
            value = value.to_dense()
        kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
        self.seen[f"{len(self.seen)} {name}"] = kept

    def batch(self, step: int, *shape: int, dtype: Any = None) -> Any:
        """This rank's numbers of a step, the same on both sides."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(shape, generator=generator, dtype=dtype)


# ---------------------------------------------------------------- how cases train


def loss_of(output: Any) -> Any:
    """A loss of whatever a module returns."""
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return sum(loss_of(each) for each in output if each is not None)
    if output.is_complex():
        output = torch.view_as_real(output)
    return (output.double() if output.dtype == torch.float64 else output.float()).square().mean()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def train(
    side: Side,
    module: Any,
    give: Callable[[Side, int], Any],
    *,
    optimizer: Callable[[Any], Any] = sgd,
    steps: int = 3,
    step_of: Callable[[Any, Any, Any], Any] | None = None,
    between: Callable[[Side, Any, Any, int], None] | None = None,
    **wrapping: Any,
) -> Any:
    """Trains, and notes losses, gradients and parameters."""
    model = side.wrap(module, **wrapping)
    made = optimizer(model.parameters())
    torch.manual_seed(100 + side.rank)
    for step in range(steps):
        given = give(side, step)
        made.zero_grad()
        if step_of is not None:
            loss = step_of(model, made, given)
        else:
            loss = loss_of(model(*given) if isinstance(given, tuple) else model(given))
            loss.backward()
        side.note(f"loss {step}", loss)
        side.note(f"step {step}", module)
        made.step()
        if between is not None:
            between(side, model, made, step)
    side.note("end", module)
    return model


def floats(*shape: int, dtype: Any = None) -> Callable[[Side, int], Any]:
    return lambda side, step: side.batch(step, *shape, dtype=dtype)


def several(*shapes: tuple[int, ...]) -> Callable[[Side, int], Any]:
    return lambda side, step: tuple(side.batch(step + 50 * n, *shape) for n, shape in enumerate(shapes))


def integers(high: int, *shape: int) -> Callable[[Side, int], Any]:
    def give(side: Side, step: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * step + side.rank)
        return torch.randint(0, high, shape, generator=generator)

    return give


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def images() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 9, 5),
    )


# ---------------------------------------------------------------- modules


class Tied(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.embedding(x))


class Words(nn.Module):  # type: ignore[misc]
    """Embeddings of which a step uses some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any, bag: bool = True) -> Any:
        hidden = self.words(x).sum(1)
        return self.head(hidden + self.bag(x) if bag else hidden)


class SharedLayer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.again = self.layer

    def forward(self, x: Any) -> Any:
        return self.again(torch.tanh(self.layer(x)))


class Parameters(nn.Module):  # type: ignore[misc]
    """Parameters of many shapes, held in many ways; one has no elements, one is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.listed = nn.ParameterList([torch.randn(4), torch.randn(1, 4)])
        self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4, 1)})

    def forward(self, x: Any) -> Any:
        hidden = x @ self.turned * self.scalar + self.empty.sum()
        hidden = hidden * self.listed[0] + self.listed[1]
        return hidden * self.named["a"] + self.named["b"].sum()


class Complex(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(4))

    def forward(self, x: Any) -> Any:
        return (x.to(torch.complex64) @ self.wave) * self.real


class Branches(nn.Module):  # type: ignore[misc]
    """Which layers are used is the caller's choice; one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.never = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Any, way: str = "left") -> Any:
        return (self.left if way == "left" else self.right)(self.first(x))


class Buffers(nn.Module):  # type: ignore[misc]
    """Buffers of its own, changed in place and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.count: Any
        self.mean: Any
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("unsaved", torch.randn(3), persistent=False)

    def forward(self, x: Any) -> Any:
        self.count += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.layer(x)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x)


class Doubled(torch.autograd.Function):  # type: ignore[misc,name-defined]
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient * 2


class OwnFunction(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return Doubled.apply(self.layer(x))


class Outputs(nn.Module):  # type: ignore[misc]
    """Returns a structure, takes keywords and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, x: Any, scale: float = 1.0, *, more: Any = None) -> Any:
        return {"a": self.a(x) * scale, "rest": (self.b(x), None), "none": None}


class Checkpointed(nn.Module):  # type: ignore[misc]
    def __init__(self, reentrant: bool, sequential: bool = False) -> None:
        super().__init__()
        self.net, self.reentrant, self.sequential = net(), reentrant, sequential
        self.net.insert(2, nn.Dropout(0.5))

    def forward(self, x: Any) -> Any:
        hidden = self.net[0](x)
        if self.sequential:
            return checkpoint_sequential(self.net[1:], 2, hidden, use_reentrant=self.reentrant)
        return self.net[-1](checkpoint(self.net[1:-1], hidden, use_reentrant=self.reentrant))


def frozen(module: Any, *names: str) -> Any:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)
    return module


def pruned() -> Any:
    module = net()
    # Which weights go is drawn, and each rank would draw others; masks are buffers.
    prune.l1_unstructured(module[0], "weight", amount=0.5)
    return module


def layer(make: Callable[[], Any], give: Callable[[Side, int], Any], **options: Any) -> Callable[[Side], Any]:
    return lambda side: train(side, make(), give, **options)


LAYERS: dict[str, Callable[[Side], Any]] = {
    "linear": layer(lambda: nn.Linear(6, 4), floats(5, 6)),
    "linear without bias": layer(lambda: nn.Linear(6, 4, bias=False), floats(5, 6)),
    "bilinear": layer(lambda: nn.Bilinear(3, 4, 5), several((6, 3), (6, 4))),
    "conv1d": layer(lambda: nn.Conv1d(3, 4, 3), floats(2, 3, 9)),
    "conv2d": layer(lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), floats(2, 3, 9, 9)),
    "conv3d": layer(lambda: nn.Conv3d(2, 3, 3), floats(2, 2, 5, 5, 5)),
    "depthwise and dilated convolution": layer(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 3, dilation=2)),
        floats(2, 4, 9, 9),
    ),
    "transposed convolution": layer(lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), floats(2, 3, 4, 4)),
    "channels last": layer(
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), floats(2, 3, 9, 9)
    ),
    "batch norm, 1d": layer(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), floats(5, 6)),
    "batch norm, 2d": layer(images, floats(4, 3, 5, 5)),
    "batch norm, 3d": layer(lambda: nn.BatchNorm3d(2), floats(2, 2, 3, 3, 3)),
    "batch norm without parameters": layer(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False)), floats(5, 6)
    ),
    "batch norm, cumulative": layer(lambda: nn.BatchNorm1d(6, momentum=None), floats(5, 6)),
    "batch norm without statistics": layer(
        lambda: nn.BatchNorm1d(6, track_running_stats=False), floats(5, 6)
    ),
    "instance norm": layer(
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), floats(2, 3, 4, 4)
    ),
    "group norm": layer(lambda: nn.GroupNorm(2, 4), floats(2, 4, 3, 3)),
    "layer norm": layer(lambda: nn.LayerNorm(6), floats(5, 6)),
    "rms norm": layer(lambda: nn.RMSNorm(6), floats(5, 6)),
    "embedding": layer(lambda: nn.Embedding(9, 4), integers(9, 3, 5)),
    "embedding with padding": layer(
        lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)), integers(9, 3, 5)
    ),
    "sparse gradients": layer(Words, integers(9, 3, 5), optimizer=plain_sgd),
    "sparse gradients alone": layer(
        lambda: nn.Embedding(9, 4, sparse=True), integers(9, 3, 5), optimizer=torch.optim.SparseAdam
    ),
    "sparse gradients, accumulated": lambda side: train(
        side, Words(), integers(9, 3, 5), optimizer=plain_sgd, step_of=accumulates_in_rows
    ),
    "embedding bag": layer(lambda: nn.EmbeddingBag(9, 4), integers(9, 3, 5)),
    "rnn": layer(lambda: nn.RNN(4, 5), floats(3, 2, 4)),
    "lstm": layer(lambda: nn.LSTM(4, 5, num_layers=2, dropout=0.5), floats(3, 2, 4)),
    "lstm in both directions": layer(lambda: nn.LSTM(4, 5, bidirectional=True), floats(3, 2, 4)),
    "gru": layer(lambda: nn.GRU(4, 5, batch_first=True), floats(3, 2, 4)),
    "lstm cell": layer(lambda: nn.LSTMCell(4, 5), floats(3, 4)),
    "attention": layer(Attention, floats(2, 5, 8)),
    "transformer encoder": layer(lambda: nn.TransformerEncoderLayer(8, 2, 16), floats(5, 2, 8)),
    "transformer decoder": layer(lambda: nn.TransformerDecoderLayer(8, 2, 16), several((5, 2, 8), (4, 2, 8))),
    "prelu and dropout": layer(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Dropout(0.5), nn.Linear(6, 2)), floats(5, 6)
    ),
    "weight norm": layer(lambda: parametrizations.weight_norm(nn.Linear(6, 4)), floats(5, 6)),
    "spectral norm": layer(lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), floats(5, 6)),
    "orthogonal weights": layer(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), floats(5, 4)),
    "pruned weights": layer(pruned, floats(5, 6)),
    "shared weights": layer(Tied, integers(11, 3, 5)),
    "a layer used twice": layer(SharedLayer, floats(5, 6)),
    "parameters of many shapes": layer(Parameters, floats(5, 6)),
    "complex parameters": layer(Complex, floats(5, 6)),
    "double precision": layer(lambda: net().double(), floats(5, 6, dtype=torch.float64)),
    "half precision": layer(lambda: nn.Linear(6, 4).half(), floats(5, 6, dtype=torch.float16)),
    "two dtypes": layer(
        lambda: nn.Sequential(nn.Linear(6, 4).double(), ToFloat(), nn.Linear(4, 2)),
        floats(5, 6, dtype=torch.float64),
    ),
    "buffers of its own": layer(Buffers, floats(5, 6)),
    "an autograd function of its own": layer(OwnFunction, floats(5, 6)),
    "a structure as output": layer(Outputs, floats(5, 6)),
    "keywords and what is no tensor": lambda side: train(
        side, Outputs(), floats(5, 6), step_of=lambda model, _, x: back(model(x, scale=2.0, more=["text"]))
    ),
    "many buckets": layer(net, floats(5, 6), small=True),
    "many buckets with buffers": layer(images, floats(4, 3, 5, 5), small=True),
}


class ToFloat(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x.float()


def back(output: Any) -> Any:
    loss = loss_of(output)
    loss.backward()
    return loss


# ---------------------------------------------------------------- ways to train


def optimized(make: Callable[[Any], Any]) -> Callable[[Side], Any]:
    return lambda side: train(side, net(), floats(5, 6), optimizer=make, steps=4)


def stepping(step_of: Callable[[Any, Any, Any], Any], **options: Any) -> Callable[[Side], Any]:
    return lambda side: train(side, net(), floats(5, 6), step_of=step_of, **options)


def accumulates(model: Any, optimizer: Any, x: Any) -> Any:
    with model.no_sync():
        back(model(x))
        back(model(x * 2))
    return back(model(x * 3))


def accumulates_in_rows(model: Any, optimizer: Any, x: Any) -> Any:
    with model.no_sync():
        back(model(x))
    return back(model(x[:2]))


def accumulates_synchronised(model: Any, optimizer: Any, x: Any) -> Any:
    back(model(x))
    return back(model(x * 2))


def clips_norm(model: Any, optimizer: Any, x: Any) -> Any:
    loss = back(model(x))
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss


def clips_value(model: Any, optimizer: Any, x: Any) -> Any:
    loss = back(model(x))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


def edits_gradients(model: Any, optimizer: Any, x: Any) -> Any:
    loss = back(model(x))
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign()
    return loss


def autocasts(model: Any, optimizer: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    return back(output)


def several_forwards(model: Any, optimizer: Any, x: Any) -> Any:
    return back((model(x), model(x * 2), model(x[:1])))


def penalises_gradients(model: Any, optimizer: Any, x: Any) -> Any:
    x = x.requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return back((output, gradient))


def looks_between(model: Any, optimizer: Any, x: Any) -> Any:
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model.module(x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return back(model(x))


def keeps_zeros(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)
    return back(model(x))


def gradient_of_the_input(model: Any, optimizer: Any, x: Any) -> Any:
    x = x.requires_grad_()
    loss = back(model(x))
    return torch.stack([loss, x.grad.sum()])


def lbfgs(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    x = side.batch(0, 5, 6)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = back(model(x))
        side.note("loss", loss)
        # By its own loss each rank would search another way.
        return sum(parameter.grad.abs().sum() for parameter in model.parameters())

    for _ in range(2):
        optimizer.step(closure)
    side.note("end", module)


def frozen_while(side: Side) -> None:
    module = frozen(net(), "0.weight", "2.bias")
    train(side, module, floats(5, 6))


def frozen_later(side: Side) -> None:
    """Each freezes and wraps again: DistributedDataParallel would wait for the gradient for ever."""
    module = net()
    for names in ((), ("0.weight",), ("0.weight", "0.bias"), ()):
        frozen(module, *names)
        module.zero_grad()
        train(side, module, floats(5, 6), steps=2)


def unfrozen_later(side: Side) -> None:
    """Ours goes on; DistributedDataParallel, which never reduces what was frozen, is made again."""
    module = frozen(net(), "0.weight", "2.bias", "4.weight")
    model = side.wrap(module)
    for names in (("0.weight", "4.weight"), ("0.weight",), ()):
        frozen(module, *names)
        module.zero_grad()
        model = model if side.ours else side.wrap(module)
        optimizer = sgd(module.parameters())
        for step in range(2):
            optimizer.zero_grad()
            side.note("loss", back(model(side.batch(step, 5, 6))))
            optimizer.step()
            side.note(f"step {step}", module)


def frozen_for_a_while(side: Side) -> None:
    module = net()

    def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
        frozen(module, *(["0.weight", "2.bias"] if step % 2 else []))

    train(side, module, floats(5, 6), steps=5, between=between, unused=True)


def ways(*by_rank: str) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        train(
            side,
            Branches(),
            floats(5, 6),
            unused=True,
            step_of=lambda model, _, x: back(model(x, by_rank[side.rank])),
        )

    return run


def changing_ways(side: Side) -> None:
    turns = iter(["left", "right", "left", "left", "right", "right"])
    train(
        side, Branches(), floats(5, 6), unused=True, steps=6, small=True,
        step_of=lambda model, _, x: back(model(x, next(turns))),
    )  # fmt: skip


def loss_of_a_part(side: Side) -> None:
    train(side, Outputs(), floats(5, 6), unused=True, step_of=lambda model, _, x: back(model(x)["a"]))


def uneven_sizes(side: Side) -> None:
    train(side, net(), lambda side, step: side.batch(step, 3 + 4 * side.rank, 6))


def hooked(side: Side) -> None:
    module = net()
    seen: list[Any] = []
    module[0].weight.register_hook(lambda gradient: gradient * 2)
    module[2].register_forward_hook(lambda layer, given, output: output + 1)
    module[4].register_full_backward_hook(lambda layer, inner, outer: (inner[0] * 3,))
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    train(side, module, floats(5, 6))
    for gradient in seen:
        side.note("own gradient", gradient)


def scaled(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(side.batch(step, 5, 6) * (1e30 if step == 1 and side.rank else 1)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        side.note("scale", scaler.get_scale())
        side.note(f"step {step}", module)


def scheduled(make: Callable[[Any], Any]) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        schedules: list[Any] = []

        def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
            schedules[0].step()
            side.note("rate", optimizer.param_groups[0]["lr"])

        def optimizer(parameters: Any) -> Any:
            made = sgd(parameters)
            schedules.append(make(made))
            return made

        train(side, net(), floats(5, 6), optimizer=optimizer, steps=6, between=between)

    return run


def several_optimizers(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    optimizers = [torch.optim.Adam(module[0].parameters()), sgd(module[2:].parameters())]
    for step in range(4):
        for each in optimizers:
            each.zero_grad()
        side.note("loss", back(model(side.batch(step, 5, 6))))
        for each in optimizers[: 1 + step % 2]:
            each.step()
    side.note("end", module)


def parameter_groups(parameters: Any) -> Any:
    first, *others = parameters
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": others}], lr=0.01
    )


def divided(make: Callable[[Any], Any], schedule: Any = None) -> Callable[[Side], None]:
    """A ShardedOptimizer, and an optimizer of all in a DistributedDataParallel; weights alone decay."""

    def run(side: Side) -> None:
        module = net()
        named = list(module.named_parameters())
        groups = [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.2},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 0.003},
        ]
        if side.ours:
            from muster.torch.sharded_optimizer import ShardedOptimizer

            session = SimpleNamespace(communicator=side._communicator)
            model, optimizer = module, ShardedOptimizer(module, session, make=make, groups=groups)
        else:
            model, optimizer = side.wrap(module), make(groups)
        scheduler = schedule(optimizer) if schedule else None
        for step in range(6):
            optimizer.zero_grad()
            side.note("loss", back(model(side.batch(step, 5, 6))))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
                side.note("rates", scheduler.get_last_lr())
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for name, parameter in named:
                side.note(f"{step} {name}", parameter)
        state = optimizer.state_dict()
        for number, values in state["state"].items():
            for name, value in values.items():
                side.note(f"{number} {name}", value)
        side.note("groups", state["param_groups"])

    return run


def state_taken_over(side: Side) -> None:
    """Saved in the midst, loaded into others, gone on with."""
    module = images()
    model = train(side, module, floats(4, 3, 5, 5), optimizer=torch.optim.Adam)
    state = copy.deepcopy(model.state_dict() if side.ours else model.module.state_dict())
    other = images()
    other.load_state_dict(state)
    train(side, other, floats(4, 3, 5, 5))


def loaded_into_the_wrapper(side: Side) -> None:
    module = net()
    state = net().state_dict()
    model = side.wrap(module)
    loads = model if side.ours else model.module
    loads.load_state_dict({name: torch.full_like(value, 0.05) for name, value in state.items()})
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.note("loss", back(model(side.batch(step, 5, 6))))
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    side.note("end", module)


def adversaries(side: Side) -> None:
    """Two wrapped modules, of which one trains through the other."""
    generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    makes, judges = side.wrap(generator), side.wrap(critic)
    optimizers = sgd(makes.parameters()), sgd(judges.parameters())
    for step in range(3):
        noise = side.batch(step, 5, 4)
        optimizers[1].zero_grad()
        judged = judges(torch.cat([makes(noise).detach(), side.batch(step + 9, 5, 6)]))
        side.note("judged", back(judged))
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic.requires_grad_(False)
        side.note("made", back(judges(makes(noise))))
        critic.requires_grad_(True)
        optimizers[0].step()
    side.note("generator", generator)
    side.note("critic", critic)


def two_wrapped_one_loss(side: Side) -> None:
    first, second = nn.Linear(6, 4), nn.Linear(4, 2)
    models = side.wrap(first), side.wrap(second)
    optimizer = sgd([*models[0].parameters(), *models[1].parameters()])
    for step in range(3):
        optimizer.zero_grad()
        side.note("loss", back(models[1](models[0](side.batch(step, 5, 6)))))
        optimizer.step()
    side.note("first", first)
    side.note("second", second)


def averaged_weights(of_the_wrapper: bool) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        kept: list[Any] = []

        def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
            averaged = model if of_the_wrapper else model.module
            if not kept:
                kept.append(torch.optim.swa_utils.AveragedModel(averaged))
            kept[0].update_parameters(averaged)

        train(side, images(), floats(4, 3, 5, 5), steps=4, between=between)
        side.note("average", kept[0])

    return run


def a_copy_of_the_wrapper(through: Callable[[Any], Any]) -> Callable[[Side], None]:
    """The copy trains on by itself, and what was copied too."""

    def run(side: Side) -> None:
        model = train(side, images(), floats(4, 3, 5, 5), steps=2, small=True)
        with side.session():
            other = through(model)
        for each in (other, model):
            optimizer = sgd(each.parameters())
            for step in range(2):
                optimizer.zero_grad()
                side.note("loss", back(each(side.batch(7 + step, 4, 3, 5, 5))))
                optimizer.step()
            side.note("end", each.module)

    return run


def state_of_the_wrapper(side: Side) -> None:
    """By torch.distributed.checkpoint, with the names that it gives them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = side.wrap(images())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        back(model(side.batch(step, 4, 3, 5, 5)))
        optimizer.step()
    states = get_state_dict(model, optimizer)
    for name, value in (states[0] if side.rank == 0 else {}).items():
        side.note(name, value)
    for name, values in states[1]["state"].items():
        for key, value in values.items():
            side.note(f"{name} {key}", value)
    side.note("groups", states[1]["param_groups"])
    other = side.wrap(images())
    again = torch.optim.AdamW(other.parameters())
    set_state_dict(other, again, model_state_dict=states[0], optim_state_dict=states[1])
    for step in range(2):
        again.zero_grad()
        side.note("loss", back(other(side.batch(step, 4, 3, 5, 5))))
        again.step()
    side.note("end", other.module)


def evaluated_between(side: Side) -> None:
    def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
        model.eval()
        with torch.no_grad():
            output = model.module(side.batch(90, 4, 3, 5, 5))
        if side.rank == 0:
            side.note("evaluated", output)
        model.train()

    train(side, images(), floats(4, 3, 5, 5), steps=4, between=between)


def a_part_in_eval_mode(side: Side) -> None:
    module = images()

    def step_of(model: Any, optimizer: Any, x: Any) -> Any:
        module[1].eval()
        return back(model(x))

    train(side, module, floats(4, 3, 5, 5), step_of=step_of)


def recurrent_by_hand(side: Side) -> None:
    def step_of(model: Any, optimizer: Any, x: Any) -> Any:
        hidden = x
        for _ in range(4):
            hidden = model(hidden)
        return back(hidden)

    train(side, nn.Linear(6, 6), floats(5, 6), step_of=step_of)


def wrapped_again(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    back(model(side.batch(0, 5, 6)))
    del model
    module.zero_grad()
    train(side, module, floats(5, 6))


def a_copy(side: Side) -> None:
    module = net()
    train(side, module, floats(5, 6), steps=1)
    module.zero_grad()
    train(side, copy.deepcopy(module), floats(5, 6))


def called_with_its_own(model: Any, optimizer: Any, x: Any) -> Any:
    """By the names that the wrapper gives, some halved on the way."""
    parameters = {
        name: each * 0.5 if name.endswith("bias") else each for name, each in model.named_parameters()
    }
    loss = loss_of(torch.func.functional_call(model, parameters, (x,)))
    loss.backward()
    return loss


def called_with_others(side: Side) -> None:
    """Tensors of the caller's own have each rank's own gradients; afterwards the module's count again."""
    module = net()
    model = side.wrap(module)
    others = {  # by DDP's names, which ours takes, too
        f"module.{name}": (each.detach() + 1).requires_grad_() for name, each in module.named_parameters()
    }
    x = floats(4, 6)(side, 0)
    loss_of(torch.func.functional_call(model, others, (x,))).backward()
    for name, each in others.items():
        side.note(name, each.grad)
    side.note("untouched", module)
    taken = torch.func.grad(lambda given: loss_of(torch.func.functional_call(model, given, (x,))))
    for name, gradient in taken({name: each.detach() for name, each in others.items()}).items():
        side.note(f"{name} by torch.func.grad", gradient)
    loss_of(model(x)).backward()
    side.note("afterwards", module)


def partly_cleared(model: Any, optimizer: Any, x: Any) -> Any:
    back(model(x))
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None
    return back(model(x))


WAYS: dict[str, Callable[[Side], Any]] = {
    "sgd with nesterov and weight decay": optimized(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    ),
    "sgd, fused": optimized(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "sgd, for each, ascending": optimized(lambda p: torch.optim.SGD(p, lr=0.01, foreach=True, maximize=True)),
    "adam": optimized(torch.optim.Adam),
    "adam, amsgrad": optimized(lambda p: torch.optim.Adam(p, amsgrad=True)),
    "adamw, fused": optimized(lambda p: torch.optim.AdamW(p, fused=True)),
    "adadelta": optimized(torch.optim.Adadelta),
    "adagrad": optimized(torch.optim.Adagrad),
    "adamax": optimized(torch.optim.Adamax),
    "asgd": optimized(torch.optim.ASGD),
    "nadam": optimized(torch.optim.NAdam),
    "radam": optimized(torch.optim.RAdam),
    "rmsprop": optimized(lambda p: torch.optim.RMSprop(p, centered=True)),
    "rprop": optimized(torch.optim.Rprop),
    "adafactor": optimized(lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "lbfgs": lbfgs,
    "groups of parameters": optimized(parameter_groups),
    "divided adamw": divided(lambda groups: torch.optim.AdamW(groups, lr=0.01)),
    "divided sgd with a schedule": divided(
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], total_steps=10),
    ),
    "several optimizers": several_optimizers,
    "rate in steps": scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)),
    "one cycle": scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=10)),
    "cosine after warm-up": scheduled(
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
            ],
            [2],
        )
    ),
    "accumulation": stepping(accumulates),
    "accumulation in many buckets": stepping(accumulates, small=True),
    "accumulation without no_sync": stepping(accumulates_synchronised),
    "gradients partly cleared": stepping(partly_cleared),
    "clipped norm": stepping(clips_norm),
    "clipped values": stepping(clips_value),
    "gradients set by hand": stepping(edits_gradients),
    "zeroed gradients": stepping(keeps_zeros),
    "autocast": stepping(autocasts),
    "gradient scaler, with an overflow on one rank": scaled,
    "several forward passes": stepping(several_forwards),
    "gradient penalty": stepping(penalises_gradients),
    "gradient of the input": stepping(gradient_of_the_input),
    "forward passes without gradient between": stepping(looks_between),
    "recurrent by hand": recurrent_by_hand,
    "frozen": frozen_while,
    "frozen later and wrapped again": frozen_later,
    "frozen for a while": frozen_for_a_while,
    "unfrozen after wrapping": unfrozen_later,
    "unused parameters": ways("left", "left"),
    "parameters used on one rank": ways("left", "right"),
    "other parameters in each step": changing_ways,
    "loss of a part of the output": loss_of_a_part,
    "other batch sizes on each rank": uneven_sizes,
    "hooks": hooked,
    "checkpointing": layer(lambda: Checkpointed(False), floats(5, 6)),
    "checkpointing, reentrant": layer(lambda: Checkpointed(True), floats(5, 6)),
    "checkpointing in sequence": layer(lambda: Checkpointed(False, True), floats(5, 6)),
    "checkpointing and accumulation": lambda side: train(
        side, Checkpointed(False), floats(5, 6), step_of=accumulates
    ),
    "state taken over": state_taken_over,
    "state loaded into the wrapper": loaded_into_the_wrapper,
    "adversaries": adversaries,
    "two wrapped modules, one loss": two_wrapped_one_loss,
    "averaged weights": averaged_weights(False),
    "averaged weights of the wrapper": averaged_weights(True),
    "a copy of the wrapper": a_copy_of_the_wrapper(copy.deepcopy),
    "a wrapper through a pickle": a_copy_of_the_wrapper(lambda model: pickle.loads(pickle.dumps(model))),
    "state of the wrapper": state_of_the_wrapper,
    "evaluated between": evaluated_between,
    "a part in eval mode": a_part_in_eval_mode,
    "called with its own parameters": stepping(called_with_its_own),
    "called with other parameters": called_with_others,
    "wrapped again": wrapped_again,
    "a copy of what was wrapped": a_copy,
}


# ---------------------------------------------------------------- the comparison


CASES = {**LAYERS, **WAYS}


def differences(place: Place, name: str, store: str) -> list[str]:
    """Runs on each rank: what the two wrappers do differently in a case."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=place.comm.rank, world_size=RANKS
        )
    found = []
    for side in (Side(place, False), Side(place, True), Side(place, True, in_place_bytes=1)):
        torch.manual_seed(10 + place.comm.rank)
        CASES[name](side)
        found.append(side.seen)
    theirs, *ours = found
    assert all(list(theirs) == list(each) for each in ours) and theirs, [list(each) for each in found]
    return [
        f"{key}{where}: {text}"
        for mine, where in zip(ours, ("", " in place"), strict=True)
        for key in theirs
        if (text := different(mine[key], theirs[key]))
    ]


def leave(place: Place) -> None:
    """Runs on each rank, at the end."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def different(mine: Any, theirs: Any) -> str:
    if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
        return "" if mine == theirs or (mine is theirs is None) else f"{mine} and not {theirs}"
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"{mine.dtype} {tuple(mine.shape)} and not {theirs.dtype} {tuple(theirs.shape)}"
    close = torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(
        torch.nan_to_num(mine), torch.nan_to_num(theirs)
    )
    return "" if close else f"differs by up to {float((mine - theirs).abs().max())}"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agents, Path]]:
    """Two processes, and the file by which they find each other for gloo."""
    directory = tmp_path_factory.mktemp("ddp")
    agents = Agents(RANKS, directory)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    yield agents, directory / "store"
    agents.run("tcp-plain", RANKS, leave)
    agents.close()


LATER = {"complex parameters": (2, 6), "state of the wrapper": (2, 7)}
"""Gloo takes complex numbers, and torch.distributed.checkpoint any wrapper, since these releases of torch."""


@pytest.mark.parametrize("name", CASES)
def test_a_case_trains_as_with_distributed_data_parallel(pool: tuple[Agents, Path], name: str) -> None:
    if torch.__version__ < LATER.get(name, (2, 5)):
        pytest.skip(f"needs torch {LATER[name][0]}.{LATER[name][1]}: {name}")
    agents, store = pool
    for rank, found in enumerate(agents.run("tcp-plain", RANKS, differences, name, str(store))):
        assert not found, f"rank {rank}: {len(found)} differ, first {found[:3]}"


# ---------------------------------------------------------------- what DistributedDataParallel does not do


def synchronised_and_whole(place: Place) -> float:
    """Runs on each rank: how far SyncBatchNorm in uneven batches is from one process on the whole batch."""
    from muster.torch.data_parallel import DataParallel

    def made(kind: Any) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), kind(8), nn.Tanh(), nn.Linear(8, 8), kind(8), nn.Linear(8, 2))

    model = DataParallel(made(nn.SyncBatchNorm).double(), communicator=place.comm, bucket_bytes=64)
    alone = made(nn.BatchNorm1d).double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = torch.randn(7, 6, generator=generator, dtype=torch.float64) + 10
        mine = batch[:5] if place.comm.rank == 0 else batch[5:]
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.uneven_batch(len(mine)):
            model(mine).square().mean().backward()
        alone(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def test_sync_batch_norm_is_that_of_the_whole_batch(pool: tuple[Agents, Path]) -> None:
    assert max(pool[0].run("tcp-plain", RANKS, synchronised_and_whole)) < 1e-12


def goes_on_after_an_error(place: Place) -> str:
    """Runs on each rank: rank 1 catches an error of a backward pass and takes the next batch."""
    from muster.errors import WorkerError
    from muster.torch.data_parallel import DataParallel

    model = DataParallel(net(), communicator=place.comm)
    for step in range(4):
        model.zero_grad()
        output = model(torch.ones(2, 6))
        if step == 2 and place.comm.rank == 1:
            output.register_hook(lambda gradient: gradient.nothing_like_it)
            with pytest.raises(AttributeError):
                output.sum().backward()
            output = model(torch.ones(2, 6))
        try:
            output.sum().backward()
        except WorkerError as error:
            return f"{step} {type(error).__name__}: {error.message}"
    return "nobody has noticed"


def test_a_rank_that_goes_on_after_an_error_is_found_in_that_step(pool: tuple[Agents, Path]) -> None:
    words = (
        "2 CollectiveMismatchError: ranks average gradients of different steps: rank 1 (node-1 on localhost)"
        " left a training pass unfinished and went on with the next"
    )
    assert pool[0].run("tcp-plain", RANKS, goes_on_after_an_error) == [words] * RANKS
