"""Measures the cost of a process group that outlives its members: GPT-2's step over it and over torch's."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from muster.bench.training import gpt2
from muster.programs.lasting_world import LastingWorld

WARM_UP_STEPS = 5


def measure(*, steps: int, turns: int, tiny: bool) -> dict[str, Any]:
    """Trains GPT-2 124M by DDP on one rank, so that nothing but the group differs between the turns.

    Args:
        steps: the number of steps of a turn.
        turns: the number of turns of each group.
        tiny: whether to train a small net, which also runs without a GPU.

    Raises:
        RuntimeError: this torch lacks what lasting groups need.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = LastingWorld()
    if lacks := world.lacks():
        raise RuntimeError(lacks)
    with tempfile.TemporaryDirectory() as scratch:
        meeting = f"file://{Path(scratch) / 'meeting'}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        try:
            groups = {"plain": dist.new_group([0])}
            world.install()
            groups["lasting"] = dist.new_group([0])
            trains = {name: _step(group, device, tiny=tiny) for name, group in groups.items()}
            found = _in_turns(trains, device, steps=steps, turns=turns)
        finally:
            dist.destroy_process_group()
    cost = found["lasting"]["step_ms"] / found["plain"]["step_ms"] - 1
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    return {
        **found,
        "device": {"summary": where},
        "tiny": {"summary": tiny},
        "cost": {"summary": f"{100 * cost:.2f} %", "ratio": cost},
    }


def _step(group: Any, device: Any, *, tiny: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    net = DistributedDataParallel(gpt2.make_module("ddp", device, tiny=tiny), process_group=group)
    optimizer = gpt2.make_optimizer(net, device)
    windows = torch.randint(256, (16, gpt2.shape(tiny)["context"] + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            guessed = net(windows[:, :-1])
            loss = functional.cross_entropy(guessed.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_turns(
    trains: dict[str, Callable[[], None]], device: Any, *, steps: int, turns: int
) -> dict[str, dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in trains}
    for turn in range(turns + 1):
        for name, step in trains.items():
            for _ in range(WARM_UP_STEPS if turn == 0 else 1):
                step()
            _finish(device)
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            _finish(device)
            if turn:
                times[name].append(1000 * (time.perf_counter() - begun) / steps)
    return {
        name: {"step_ms": median, "turns_ms": found, "summary": f"{median:.3f} ms"}
        for name, found in times.items()
        for median in [statistics.median(found)]
    }


def _finish(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
