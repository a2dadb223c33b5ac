"""Measures training speed: an example's own loop, the bare training step, and DistributedDataParallel.

    muster bench train --gpus 1 2 --batch 32 --json results.json --check example/muster=0.8
    muster bench train --model gpt2 --gpus 1 2 --batch 8 --json results.json

The variant ``example`` runs examples/resnet50_cifar10.py itself, in a job with a scheduler. It trains on
generated files in CIFAR-10's format, with random crops and resizing, and its result is the speed that it
prints. All other variants train on one batch of 224x224 images in GPU memory. All use bfloat16,
channels_last and fused SGD with momentum. All variants are created first; then each round runs every variant
for a while, so that a machine that changes its speed affects all.

With ``--model gpt2`` the example is examples/gpt2.py, on a file of bytes, with windows of 1,024 bytes. All
variants use autocast to bfloat16, fused AdamW and clipped gradients.

--check A/B=R ends with exit code 1 if the median ratio of A's speed to B's, over rounds, is below R.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import SAFE_ENVIRONMENT, require_gpus
from muster.bench.launches import MUSTER, environment
from muster.bench.report import bounds_of, write
from muster.bench.training import cifar10_files, gpt2

VARIANTS = {
    "example": "the example's loop: elastic, files in CIFAR-10's format, crops; captured as muster is",
    "example-synthetic": "the same on its synthetic images",
    "example-step": "the example's step on the files, without ElasticLoop: nothing can be redone",
    "example-step-synthetic": "the same on its synthetic images",
    "muster": "bare step, captured; stages compiled; bf16 weights with float32 masters; fast stem",
    "muster-bf16-gradients": "the same as muster, gradients travel as bf16",
    "muster-autocast": "bare step, captured; stages compiled; autocast; plain stem",
    "muster-eager": "DataParallel alone: nothing captured or compiled; autocast; plain stem",
    "ddp": "DistributedDataParallel; autocast; plain stem",
    "ddp-compiled": "the same, compiled",
    "ddp-compiled-fast-stem": "the same, compiled, with the fast stem",
    "ddp-captured": "DistributedDataParallel captured by hand, as PyTorch's documentation does it",
    "ddp-captured-compiled": "the same with compiled stages",
}
DEFAULTS = [
    *("example", "example-synthetic", "example-step", "example-step-synthetic"),
    *("muster", "ddp", "ddp-compiled", "ddp-captured"),
]
MODELS = ("resnet50", "gpt2")
ROOT = Path(__file__).resolve().parents[3]
BUCKET_BYTES = 64 * 2**20
_QUICK = ("muster", "muster-bf16-gradients")
_TIMEOUT_S = 590


def make_model(
    communicator: Any,
    variant: str,
    *,
    init_file: str = "",
    lr: float = 0.01,
    device: Any = None,
    tiny: bool = False,
    model_name: str = "resnet50",
) -> tuple[Any, Any]:
    """Makes a model of seed 0 on this rank's device, parallel as ``variant`` says, and its optimizer.

    Args:
        communicator: the communicator of all ranks.
        variant: one of :data:`VARIANTS` other than the examples.
        init_file: the rendezvous file of DistributedDataParallel's processes.
        lr: the learning rate.
        device: the model's device; None for the communicator's GPU.
        tiny: whether to make a small net, for tests on a CPU.
        model_name: one of :data:`MODELS`.
    """
    import torch

    from examples.resnet import ResNet, resnet50
    from muster.torch.data_parallel import DataParallel

    if device is None:
        device = torch.device("cuda", communicator.device_index)
    torch.manual_seed(0)
    if model_name == "gpt2":
        net = gpt2.make_module(variant, device, tiny=tiny)
        if variant.startswith("muster"):
            compression = "bf16" if variant == "muster-bf16-gradients" else None
            made: Any = DataParallel(net, communicator=communicator, compression=compression)
        else:
            made = _ddp(communicator, net, init_file, device)
        optimizer = gpt2.make_optimizer(made, device)
        return torch.compile(made) if variant == "ddp-compiled" and not tiny else made, optimizer
    quick = variant in _QUICK
    fast = quick or variant.endswith("fast-stem")
    module = ResNet((1, 1), width=8) if tiny else resnet50(fast=fast)
    module = module.to(device, memory_format=torch.channels_last)
    compiled = variant not in ("muster-eager", "ddp", "ddp-captured") and not tiny
    if compiled and not variant.startswith("ddp-compiled"):
        module.compile_stages()
    if variant.startswith("muster"):
        model: Any = DataParallel(
            module,
            communicator=communicator,
            weights="bf16" if quick and not tiny else None,
            compression="bf16" if variant == "muster-bf16-gradients" else None,
            bucket_bytes=BUCKET_BYTES,
            first_bytes=BUCKET_BYTES,
        )
    else:
        model = _ddp(communicator, module, init_file, device)
        if compiled and variant.startswith("ddp-compiled"):
            model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    return model, optimizer


def make_step(
    model: Any,
    optimizer: Any,
    variant: str,
    *,
    exact: bool = False,
    device: str = "cuda",
    model_name: str = "resnet50",
) -> Any:
    """Returns a function of images and labels that trains a step as ``variant`` says, and returns the loss.

    Args:
        model: a model of :func:`make_model`.
        optimizer: its optimizer.
        variant: one of :data:`VARIANTS` other than the examples and the one captured by hand.
        exact: whether to compute everything in float32.
        device: the type of the model's device.
        model_name: one of :data:`MODELS`.
    """
    import torch

    from muster.torch.capture import capture_step

    is_gpt2 = model_name == "gpt2"

    def loss_of(images: Any, labels: Any) -> Any:
        return loss_function(model_name)(model, images, labels)

    if variant.startswith("muster") and variant != "muster-eager":
        autocast = None if exact or (variant in _QUICK and not is_gpt2) else torch.bfloat16
        norm = gpt2.CLIP_NORM if is_gpt2 else None
        return capture_step(
            loss_of, model, optimizer, autocast=autocast, clip_norm=norm, capture=device == "cuda"
        )

    def eager(images: Any, labels: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=not exact):
            loss = loss_of(images, labels)
        loss.backward()
        clip(model, model_name)
        optimizer.step()
        return loss.detach()

    return eager


class CapturedByHand:
    """DistributedDataParallel's step as one CUDA graph, made as in PyTorch's documentation ("CUDA Graphs").

    The model is built on the capturing stream and warmed up there by eleven steps, autocast has no cache, and
    the batch is in the buffers that the graph reads. NCCL's errors are not handled asynchronously, which an
    environment variable sets before the process group is made. Other threads may call CUDA during capture, as
    heartbeats do.

    Args:
        make: makes the model and its optimizer.
        images: the batch's images, on the device.
        labels: the batch's labels, on the device.
        model_name: one of :data:`MODELS`.
    """

    WARM_UP_STEPS = 11

    def __init__(self, make: Any, images: Any, labels: Any, *, model_name: str = "resnet50") -> None:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.model, optimizer = make()

            def step() -> Any:
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
                    loss = loss_function(model_name)(self.model, images, labels)
                loss.backward()
                clip(self.model, model_name)
                optimizer.step()
                return loss.detach()

            self.losses = [step().clone() for _ in range(self.WARM_UP_STEPS)]
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer = optimizer
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._loss = step()
        self.captured = True

    def __call__(self) -> Any:
        """Trains one step; returns its loss, which the next step overwrites."""
        self._graph.replay()
        return self._loss

    def release(self) -> None:
        """Releases the graph; must be called before the process group ends."""
        self._graph.reset()


def loss_function(model_name: str) -> Any:
    """Returns the loss as a function of the model and its batch."""
    import torch

    if model_name == "gpt2":
        return gpt2.loss_of
    return lambda model, images, labels: torch.nn.functional.cross_entropy(model(images).float(), labels)


def clip(model: Any, model_name: str) -> None:
    """Clips the gradients if the model's example does."""
    import torch

    if model_name == "gpt2":
        torch.nn.utils.clip_grad_norm_(model.parameters(), gpt2.CLIP_NORM, foreach=True)


