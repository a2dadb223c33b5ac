"""Models of ``muster bench parallel``, in addition to those of the examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _attention(x: Any, qkv: nn.Linear, heads: int, turned: Any = None) -> Any:
    """[samples, tokens, width] to the same; ``turned`` rotates queries and keys and makes it causal."""
    samples, tokens, width = x.shape
    q, k, v = qkv(x).view(samples, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    if turned is not None:
        q, k = turned(q), turned(k)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=turned is not None)
    return y.transpose(1, 2).reshape(samples, tokens, width)


class _VisionBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.out(_attention(self.norm1(x), self.qkv, self.heads))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Vision(nn.Module):  # type: ignore[misc]
    """A vision transformer: ViT-B/16 with 12 layers, 768 wide."""

    def __init__(self, classes: int, width: int = 768, layers: int = 12, pixels: int = 224) -> None:
        super().__init__()
        tokens = (pixels // 16) ** 2
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.places = nn.Parameter(torch.zeros(1, tokens, width))
        self.blocks = nn.Sequential(*(_VisionBlock(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Any) -> Any:
        """[samples, 3, pixels, pixels] to [samples, classes]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class _LlamaBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, each, bias=False) for each in (3 * width, width))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        def turned(each: Any) -> Any:
            first, second = each.chunk(2, -1)
            return each * cosine + torch.cat((-second, first), -1) * sine

        x = x + self.out(_attention(self.norm1(x), self.qkv, self.heads, turned))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):  # type: ignore[misc]
    """A transformer like Llama: rotary position embeddings, RMSNorm, SwiGLU."""

    def __init__(self, words: int, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        heads, inner = max(1, width // 64), (8 * width // 3 + 63) // 64 * 64
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        each = width // heads
        angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, each, 2) / each)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: Any) -> Any:
        """[samples, tokens] of int64 to [samples, tokens, words]."""
        x = self.words(ids)
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))
