"""ResNet-50 training speed: ours, DistributedDataParallel, and DistributedDataParallel compiled, in one run.

    python -m bench train --gpus 1 2 4 --batch 32 256 --json results.json

Synthetic images of 224x224 that lie on the GPU; bfloat16 autocast, channels_last, fused SGD with momentum
for everybody.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_fleet import Fleet
from bench.gpu_machine import describe_machine

VARIANTS = {
    "muster": "whole step captured; stages compiled; bf16 weights with float32 masters; fast stem",
    "muster-bf16-gradients": "the same as muster, gradients travel as bf16",
    "muster-autocast": "whole step captured; stages compiled; autocast; plain stem",
    "muster-eager": "DataParallel alone: nothing captured or compiled; autocast; plain stem",
    "ddp": "DistributedDataParallel; autocast; plain stem",
    "ddp-compiled": "the same, compiled",
    "ddp-compiled-fast-stem": "the same, compiled, with the fast stem",
}
_QUICK = ("muster", "muster-bf16-gradients")
_ROUNDS = 3


def speed(
    communicator: Any,
    *,
    variant: str,
    batch: int,
    bucket_mib: float = 64,
    init_file: str = "",
    profile: str = "",
    seconds: float = 1.5,
) -> dict[str, Any]:
    """Runs in each process of a fleet: trains on one synthetic batch and times it.

    Returns:
        ``rounds_s``: seconds per step of each round, ``losses``: of the first steps, ``setup_s``:
        seconds until the step is at full speed.
    """
    import torch

    start_clean()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    begin = time.perf_counter()
    step, losses = _make_step(communicator, variant, batch, bucket_mib, init_file)
    for _ in range(12):
        losses.append(step())
    torch.cuda.synchronize()
    setup_s = time.perf_counter() - begin
    steps = _agree(communicator, step, seconds)
    rounds = []
    for _ in range(_ROUNDS):
        communicator.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begin) / steps)
    if profile and communicator.rank == 0 and communicator.world_size == 1:
        _profile(step, profile)
    result = {
        "rounds_s": rounds,
        "losses": [float(loss) for loss in losses],
        "setup_s": setup_s,
        "reason": getattr(step, "reason", None),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if hasattr(step, "release"):  # a captured step
        step.release()
    return result


def _make_step(
    communicator: Any, variant: str, batch: int, bucket_mib: float, init_file: str
) -> tuple[Any, list[Any]]:
    import torch

    model, optimizer = make_model(communicator, variant, bucket_mib=bucket_mib, init_file=init_file)
    device = torch.device("cuda", communicator.device_index)
    generator = torch.Generator(device).manual_seed(communicator.rank)
    images = torch.randn(batch, 3, 224, 224, device=device, generator=generator)
    images = images.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=device, generator=generator)
    step = make_step(model, optimizer, variant)
    if variant.startswith("muster") and variant != "muster-eager":
        return _Bound(step, images, labels), []
    return lambda: step(images, labels), []


def make_model(
    communicator: Any, variant: str, *, bucket_mib: float = 64, init_file: str = "", lr: float = 0.01
) -> tuple[Any, Any]:
    """ResNet-50 of seed 0 on this rank's GPU, made parallel as ``variant`` says, and its optimizer.

    Args:
        communicator: ours.
        variant: one of :data:`VARIANTS`.
        bucket_mib: our gradient buckets.
        init_file: where the processes of DistributedDataParallel meet.
        lr: learning rate.
    """
    import torch

    from examples.resnet import resnet50
    from worker.torch_data_parallel import DataParallel

    device = torch.device("cuda", communicator.device_index)
    torch.manual_seed(0)
    quick = variant in _QUICK
    module = resnet50(fast=quick or variant.endswith("fast-stem")).to(
        device, memory_format=torch.channels_last
    )
    if variant.startswith("muster"):
        if variant != "muster-eager":
            module.compile_stages()
        model: Any = DataParallel(
            module,
            communicator=communicator,
            weights="bf16" if quick else None,
            compression="bf16" if variant == "muster-bf16-gradients" else None,
            bucket_bytes=int(bucket_mib * 2**20),
            first_bytes=int(bucket_mib * 2**20),
        )
    else:
        model = _ddp(communicator, module, init_file, compiled=variant.startswith("ddp-compiled"))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    return model, optimizer


def make_step(model: Any, optimizer: Any, variant: str, *, exact: bool = False) -> Any:
    """A function of images and labels that trains one step and returns the loss, as ``variant`` says.

    Args:
        model: as :func:`make_model` made it.
        optimizer: likewise.
        variant: one of :data:`VARIANTS`.
        exact: everything in float32.
    """
    import torch

    from worker.capture import capture_step

    def loss_of(images: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(images).float(), labels)

    if variant.startswith("muster") and variant != "muster-eager":
        return capture_step(loss_of, model, optimizer, autocast=None if variant in _QUICK else torch.bfloat16)

    def eager(images: Any, labels: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            loss = loss_of(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return eager


class _Bound:
    """A captured step with its batch; the losses it returns are copies."""

    def __init__(self, step: Any, images: Any, labels: Any) -> None:
        self.step, self._images, self._labels = step, images, labels
        self._first = 12

    @property
    def reason(self) -> str | None:
        return self.step.reason  # type: ignore[no-any-return]

    def release(self) -> None:
        self.step.release()

    def __call__(self) -> Any:
        # The batch lies in the graph's own buffers once it is captured; no copy is part of the step then.
        batch = (self.step._static or (self._images, self._labels)) if self.step.captured else ()
        loss = self.step(*(batch or (self._images, self._labels)))
        self._first -= 1
        return loss.clone() if self._first >= 0 else loss


def _ddp(communicator: Any, module: Any, init_file: str, *, compiled: bool) -> Any:
    import torch

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl",
            init_method=f"file://{init_file}",
            rank=communicator.rank,
            world_size=communicator.world_size,
            device_id=torch.device("cuda", communicator.device_index),
        )
    model = torch.nn.parallel.DistributedDataParallel(
        module, device_ids=[communicator.device_index], gradient_as_bucket_view=True
    )
    return torch.compile(model) if compiled else model


def _agree(communicator: Any, step: Any, seconds: float) -> int:
    """How many steps last about ``seconds``; the same number on all ranks."""
    import torch

    begin = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    steps = torch.tensor([seconds / ((time.perf_counter() - begin) / 5)], device="cuda")
    communicator.broadcast(steps, 0)
    return max(5, int(steps.item()))


def _profile(step: Any, path: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        import torch

        torch.cuda.synchronize()
    table = profiler.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90
    )
    Path(path).write_text(table)


def start_clean() -> None:
    """Frees what the variant before has left: each finds the GPU, and its peak of memory, as the first did.

    At the beginning of the next one, because only then nothing refers to the one before any more.
    """
    import torch

    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark's arguments."""
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="world sizes (1 2 4)")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256], help="images per GPU (32 256)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["muster", "muster-autocast", "ddp", "ddp-compiled"],
        help="what to measure (muster muster-autocast ddp ddp-compiled)",
    )
    parser.add_argument("--bucket-mib", type=float, default=64, help="our gradient buckets, in MiB (64)")
    parser.add_argument(
        "--peers-gpus", type=int, default=0, help="world size at which DDP runs (0: the largest)"
    )
    parser.add_argument("--profile", default="", help="write a kernel table of one GPU's steps here")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    results: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    peers_gpus = arguments.peers_gpus or max(arguments.gpus)
    for gpus in arguments.gpus:
        with tempfile.TemporaryDirectory() as directory, Fleet(gpus, timeout_s=400) as fleet:
            machine = fleet.run(describe_machine)[0]
            for batch in arguments.batch:
                for variant in arguments.variants:
                    if variant.startswith("ddp") and gpus != peers_gpus:
                        continue
                    row = _measure(fleet, variant, batch, directory, arguments)
                    results.append(row)
                    _show(row)
                    _write(arguments.json, machine, results)
    return 0


