"""What the GPU tests of divided models run on each rank of a fleet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.parallel.planning.costs import Hardware
from muster.torch.capture import capture_step

STEPS = 7
RATE = 2.0**-10
"""A captured step reads it in float32, which holds it exactly."""


class Words(nn.Module):
    """A block with attention, dropout, and scores of many words."""

    def __init__(self, words: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, ids: Any, following: Any) -> Any:
        x = self.words(ids)
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        dropped = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        x = x + dropped.transpose(1, 2).flatten(2)
        x = x + self.down(F.dropout(F.gelu(self.up(x)), self.dropout))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), following.flatten())


def train(
    comm: Any, *, strategies: dict[str, Any], dropout: float, capture: bool, low: bool, words: int = 20_000
) -> dict[str, Any]:
    """Losses of a few steps of a divided model on a batch that is the same in each; the memory they took."""
    torch.manual_seed(0)
    net = Words(words, 64, dropout).cuda()
    draw = torch.Generator().manual_seed(comm.rank)
    ids, following = (torch.randint(words, (4, 32), generator=draw).cuda() for _ in range(2))
    model = muster.parallelize(
        net,
        (ids, following),
        communicator=comm,
        mode="semi_auto",
        strategies=strategies,
        machine=Hardware(),
        seed=5,
        autocast=torch.bfloat16 if low else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=True)
    step = capture_step(model, model, optimizer, capture=capture)
    torch.cuda.reset_peak_memory_stats()
    losses = [step(ids, following).item() for _ in range(STEPS)]
    found = {
        "losses": losses,
        "captured": step.captured,
        "reason": step.reason,
        "memory": torch.cuda.max_memory_allocated(),
        "draws": model.draws(),
    }
    step.release()
    return found


def alone(comm: Any, *, words: int = 20_000) -> list[float]:
    """The losses of one process with the batches of all ranks, under torch's own autocast."""
    torch.manual_seed(0)
    net = Words(words, 64, 0.0).cuda()
    batches = []
    for rank in range(comm.world_size):
        draw = torch.Generator().manual_seed(rank)
        batches.append([torch.randint(words, (4, 32), generator=draw).cuda() for _ in range(2)])
    ids, following = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(ids, following)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Deep(nn.Module):
    """Layers whose weights, or activations, are what takes memory."""

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, dropout) for _ in range(layers))

    def forward(self, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class _Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, width), nn.Linear(width, width), dropout

    def forward(self, x: Any) -> Any:
        return x + self.down(F.dropout(F.gelu(self.up(x)), self.dropout))


def _deep(layers: int, width: int, samples: int, dropout: float, ranks: int) -> tuple[Any, list[Any]]:
    """The model, and a batch for each rank, in float64."""
    torch.manual_seed(0)
    net = Deep(layers, width, dropout).double().cuda()
    draw = torch.Generator().manual_seed(1)
    batch = [torch.rand(ranks * samples, width, generator=draw, dtype=torch.float64) for _ in range(2)]
    return net, list(zip(*(each.cuda().chunk(ranks) for each in batch), strict=True))


def train_deep(
    comm: Any,
    *,
    layers: int,
    width: int,
    samples: int,
    settings: dict[str, Any],
    capture: bool = False,
    dropout: float = 0.0,
) -> dict[str, Any]:
    """Losses and weights after a few clipped steps of a divided model; the memory that these took."""
    net, batches = _deep(layers, width, samples, dropout, comm.world_size)
    model = muster.parallelize(
        net, batches[comm.rank], communicator=comm, mode="data_parallel", seed=5, **settings
    )
    del net
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True, capturable=True)
    step = capture_step(model, model, optimizer, capture=capture, clip_norm=0.1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses = [step(*batches[comm.rank]).item() for _ in range(STEPS)]
    found = {
        "losses": losses,
        "captured": step.captured,
        "reason": step.reason,
        "memory": torch.cuda.max_memory_allocated(),
        "activations": torch.cuda.max_memory_allocated() - before,
        "again": sum(state.recomputed for state in model.plan.states),
        "weights": {name: each.cpu() for name, each in model.full_state_dict().items()},
    }
    step.release()
    return found


def alone_deep(comm: Any, *, layers: int, width: int, samples: int) -> dict[str, Any]:
    """The same of one process with the batches of all ranks."""
    net, batches = _deep(layers, width, samples, 0.0, comm.world_size)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.AdamW(net.parameters(), RATE, fused=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = net(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: each.cpu() for name, each in net.state_dict().items()}}
