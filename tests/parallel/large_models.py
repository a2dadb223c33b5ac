"""Models in their real sizes, on meta tensors: only for planning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.c1, self.b1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.c3, self.b3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.down: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.b1(self.c1(x)))
        y = torch.relu(self.b2(self.c2(y)))
        return torch.relu(self.b3(self.c3(y)) + self.down(x))


class _ResNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            for number in range(depth):
                blocks.append(_Bottleneck(channels, 64 << stage, 2 if stage and not number else 1))
                channels = 256 << stage
        self.body, self.fc = nn.Sequential(*blocks), nn.Linear(2048, classes)

    def forward(self, x: Any, y: Any) -> Any:
        x = F.max_pool2d(torch.relu(self.bn(self.stem(x))), 3, 2, 1)
        return F.cross_entropy(self.fc(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1)), y)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        y = self.l1(x)
        q, k, v = (m(y).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.l2(x))))


class _Gpt(nn.Module):
    def __init__(self, words: int, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(words, width), nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*[_Block(width, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Any, target: Any) -> Any:
        scores = self.head(self.ln(self.blocks(self.tok(ids) + self.pos)))
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def _images(batch: int) -> tuple[Any, Any]:
    return torch.empty(batch, 3, 224, 224), torch.empty(batch, dtype=torch.long)


def _words(batch: int, tokens: int) -> tuple[Any, Any]:
    return torch.empty(batch, tokens, dtype=torch.long), torch.empty(batch, tokens, dtype=torch.long)


def resnet50() -> Any:
    return _ResNet(1000), _images(64)


def resnet50_faces() -> Any:
    return _ResNet(1_000_000), _images(64)


def gpt2() -> Any:
    return _Gpt(50304, 768, 12, 12, 1024), _words(4, 1024)


def gpt_7b() -> Any:
    return _Gpt(50304, 4096, 32, 32, 1024), _words(2, 1024)
