"""A small transformer with a huge vocabulary: what a search divides, and what that saves.

    muster run -n 2 --scheduler -- python -m examples.big_vocabulary
    muster run -n 2 --scheduler -- python -m examples.big_vocabulary --mode data_parallel

The output layer has one row for each word. With hundreds of thousands of words its gradient is most of what
travels in data parallelism; divided among the ranks, with the loss, it does not travel at all.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import nn

import muster


class Block(nn.Module):  # type: ignore[misc]
    """Attention and two layers, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """[samples, tokens, width] to the same."""
        samples, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(samples, tokens, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):  # type: ignore[misc]
    """Words in, scores of the next words out."""

    def __init__(self, words: int, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Any) -> Any:
        """[samples, tokens] of int64 to [samples, tokens, words]."""
        place = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.words(ids) + self.places(place))))


def loss_of(scores: Any, following: Any) -> Any:
    """The mean cross entropy of the following words."""
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), following.flatten())


def main() -> int:
    """Plans, trains on words drawn at random, prints loss and speed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--mode", choices=["auto", "data_parallel"], default="auto")
    option("--words", type=int, default=32_768, help="size of the vocabulary")
    option("--width", type=int, default=128)
    option("--layers", type=int, default=2)
    option("--tokens", type=int, default=64, help="of a sample")
    option("--samples", type=int, default=2, help="of each rank in a step")
    option("--steps", type=int, default=10)
    options = parser.parse_args()
    with muster.init() as session:
        on_gpu = torch.cuda.is_available() and session.device_ordinal >= 0
        device = torch.device("cuda", session.device_ordinal) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        generator = torch.Generator().manual_seed(session.rank)
        shape = options.samples, options.tokens + 1
        drawn = torch.randint(options.words, shape, generator=generator).to(device)
        ids, following = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        torch.manual_seed(0)
        net = Language(options.words, options.width, options.layers, options.tokens).to(device)
        model = muster.parallelize(net, (ids, following), loss=loss_of, mode=options.mode)
        if session.rank == 0:
            print(model.plan.verdict)
        optimizer = torch.optim.AdamW(
            model.parameters(), 1e-3, **({"fused": True, "capturable": True} if on_gpu else {})
        )
        step = muster.capture_step(model, model, optimizer, autocast=torch.bfloat16 if on_gpu else None)
        begun = time.perf_counter()
        for number in range(1, options.steps + 1):
            loss = step(ids, following).item()
            if session.rank == 0:
                ms = (time.perf_counter() - begun) * 1e3
                print(f"epoch: 1 step: {number}, loss is {loss:.4f}, {ms:.1f} ms", flush=True)
            begun = time.perf_counter()
    return 0


if __name__ == "__main__":
    sys.exit(main())
