"""A job that trains a divided model in an elastic loop; a rank may kill itself in mid-step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import muster
from muster.parallel.planning.costs import Hardware

SAMPLES, BATCH, WIDTH, CLASSES = 96, 24, 48, 24
SLOW_LINKS = Hardware(
    "slow links", flops_per_s=1e12, memory_bytes_per_s=1e12, bus_bytes_per_s=1e5, latency_s=1e-9, launch_s=0
)
"""Where communication costs so much the search divides the large layers."""


def make() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, CLASSES)).double()


def data() -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(1)
    x = torch.rand(SAMPLES, WIDTH, generator=g, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=g)


def one_process(steps: int, module: Any = None) -> list[float]:
    """The losses of one process on the whole batches."""
    module, (x, y), losses = module or make(), data(), []
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, eps=1e-3)
    sampler = muster.ShardedSampler(SAMPLES, BATCH, seed=3)
    for _ in range(steps):
        rows = torch.from_numpy(sampler.batch().indices.copy())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Trains, and prints "step N loss L" on each rank, and at the end whether steps were captured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill", type=int, default=0, help="rank 1 kills itself once, in this step")
    parser.add_argument("--split", action="store_true", help="the hidden layer is divided, not the batch")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with muster.init() as session:
        device = torch.device("cpu")
        if torch.cuda.is_available() and session.device_ordinal >= 0:
            device = torch.device("cuda", session.device_ordinal)
            torch.cuda.set_device(device)
        x, y = (tensor.to(device) for tensor in data())
        rows = BATCH // session.world_size
        model = muster.parallelize(
            make().to(device),
            (x[:rows], y[:rows]),
            loss=nn.CrossEntropyLoss(),
            mode="semi_auto" if options.split else "auto",
            strategies={"0": {"n": 2}, "2": {"k": 2}} if options.split else None,
            machine=SLOW_LINKS,
            elastic=True,
        )
        on_gpu = {"fused": True, "capturable": True} if device.type == "cuda" else {}
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3, **on_gpu)
        sampler = muster.ShardedSampler(SAMPLES, BATCH, seed=3)
        state = muster.ParallelTrainingState(model, optimizer, sampler, checkpoint=options.out / "last")
        train = muster.capture_step(model, model, optimizer)
        marker = options.out / "killed"
        for step in muster.ElasticLoop(session, state, epochs=1000, steps=options.steps):
            with step:
                if state.step == 2:
                    state.save()
                own = torch.from_numpy(step.batch.indices.copy()).to(device)
                if options.kill and state.step == options.kill and session.rank == 1 and not marker.exists():
                    marker.touch()
                    model(x[own], y[own])  # the others wait in what comes next
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = train(x[own], y[own]).item()
            if step.done:
                print(f"step {state.step} loss {loss!r}", flush=True)
        print(f"divided: {not model.plan.is_data_parallel}; captured: {train.captured}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