def _measure(
    fleet: Fleet, variant: str, batch: int, directory: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    ranks = fleet.run(
        speed,
        variant=variant,
        batch=batch,
        bucket_mib=arguments.bucket_mib,
        init_file=f"{directory}/meet",
        profile=f"{arguments.profile}-{variant}-{batch}" if arguments.profile else "",
    )
    rounds = [max(times) for times in zip(*(rank["rounds_s"] for rank in ranks), strict=True)]
    step_s = statistics.median(rounds)
    return {
        "variant": variant,
        "gpus": fleet.size,
        "batch_per_gpu": batch,
        "bucket_mib": arguments.bucket_mib,
        "images_per_s": fleet.size * batch / step_s,
        "step_ms": step_s * 1e3,
        "rounds_ms": [seconds * 1e3 for seconds in rounds],
        "setup_s": max(rank["setup_s"] for rank in ranks),
        "memory_gib": max(rank["memory_gib"] for rank in ranks),
        "losses": ranks[0]["losses"],
        "reason": ranks[0]["reason"],
    }


def _show(row: dict[str, Any]) -> None:
    note = f"  ({row['reason']})" if row["reason"] else ""
    print(
        f"{row['gpus']} GPUs  {row['variant']:18} batch {row['batch_per_gpu']:4}"
        f"  {row['images_per_s']:9.0f} img/s  {row['step_ms']:8.3f} ms  setup {row['setup_s']:5.1f} s{note}",
        flush=True,
    )


def _write(path: Path | None, machine: dict[str, Any], results: list[dict[str, Any]]) -> None:
    if path is not None:
        report = {
            "benchmark": "train",
            "model": "resnet50",
            "image": 224,
            "machine": machine,
            "results": results,
        }
        path.write_text(json.dumps(report, indent=1) + "\n")
