"""The ways to train a model on several GPUs that ``muster bench parallel`` compares."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from muster.bench.training.command import _ddp
from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.parallel.api import parallelize
from muster.parallel.functions.losses import CrossEntropy
from muster.parallel.mesh_communicator import Scale
from muster.parallel.planning.costs import Hardware
from muster.torch.capture import capture_step
from muster.torch.data_parallel import DataParallel
from muster.torch.sharded_optimizer import ShardedOptimizer
from muster.torch.transfer import array_of

_SEEDING = threading.Lock()  # ranks that are threads share torch's generator
SETTINGS: dict[str, Any] = {"lr": 1e-4}
IGNORED = -100
"""The target value that a loss ignores; the batches have none."""

Made = tuple[Callable[[], Any], Any, Any]
"""A function that trains a step and returns its loss, an object with ``captured``, and the model."""


@dataclass(frozen=True)
class Task:
    """A model and its batches.

    Attributes:
        make: makes the module on a device; it ends in ``head``.
        batch: makes a rank's inputs and targets.
        head: the name of the last layer, which is linear.
        blocks: the modules that FSDP gathers one by one.
    """

    make: Callable[[Any], nn.Module]
    batch: Callable[[Any, int], tuple[Any, Any]]
    head: str
    blocks: Callable[[nn.Module], list[nn.Module]]


def written_loss(scores: Any, targets: Any) -> Any:
    """Returns the mean cross entropy, as a program would write it."""
    return nn.functional.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


def fused_loss(scores: Any, targets: Any) -> Any:
    """Returns the same in one pass, as the models of plans compute it; the other variants use it, too."""
    return CrossEntropy.apply(scores.flatten(0, -2), targets.flatten(), 0, None, IGNORED, True).mean()


def make_step(
    variant: str, task: Task, group: Communicator, device: Any, machine: Hardware | None, init_file: str
) -> Made:
    """Makes a variant of training a model, ready for its first step."""
    with _SEEDING:
        torch.manual_seed(0)
        net = task.make(device)
    batch = task.batch(device, group.rank)
    low = torch.bfloat16 if device.type == "cuda" else None
    settings = SETTINGS | ({"fused": True, "capturable": True} if device.type == "cuda" else {})
    if variant == "auto" or variant.startswith("plan-"):
        return _planned(variant, net, task, group, batch, low, machine, settings)
    model: Any
    if variant == "by-hand":
        model = HandSplit(net, task.head, group)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        step = capture_step(model, model, optimizer, autocast=low)
        return lambda: step(*batch), step, model
    if variant == "data-parallel":
        model = DataParallel(net, communicator=group)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        step = capture_step(lambda x, y: fused_loss(model(x), y), model, optimizer, autocast=low)
        return lambda: step(*batch), step, model
    return _eager(variant, net, task, group, batch, init_file, device)


def _planned(
    variant: str,
    net: Any,
    task: Task,
    group: Communicator,
    batch: Any,
    low: Any,
    machine: Hardware | None,
    settings: dict[str, Any],
) -> Made:
    """Makes the variant of a plan that the search chooses, freely or with what the variant fixes."""
    ways: dict[str, dict[str, Any]] = {
        "auto": {},
        "plan-data-parallel": {"mode": "data_parallel"},
        "plan-whole-updates": {"mode": "semi_auto", "shard_updates": False},
        "plan-head-by-outputs": {"mode": "semi_auto", "strategies": {task.head: {"n": group.world_size}}},
        "plan-head-by-inputs": {"mode": "semi_auto", "strategies": {task.head: {"k": group.world_size}}},
        "plan-least-sent": {"mode": "semi_auto", "search": "propagation"},
    }
    model = parallelize(
        net,
        batch,
        loss=written_loss,
        communicator=group,
        machine=machine,
        autocast=low,
        batch_norm="local",
        **ways[variant],
    )
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    step = capture_step(model, model, optimizer)
    return lambda: step(*batch), step, model


def _eager(
    variant: str, net: Any, task: Task, group: Communicator, batch: Any, init_file: str, device: Any
) -> Made:
    """Makes a variant whose step is not captured: eager, or compiled by torch."""
    cuda = device.type == "cuda"
    optimizer: Any
    if variant == "zero-1":
        settings = SETTINGS | ({"fused": True, "capturable": True} if cuda else {})
        model, optimizer = (
            net,
            ShardedOptimizer(net, communicator=group, make=lambda part: torch.optim.AdamW(part, **settings)),
        )
    else:
        model = _of_torch(variant, net, task, group, init_file, device)
        plain = [p for p in model.parameters() if not hasattr(p, "placements")]
        divided = [p for p in model.parameters() if hasattr(p, "placements")]
        parts = [{"params": each} for each in (plain, divided) if each]  # fused kernels need one kind each
        optimizer = torch.optim.AdamW(parts, **SETTINGS, fused=cuda)

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            own = variant == "tensor-parallel"  # computes the loss itself
            loss = model(*batch) if own else fused_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, None, model


def _of_torch(variant: str, net: Any, task: Task, group: Communicator, init_file: str, device: Any) -> Any:
    if variant == "ddp-compiled":
        return _compiled(_ddp(group, net, init_file, device), device)
    if variant == "tensor-parallel":
        return TensorParallel(net, task.head, group, init_file, device)
    _ddp(group, nn.Linear(1, 1).to(device), init_file, device)  # makes the process group
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net.to(memory_format=torch.contiguous_format)  # the only format that is supported
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in task.blocks(net):
        fully_shard(block, mp_policy=policy)
    whole = fully_shard(net, mp_policy=policy)
    return _compiled(whole, device) if variant == "fsdp2-compiled" else whole


def _compiled(module: Any, device: Any) -> Any:
    return torch.compile(module) if device.type == "cuda" else module


# ---------------------------------------------------------------- split by hand


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Gathers the samples of all ranks; its backward pass sums the gradients of each rank's samples."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Communicator) -> Any:
        ctx.group = group
        return _stacked(group, x.detach()).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        group = ctx.group
        own = grad.new_empty(grad.shape[0] // group.world_size, *grad.shape[1:])
        group.reduce_scatter(
            array_of(group, grad.contiguous().view(-1)), array_of(group, own.view(-1)), ReduceOp.SUM
        )
        return own, None


def _stacked(group: Communicator, x: Any) -> Any:
    """Gathers the ranks' tensors into one of shape [ranks, ...]."""
    whole = x.new_empty(group.world_size, *x.shape)
    group.all_gather(array_of(group, x.contiguous().view(-1)), array_of(group, whole.view(-1)))
    return whole


