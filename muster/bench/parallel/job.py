"""Measures one variant of ``muster bench parallel`` on each rank."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from examples.big_vocabulary import Language
from examples.resnet import resnet50
from muster.bench.parallel.models import Llama, Vision
from muster.bench.parallel.variants import Task, make_step
from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.parallel.measure import measure as measure_machine
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.memory import step_memory
from muster.parallel.planning.plan import Plan
from muster.torch.transfer import array_of

WARM_UP = 6
OPTIMIZER_BYTES = 16
"""The bytes of a float32 parameter with its gradient and AdamW's two states."""


class Classifier(nn.Module):  # type: ignore[misc]
    """ResNet-50 whose last layer is named ``head``."""

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


def _vision(device: Any) -> nn.Module:
    with device:
        return Vision(1000).to(memory_format=torch.channels_last)


def _llama(device: Any) -> nn.Module:
    with device:
        return Llama(32_000, 1024, 12, 2048)


def _stages(module: Any) -> list[nn.Module]:
    return [*(each for each in module.body.modules() if type(each).__name__ == "Bottleneck"), module.head]


def _blocks(module: Any) -> list[nn.Module]:
    return [*module.blocks, module.head]


TASKS = {
    "classes": Task(_classifier(1_000_000), _images(64, 1_000_000), "head", _stages),
    "vocabulary": Task(_language(262_144, 1024, 6, 1024), _words(4, 1024, 262_144), "head", _blocks),
    "resnet50": Task(_classifier(1000), _images(64, 1000), "head", _stages),
    "gpt2": Task(_language(50_304, 768, 12, 1024), _words(8, 1024, 50_304), "head", _blocks),
    "vit": Task(_vision, _images(64, 1000), "head", _blocks),
    "llama": Task(_llama, _words(4, 2048, 32_000), "head", _blocks),
    "large": Task(_language(50_304, 5120, 36, 2048), _words(2, 2048, 50_304), "head", _blocks),
    "tiny": Task(_language(256, 32, 1, 8), _words(2, 8, 256), "head", _blocks),
}


# ---------------------------------------------------------------- measuring


def machine_of(communicator: Communicator) -> dict[str, Any]:
    """Measures this machine's costs for the plans of all models."""
    return measure_machine(communicator).to_json()


def measure(
    communicator: Communicator, *, model: str, variant: str, seconds: float, init_file: str, machine: Any
) -> dict[str, Any]:
    """Measures one variant, in processes of its own so as not to affect others; returns its row."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    task = TASKS[model]
    row: dict[str, Any] = {"model": model, "variant": variant}
    lacking = _lacking_memory(task, communicator.world_size) if cuda else ""
    if lacking:
        return row | {"error": lacking}
    try:
        assumed = Hardware(**machine) if machine else None
        step, captured, made = make_step(variant, task, communicator, device, assumed, init_file)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses = [float(step()) for _ in range(WARM_UP)]
        count = max(5, round(_slowest(communicator, device, seconds / _timed(step, 5, device))))
        communicator.barrier()
        step_ms = 1e3 * _slowest(communicator, device, _timed(step, count, device))
    except RuntimeError as error:  # such as out of memory: the row says so
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    row |= {"step_ms": step_ms, "losses": losses}
    row["captured"] = bool(captured is not None and captured.captured)
    row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    plan = getattr(made, "plan", None)
    if isinstance(plan, Plan):
        row |= predictions(plan)
    if captured is not None:
        captured.release()
    return row


def predictions(plan: Plan) -> dict[str, Any]:
    """Returns a plan's predictions: milliseconds, GB, and the plan itself."""
    memory = step_memory(plan.graph, plan.states, plan.mesh, optimizer_states=plan.options.optimizer_states)
    return {
        "predicted_ms": plan.timeline.seconds * 1e3,
        "searched_ms": plan.seconds * 1e3,
        "predicted_gb": memory.peak / 1e9,
        "verdict": plan.verdict,
        "mesh": list(plan.mesh),
        "plan": plan.digest,
    }


def _lacking_memory(task: Task, ranks: int) -> str:
    """Returns why a model cannot fit into the ranks' memory however it is split; empty if it may fit."""
    parameters = sum(each.numel() for each in task.make(torch.device("meta")).parameters())
    needed = OPTIMIZER_BYTES * parameters / ranks
    here = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if needed < 0.9 * here:
        return ""
    return (
        f"its {parameters / 1e9:.1f} billion parameters take {needed / 1e9:.0f} GB a GPU,"
        f" and these have {here / 1e9:.0f} GB: {math.ceil(needed * ranks / (0.9 * here))} GPUs are needed"
    )


def _over_ranks(group: Communicator, value: float, device: Any, op: ReduceOp) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    array = array_of(group, tensor)
    group.all_reduce(array, array, op)
    return float(tensor)


def _timed(step: Callable[[], Any], count: int, device: Any) -> float:
    """Returns the mean seconds of ``count`` steps."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def _slowest(group: Communicator, device: Any, value: float) -> float:
    return _over_ranks(group, value, device, ReduceOp.MAX)