def _ddp(communicator: Any, module: Any, init_file: str, device: Any) -> Any:
    import torch

    cuda = device.type == "cuda"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"file://{init_file}",
            rank=communicator.rank,
            world_size=communicator.world_size,
            device_id=device if cuda else None,
        )
    return torch.nn.parallel.DistributedDataParallel(
        module, device_ids=[device.index] if cuda else None, gradient_as_bucket_view=True
    )


def start_clean() -> None:
    """Frees memory and resets statistics, so that each variant finds the GPU as the first one did.

    Called before a variant, because at the end of the previous one something may still refer to its tensors.
    """
    import torch

    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments."""
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="what to train (resnet50)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="world sizes (1 2 4)")
    parser.add_argument("--batch", type=int, nargs="+", help="images or windows per GPU (32 256; gpt2: 8 32)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        metavar="VARIANT",
        help=f"what to measure: {', '.join(VARIANTS)} ({' '.join(DEFAULTS)}; gpt2: all that it has,"
        f" {' '.join(gpt2.VARIANTS)})",
    )
    parser.add_argument(
        "--peers-gpus", type=int, default=0, help="world size at which DDP runs (0: the largest)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a turn lasts (1)")
    parser.add_argument("--tiny", action="store_true", help="a small net on CPUs, to try this benchmark")
    parser.add_argument(
        "--check",
        type=bounds_of(VARIANTS, "example/muster=0.8"),
        nargs="+",
        default=[],
        metavar="A/B=R",
        help="exit with 1 if A is slower than R times B; both must be among the variants",
    )


def run(options: argparse.Namespace) -> int:
    """Measures, prints and checks; returns the exit code."""
    is_gpt2 = options.model == "gpt2"
    options.variants = options.variants or list(gpt2.VARIANTS if is_gpt2 else DEFAULTS)
    options.batch = options.batch or ([8, 32] if is_gpt2 else [32, 256])
    if is_gpt2 and (others := set(options.variants) - set(gpt2.VARIANTS)):
        raise RuntimeError(f"gpt2 has no variant {', '.join(sorted(others))}")
    lacking = {name for one, other, _ in options.check for name in (one, other)} - set(options.variants)
    if lacking:
        raise RuntimeError(f"--check needs what --variants leaves out: {', '.join(sorted(lacking))}")
    if not options.tiny:
        require_gpus(max(options.gpus))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if is_gpt2:
            gpt2.write_text(directory / "data", size_bytes=2**14 if options.tiny else gpt2.TEXT_BYTES)
        else:
            cifar10_files.write(directory / "data", records=200 if options.tiny else 10_000)
        for gpus in options.gpus:
            report = _measure(options, gpus, directory / str(gpus), directory / "data")
            results += report["results"]
            if options.json is not None:
                sample = (
                    {"context": gpt2.shape(options.tiny)["context"]}
                    if is_gpt2
                    else {"image": 32 if options.tiny else 224}
                )
                name = "tiny" if options.tiny else options.model
                found = {"model": name, **sample, "machine": report["machine"], "results": results}
                write(options.json, "train", found)
    return check(results, options.check)


def _measure(options: argparse.Namespace, gpus: int, directory: Path, data: Path) -> dict[str, Any]:
    """Runs the measuring job at one world size; returns the results that its rank 0 has written."""
    directory.mkdir()
    peers = gpus == (options.peers_gpus or max(options.gpus))
    variants = [name for name in options.variants if peers or not name.startswith("ddp")]
    result = directory / "result.json"
    command = [
        *(*MUSTER, "run", "-n", str(gpus), "--scheduler"),
        *(("--devices", "none") if options.tiny else ()),
        *("--", sys.executable, "-m", "muster.bench.training.job", "--out", str(result)),
        *("--rounds", str(options.rounds), "--seconds", str(options.seconds), "--model", options.model),
        *("--init-file", str(directory / "meet"), *(("--tiny",) if options.tiny else ())),
        *("--batch", *map(str, options.batch), "--variants", *variants),
    ]
    env = environment(DATA_PATH=str(data), TORCH_NCCL_ASYNC_ERROR_HANDLING="0", **SAFE_ENVIRONMENT)
    sys.stdout.flush()
    try:
        done = subprocess.run(command, cwd=directory, env=env, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the job of {gpus} ranks was not done after {_TIMEOUT_S} s") from None
    if done.returncode or not result.exists():
        raise RuntimeError(f"the job of {gpus} ranks ended with code {done.returncode}; it says why above")
    report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return report


def check(results: list[dict[str, Any]], bounds: list[tuple[str, str, float]]) -> int:
    """Compares speeds, prints the ratios and returns the exit code.

    The code is 1 if a ratio is too low or was not measured, or if a compared step was not captured.

    Args:
        results: the rows; those of one job were measured in the same turns.
        bounds: pairs of variants, with the least ratio of their speeds.
    """
    failed = False
    compared_names = {name for one, other, _ in bounds for name in (one, other)}
    for row in results:
        if row["variant"] in compared_names and row.get("reason"):
            failed = True
            print(f"{row['gpus']} GPUs  {row['variant']} was not captured: {row['reason']}", flush=True)
    for one, other, least in bounds:
        rows: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in results:
            if "rounds_ms" in row:
                rows.setdefault((row["gpus"], row["batch_per_gpu"]), {})[row["variant"]] = row["rounds_ms"]
        compared = False
        for (gpus, batch), times in rows.items():
            if not {one, other} <= times.keys():
                continue
            compared = True
            ratio = statistics.median(b / a for a, b in zip(times[one], times[other], strict=True))
            failed |= ratio < least
            word = "BELOW" if ratio < least else "at least"
            print(f"{gpus} GPUs  batch {batch:4}  {one}/{other}: {ratio:.3f}, {word} {least:g}", flush=True)
        if not compared:
            failed = True
            print(f"{one}/{other}: not measured together", flush=True)
    return int(failed)