class HandSplit(nn.Module):  # type: ignore[misc]
    """A model split by hand: a data-parallel body, and on each rank a shard of the last layer's rows."""

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
        """Returns the loss of all ranks' samples."""
        features = self.body(x).flatten(0, -2)
        everyone = _Gather.apply(features, self.communicator)
        scores = nn.functional.linear(everyone, self.weight, self.bias)
        first = self.communicator.rank * scores.shape[1]
        whole = _stacked(self.communicator, targets.flatten()).flatten()
        exchange = functools.partial(_stacked, self.communicator)
        return CrossEntropy.apply(scores, whole, first, exchange, IGNORED, True).mean()

    def no_sync(self) -> Any:
        """See :class:`muster.DataParallel`."""
        return self.body.no_sync()


class TensorParallel(nn.Module):  # type: ignore[misc]
    """A model with its body under compiled DDP, its last layer split by torch's ``parallelize_module``."""

    def __init__(
        self, module: nn.Module, head: str, group: Communicator, init_file: str, device: Any
    ) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        layer = getattr(module, head)
        setattr(module, head, nn.Identity())
        self.body = _compiled(_ddp(group, module, init_file, device), device)
        mesh = init_device_mesh(device.type, (group.world_size,))
        self.head = parallelize_module(layer, mesh, ColwiseParallel(input_layouts=Shard(0)))
        self.ranks, self.rank = group.world_size, group.rank

    def forward(self, x: Any, targets: Any) -> Any:
        """Returns the loss of all ranks' samples."""
        features = self.body(x).flatten(0, -2)
        scores = self.head(Scale.apply(features, self.ranks))  # DDP averages what is to be summed
        whole = self._stacked(targets.flatten()).flatten()
        first = self.rank * scores.shape[1]
        return CrossEntropy.apply(scores, whole, first, self._stacked, IGNORED, True).mean()

    def _stacked(self, x: Any) -> Any:
        whole = x.new_empty(self.ranks, *x.shape)
        torch.distributed.all_gather(list(whole.unbind()), x.contiguous())
        return whole
