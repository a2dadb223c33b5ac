"""Small models with the operators that plans must know. All return a loss of (inputs, targets)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, TOKENS, WIDTH, WORDS = 8, 8, 16, 32


class Quick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 16) * 0.3)
        self.w2 = nn.Parameter(torch.randn(16, 16) * 0.3)

    def forward(self, x: Any, y: Any) -> Any:
        return ((torch.relu(x @ self.w) @ self.w2 - y) ** 2).mean()


class Mlp(nn.Module):
    """Linear layers with biases, a scaled skip, softmax, several reductions and joins."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(16)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Any, y: Any) -> Any:
        h = self.norm(x + 0.5 * self.down(F.silu(self.up(x))))
        h = torch.cat([h, torch.tanh(h)], 1)
        p = F.softmax(self.out(h) * self.temperature, dim=1)
        weights = self.out.weight.t().sum(1) * 0.01
        return F.mse_loss(p, y) + weights.square().mean() + h.mean(1).abs().sum() * 0.01


class Block(nn.Module):
    def __init__(self, fused: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.l1, self.l2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        y = self.l1(x)
        parts = self.qkv(y).chunk(3, dim=-1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.l2(x))))


class Gpt(nn.Module):
    def __init__(self, fused: bool = False, tied: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*[Block(fused) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Any, target: Any) -> Any:
        x = self.blocks(self.tok(ids) + self.pos[: ids.shape[1]])
        scores = self.head(self.ln(x))
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=3)


class Bert(nn.Module):
    """torch's own encoder layer: fused in_proj, post-norm, with a tied head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=dropout, batch_first=True)
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.pooler, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.tok.weight

    def forward(self, ids: Any, target: Any) -> Any:
        h = self.body(self.tok(ids) + self.pos)
        first = torch.tanh(self.pooler(h[:, 0]))
        scores = self.head(h + first.unsqueeze(1))
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), label_smoothing=0.1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.body = nn.Embedding(WORDS, 8), nn.LSTM(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: Any, target: Any) -> Any:
        h, _ = self.body(self.tok(ids))
        return F.cross_entropy(self.head(h).flatten(0, 1), target.flatten())


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.c1, self.b1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, stride, 1, groups=2), nn.BatchNorm2d(width)
        self.c3, self.b3 = nn.Conv2d(width, out, 1), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.b1(self.c1(x)))
        y = self.relu(self.b2(self.c2(y)))
        y = self.b3(self.c3(y))
        y += self.down(x)
        return self.relu(y)


class Residual(nn.Module):
    """A ResNet of one block: convolutions with and without groups, BatchNorm, pooling."""

    def __init__(self, classes: int = 16) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.block, self.fc = Bottleneck(8, 4, 2), nn.Linear(16, classes)

    def forward(self, x: Any, y: Any) -> Any:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x)), inplace=True), 2)
        x = F.adaptive_avg_pool2d(self.block(x), 1).flatten(1)
        return F.cross_entropy(self.fc(x), y)


class Odd(nn.Module):
    """Operators that few models use: einsum, expand, permute, stack, select, where, one without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 8, 8) * 0.3), nn.Parameter(torch.randn(8) * 0.3)
        self.c1, self.gn, self.prelu = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.PReLU(8)

    def forward(self, x: Any, y: Any) -> Any:
        z = torch.einsum("bid,hde->bhie", x, self.a).permute(0, 2, 1, 3).sum(2)
        z = self.prelu(self.gn(self.c1(z))) + self.b.view(1, 1, 8).expand(x.shape[0], 8, 8)
        z = torch.where(z > 0, z, 0.1 * z).clamp(max=3.0)
        z = torch.stack([z, x], 1).select(1, 0) + torch.cumsum(x, 1) * 0.1
        z = torch.linalg.vector_norm(z, dim=2) + z.amax(2) + F.pad(z, (0, 1))[..., :8].mean(2)
        return F.binary_cross_entropy_with_logits(z, y)


def ids(seed: int) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (BATCH, TOKENS), generator=g) for _ in range(2))


class Stack(nn.Module):
    """Layers of 4 MiB each."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)])

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.layers(x), y)


def _floats(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
    def make(seed: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        return tuple(torch.rand(shape, generator=g, dtype=torch.float64) for shape in shapes)

    return make


def _images(seed: int) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(BATCH, 3, 8, 8, generator=g, dtype=torch.float64), torch.randint(
        16, (BATCH,), generator=g
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "quick": (Quick, _floats((16, 32), (16, 16))),
    "mlp": (Mlp, _floats((8, 16), (8, 8))),
    "gpt": (Gpt, ids),
    "gpt_fused_tied": (lambda: Gpt(fused=True, tied=True), ids),
    "bert": (Bert, ids),
    "lstm": (Lstm, ids),
    "residual": (Residual, _images),
    "odd": (Odd, _floats((8, 8, 8), (8, 8))),
}


_seeding = threading.Lock()


def make(name: str) -> nn.Module:
    """The model with the same weights each time; ranks are threads, and the generator is one."""
    with _seeding:
        torch.manual_seed(0)
        return MODELS[name][0]().double()
