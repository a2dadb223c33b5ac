"""What each rank of ``muster bench parallel`` runs."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.big_vocabulary import Language
from examples.resnet import resnet50
from muster.bench.training.command import _ddp
from muster.worker.communicators.base import Communicator, ReduceOp
from muster.worker.parallel.api import parallelize
from muster.worker.parallel.measure import measure as measure_machine
from muster.worker.parallel.planning.costs import Machine
from muster.worker.pytorch.capture import capture_step
from muster.worker.pytorch.data_parallel import DataParallel
from muster.worker.pytorch.sharded_optimizer import ShardedOptimizer
from muster.worker.pytorch.transfer import array_of

WARM_UP = 6
_SEEDING = threading.Lock()  # ranks that are threads share torch's generator
SETTINGS: dict[str, Any] = {"lr": 1e-4}


@dataclass(frozen=True)
class Task:
    """A model and its batches.

    Attributes:
        make: the module, on a device; ends in ``head``.
        batch: inputs and targets of a rank.
        head: name of the last layer, linear.
        blocks: the modules that FSDP gathers one by one.
    """

    make: Callable[[Any], nn.Module]
    batch: Callable[[Any, int], tuple[Any, Any]]
    head: str
    blocks: Callable[[nn.Module], list[nn.Module]]


class Classifier(nn.Module):  # type: ignore[misc]
    """ResNet-50 with a last layer of its own name."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = resnet50(1)
        width = self.body.head.classify.in_features
        self.body.head.classify = nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(self, images: Any) -> Any:
        """[samples, 3, 224, 224] to [samples, classes]."""
        return self.head(self.body(images))


def _images(samples: int, classes: int) -> Callable[[Any, int], tuple[Any, Any]]:
    def make(device: Any, rank: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(samples, 3, 224, 224, generator=generator).to(device)
        labels = torch.randint(classes, (samples,), generator=generator).to(device)
        return images.contiguous(memory_format=torch.channels_last), labels

    return make


def _words(samples: int, tokens: int, words: int) -> Callable[[Any, int], tuple[Any, Any]]:
    def make(device: Any, rank: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(rank)
        drawn = torch.randint(words, (samples, tokens + 1), generator=generator).to(device)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return make


def _classifier(classes: int) -> Callable[[Any], nn.Module]:
    def make(device: Any) -> nn.Module:
        with device:
            return Classifier(classes).to(memory_format=torch.channels_last)

    return make


def _language(words: int, width: int, layers: int, tokens: int) -> Callable[[Any], nn.Module]:
    def make(device: Any) -> nn.Module:
        with device:
            return Language(words, width, layers, tokens)

    return make


def _stages(module: Any) -> list[nn.Module]:
    return [*(each for each in module.body.modules() if type(each).__name__ == "Bottleneck"), module.head]


def _blocks(module: Any) -> list[nn.Module]:
    return [*module.blocks, module.head]


TASKS = {
    "classes": Task(_classifier(1_000_000), _images(64, 1_000_000), "head", _stages),
    "vocabulary": Task(_language(262_144, 1024, 6, 1024), _words(4, 1024, 262_144), "head", _blocks),
    "resnet50": Task(_classifier(1000), _images(64, 1000), "head", _stages),
    "gpt2": Task(_language(50_304, 768, 12, 1024), _words(8, 1024, 50_304), "head", _blocks),
    "tiny": Task(_language(256, 32, 1, 8), _words(2, 8, 256), "head", _blocks),
}


def loss_of(scores: Any, targets: Any) -> Any:
    """The mean cross entropy, for classes and for words."""
    return nn.functional.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


# ---------------------------------------------------------------- split by hand


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """The samples of all ranks; the gradients of each rank's samples summed."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Communicator) -> Any:
        ctx.group = group
        whole = x.new_empty(x.shape[0] * group.world_size, *x.shape[1:])
        group.all_gather(array_of(group, x.detach().contiguous()), array_of(group, whole))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        group = ctx.group
        own = grad.new_empty(grad.shape[0] // group.world_size, *grad.shape[1:])
        group.reduce_scatter(
            array_of(group, grad.contiguous().view(-1)), array_of(group, own.view(-1)), ReduceOp.SUM
        )
        return own, None


class _SplitCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The mean cross entropy where each rank has the scores of some of the classes."""

    @staticmethod
    def forward(ctx: Any, scores: Any, targets: Any, group: Communicator) -> Any:
        count = scores.shape[1]
        highest = _over_ranks(group, scores.amax(1), ReduceOp.MAX)
        powers = (scores - highest[:, None]).exp_()
        total = _over_ranks(group, powers.sum(1), ReduceOp.SUM)
        local = targets - group.rank * count
        own = (local >= 0) & (local < count)
        place = local.clamp(0, count - 1)[:, None]
        wanted = torch.where(own, scores.gather(1, place)[:, 0], 0.0)
        wanted = _over_ranks(group, wanted, ReduceOp.SUM)
        ctx.save_for_backward(powers.div_(total[:, None]), place, own)
        return (total.log() + highest - wanted).mean()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        shares, place, own = ctx.saved_tensors
        shares.scatter_add_(1, place, -own[:, None].to(shares.dtype))
        return shares.mul_(grad / shares.shape[0]), None, None


def _over_ranks(group: Communicator, tensor: Any, op: ReduceOp) -> Any:
    tensor = tensor.contiguous()
    array = array_of(group, tensor)
    group.all_reduce(array, array, op)
    return tensor


class HandSplit(nn.Module):  # type: ignore[misc]
    """The body data-parallel, of the last layer each rank's share of rows."""

    def __init__(self, module: nn.Module, head: str, group: Communicator) -> None:
        super().__init__()
        layer = getattr(module, head)
        setattr(module, head, nn.Identity())
        self.communicator = group
        self.body = DataParallel(module, communicator=group, gradients_mean=False)
        rows = layer.weight.shape[0] // group.world_size
        own = slice(group.rank * rows, (group.rank + 1) * rows)
        self.weight = nn.Parameter(layer.weight.detach()[own].clone())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach()[own].clone())

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss of all ranks' samples."""
        features = self.body(x).flatten(0, -2)
        everyone = _Gather.apply(features, self.communicator)
        whole = targets.new_empty(targets.numel() * self.communicator.world_size)
        self.communicator.all_gather(
            array_of(self.communicator, targets.flatten()), array_of(self.communicator, whole)
        )
        scores = nn.functional.linear(everyone, self.weight, self.bias)
        return _SplitCrossEntropy.apply(scores.float(), whole, self.communicator)

    def no_sync(self) -> Any:
        """See :class:`muster.DataParallel`."""
        return self.body.no_sync()


# ---------------------------------------------------------------- variants


def make_step(
    variant: str, task: Task, group: Communicator, device: Any, machine: Machine | None, init_file: str
) -> tuple[Callable[[], Any], Any]:
    """A function that trains one step and returns its loss, and what says whether it is captured."""
    with _SEEDING:
        torch.manual_seed(0)
        net = task.make(device)
    batch = task.batch(device, group.rank)
    low = torch.bfloat16 if device.type == "cuda" else None
    settings = SETTINGS | ({"fused": True, "capturable": True} if device.type == "cuda" else {})
    model: Any
    if variant == "auto":
        model = parallelize(
            net, batch, loss=loss_of, communicator=group, machine=machine, autocast=low, batch_norm="local"
        )
        step = capture_step(model, model, torch.optim.AdamW(model.parameters(), **settings))
        return lambda: step(*batch), (step, model)
    if variant == "by-hand":
        model = HandSplit(net, task.head, group)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        step = capture_step(model, model, optimizer, autocast=low)
        return lambda: step(*batch), (step, model)
    if variant == "data-parallel":
        model = DataParallel(net, communicator=group)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        step = capture_step(lambda x, y: loss_of(model(x), y), model, optimizer, autocast=low)
        return lambda: step(*batch), (step, model)
    if variant == "zero-1":
        model = net
        optimizer = ShardedOptimizer(
            net, communicator=group, make=lambda part: torch.optim.AdamW(part, **settings)
        )
    else:
        model = _of_torch(variant, net, task, group, init_file, device)
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS, fused=device.type == "cuda")

    def eager() -> Any:
        optimizer.zero_grad()
        with torch.autocast(device.type, low, enabled=low is not None):
            loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return eager, (None, model)


