"""Cases of the comparison: modules, by what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.torch.ddp.side import (
    Side,
    back,
    floats,
    images,
    integers,
    net,
    plain_sgd,
    several,
    train,
)


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
