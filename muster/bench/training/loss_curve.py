"""Compares the loss curve of ResNet-50 with Muster's and with DistributedDataParallel, several runs each.

All runs have the same seeds and the same batches of scikit-learn's handwritten digits (real data), enlarged
to 64x64. Rounding to bfloat16 alone makes runs differ, the more the longer they train. To measure by how
much, some runs are "turned": each rank's images come in another order, which changes only the order of
additions. The curves count as equal if runs of the two kinds differ by no more than runs of the same kind.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

from muster.bench.gpu_fleet import Fleet
from muster.bench.gpu_machine import describe_machine as describe_gpu
from muster.bench.training.command import make_model, make_step, start_clean
from muster.launch.command import count_gpus

CURVES = {
    "muster": ("muster", 0),
    "muster turned": ("muster", 1),
    "muster turned twice": ("muster", 2),
    "ddp": ("ddp", 0),
    "ddp turned": ("ddp", 1),
    "ddp turned twice": ("ddp", 2),
    "ddp-compiled": ("ddp-compiled", 0),
    "ddp-float32": ("ddp", 0),
}
"""By curve, the variant of ``muster bench train`` and the number of turns of each rank's images; all curves
but the last are computed in bfloat16."""
TURNS = 3
WINDOW = 10
"""The number of steps over which curves are averaged before they are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--gpus", type=int, default=max(1, count_gpus()), help="world size (all of this host)"
    )
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=1, metavar="N", help="let N ranks share a GPU, which is slow (1)"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--batch", type=int, default=32, help="images per GPU (32)")
    parser.add_argument(
        "--lr", type=float, default=0.002, help="learning rate; larger ones are chaotic (0.002)"
    )


def curve(communicator: Any, *, name: str, steps: int, batch: int, lr: float, init_file: str) -> list[float]:
    """Runs in each process of a fleet: trains and returns the loss of each step, averaged over ranks."""
    import torch

    from muster.communicators.reduce_ops import ReduceOp

    start_clean()
    variant, turns = CURVES[name]
    exact = name.endswith("float32")
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    model, optimizer = make_model(communicator, variant, init_file=init_file, lr=lr)
    step = make_step(model, optimizer, variant, exact=exact)
    images, labels = _digits(torch.float32 if exact else torch.bfloat16)
    order = torch.Generator().manual_seed(0)
    losses = torch.zeros(steps, device=images.device)
    for number in range(steps):
        rows = torch.randperm(len(labels), generator=order)[communicator.rank :: communicator.world_size]
        chosen = rows[:batch].roll(turns * batch // TURNS).to(images.device)
        losses[number] = step(images[chosen].contiguous(memory_format=torch.channels_last), labels[chosen])
    communicator.all_reduce(losses, losses, ReduceOp.MEAN)
    result: list[float] = losses.tolist()
    if hasattr(step, "release"):  # a captured step
        step.release()
    return result


def _digits(dtype: Any) -> tuple[Any, Any]:
    """Returns 1,797 digits, [1797, 3, 64, 64] on the GPU with the same values in any dtype, and labels."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    small = torch.from_numpy(data.images).float().cuda()[:, None] / 8 - 1
    large = torch.nn.functional.interpolate(small, size=(64, 64), mode="bilinear").expand(-1, 3, -1, -1)
    return large.to(torch.bfloat16).to(dtype), torch.from_numpy(data.target).cuda()


def smoothed(losses: list[float]) -> list[float]:
    """Returns means over :data:`WINDOW` consecutive steps."""
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW + 1)]


def difference(one: list[float], other: list[float]) -> float:
    """Returns the mean absolute difference of two smoothed curves."""
    gaps = [abs(a - b) for a, b in zip(smoothed(one), smoothed(other), strict=True)]
    return sum(gaps) / len(gaps)


def compare(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Returns the differences between curves by kind of pair: mean, least, largest, and the number of pairs.

    Args:
        curves: losses by the names of :data:`CURVES`.
    """
    ours = [name for name in curves if name.startswith("muster")]
    theirs = [name for name in curves if name.startswith("ddp") and name != "ddp-float32"]
    pairs = {
        "muster to muster": list(combinations(ours, 2)),
        "ddp to ddp": list(combinations(theirs, 2)),
        "muster to ddp": list(product(ours, theirs)),
        "ddp to ddp-float32": [(name, "ddp-float32") for name in theirs],
    }
    found = {}
    for kind, names in pairs.items():
        gaps = [difference(curves[one], curves[other]) for one, other in names]
        found[kind] = {
            "mean": sum(gaps) / len(gaps),
            "least": min(gaps),
            "largest": max(gaps),
            "pairs": len(gaps),
        }
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results."""
    curves: dict[str, list[float]] = {}
    fleet = Fleet(options.gpus, timeout_s=240, ranks_per_gpu=options.ranks_per_gpu)
    with tempfile.TemporaryDirectory() as directory, fleet:
        machine = fleet.run(describe_gpu)[0]
        for name in CURVES:
            settings = {"steps": options.steps, "batch": options.batch, "lr": options.lr}
            curves[name] = fleet.run(curve, name=name, init_file=f"{directory}/meet", **settings)[0]
    return {
        "world_size": options.gpus,
        "ranks_per_gpu": options.ranks_per_gpu,
        "batch_per_gpu": options.batch,
        "lr": options.lr,
        "machine": machine,
        "losses": curves,
        "differences": compare(curves),
    }


def report(results: dict[str, Any], show: Callable[[str], None] = print) -> None:
    """Prints the results for people."""
    for name, losses in results["losses"].items():
        show(f"{name:19} first {losses[0]:.4f}  last {WINDOW} on average {smoothed(losses)[-1]:.4f}")
    for name, gap in results["differences"].items():
        show(
            f"{name:19} {gap['mean']:.4f} ({gap['least']:.4f} to {gap['largest']:.4f}, {gap['pairs']} pairs)"
        )