def _of_torch(variant: str, net: Any, task: Task, group: Communicator, init_file: str, device: Any) -> Any:
    """DistributedDataParallel or FSDP2, compiled."""
    wrapped = _ddp(group, net if variant == "ddp-compiled" else nn.Linear(1, 1).to(device), init_file, device)
    if variant == "ddp-compiled":
        return torch.compile(wrapped)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in task.blocks(net):
        fully_shard(block, mp_policy=policy)
    return torch.compile(fully_shard(net, mp_policy=policy))


# ---------------------------------------------------------------- measuring


def measure(
    communicator: Communicator,
    *,
    models: Sequence[str],
    variants: Sequence[str],
    passes: int,
    seconds: float,
    init_file: str,
) -> list[dict[str, Any]]:
    """Rows of all models and variants; each variant is made anew in each pass."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name in models:
        machine = measure_machine(communicator) if cuda else None
        for turn in range(passes):
            for variant in variants if turn % 2 == 0 else reversed(variants):
                row = rows.setdefault((name, variant), {"model": name, "variant": variant, "passes_ms": []})
                if "error" not in row:  # with its own communicator, which holds on to what was captured
                    ranks = range(communicator.world_size)
                    group = communicator.split(f"{name}.{variant}.{turn}", tuple(ranks))
                    assert group is not None
                    _one(row, TASKS[name], group, device, machine, seconds, init_file)
                    group.close()
                if communicator.rank == 0:
                    print(name, variant, row.get("error") or row["passes_ms"], file=sys.stderr, flush=True)
    for row in rows.values():
        if row["passes_ms"]:
            row["step_ms"] = statistics.median(row["passes_ms"])
    return list(rows.values())


def _one(
    row: dict[str, Any],
    task: Task,
    group: Communicator,
    device: Any,
    machine: Machine | None,
    seconds: float,
    init_file: str,
) -> None:
    step: Any = None
    kept: Any = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        step, kept = make_step(row["variant"], task, group, device, machine, init_file)
        losses = [float(step()) for _ in range(WARM_UP)]
        count = max(5, round(_slowest(group, device, seconds / _timed(step, 5, device))))
        group.barrier()
        row["passes_ms"].append(1e3 * _slowest(group, device, _timed(step, count, device)))
    except RuntimeError as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    else:
        captured, model = kept
        row["losses"] = losses
        row["captured"] = bool(captured is not None and captured.captured)
        row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        if row["variant"] == "auto":
            plan = model.plan
            row |= {"predicted_ms": plan.seconds * 1e3, "verdict": plan.verdict, "mesh": list(plan.mesh)}
            row["predicted_gib"] = plan.nbytes / 2**30
        for each in (captured, model):
            with contextlib.suppress(AttributeError):
                each.release() if each is captured else each.close()
    step = kept = None
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _timed(step: Callable[[], Any], count: int, device: Any) -> float:
    """Seconds a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def _slowest(group: Communicator, device: Any, value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    return float(_over_ranks(group, tensor, ReduceOp.MAX))
