"""GPT-2 for ``muster bench train``: the model of examples/gpt2.py, a batch of it, and a file to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CONTEXT, TINY_CONTEXT = 1024, 32
TEXT_BYTES = 16 * 2**20
VARIANTS = (
    "example",
    "example-step",
    "muster",
    "muster-bf16-gradients",
    "ddp",
    "ddp-compiled",
    "ddp-captured",
)
CLIP_NORM = 1.0


def write_text(path: Path, *, size_bytes: int = TEXT_BYTES, seed: int = 0) -> None:
    """Writes a file of bytes that are not equally frequent, so that there is something to learn."""
    draws = np.random.default_rng(seed).geometric(0.05, size_bytes)
    path.write_bytes(np.minimum(draws, 255).astype(np.uint8).tobytes())


def shape(tiny: bool) -> dict[str, int]:
    """Returns layers, heads, width and context of GPT-2 with 124 M parameters, or those of a small net."""
    if tiny:
        return {"layers": 1, "heads": 2, "width": 16, "context": TINY_CONTEXT}
    return {"layers": 12, "heads": 12, "width": 768, "context": CONTEXT}


def arguments(text: Path, batch: int, *, tiny: bool) -> list[str]:
    """Returns the arguments of the example's command line."""
    options = [f"--{name}={value}" for name, value in shape(tiny).items()]
    return [str(text), *options, f"--batch-size={batch}", "--checkpoint-dir=", "--sample=0"]


def make_module(variant: str, device: Any, *, tiny: bool) -> Any:
    """Makes the model on a device, with its blocks compiled as in the example."""
    from examples.gpt2 import Gpt2

    net = Gpt2(**shape(tiny)).to(device)
    if variant.startswith("muster") and not tiny:
        for block in net.blocks:
            block.compile()
    return net


def make_optimizer(model: Any, device: Any) -> Any:
    """Makes the example's AdamW."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True, capturable=device.type == "cuda")


def loss_of(model: Any, tokens: Any, following: Any) -> Any:
    """Returns the mean cross entropy of a batch."""
    from examples.gpt2 import mean_loss

    return mean_loss(model(tokens), following)


def make_batch(device: Any, batch: int, generator: Any, *, tiny: bool) -> tuple[Any, Any]:
    """Makes a batch: tokens and the tokens that follow them, each [batch, context] of int64."""
    import torch

    size = batch, shape(tiny)["context"] + 1
    window = torch.randint(0, 256, size, device=device, generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
