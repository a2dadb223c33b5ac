"""Every tensor of a model and its optimizer that a job divides: its whole shape, and who holds which part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.errors import SettingsError
from muster.parallel.module import ParallelModule
from muster.parallel.planning.buckets import parameter_shards
from muster.parallel.planning.layouts import Shape
from muster.parallel.planning.parts import Box, Part, parts_of, whole_part
from muster.parallel.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class DividedTensor:
    """One tensor of a job.

    Attributes:
        name: such as "model.fc.weight" or "optimizer.state.fc.weight.exp_avg".
        shape: of the whole tensor.
        own: this rank's part; contiguous, of at least as many elements.
        parts: what each rank holds, by rank.
        local: the shape in which a rank holds its part; flat, and padded, where the update is divided.
        aliases: other names of the same tensor, where a module ties parameters.
    """

    name: str
    shape: Shape
    own: Any
    parts: Sequence[Part]
    local: Shape
    aliases: tuple[str, ...] = ()

    def view(self, box: Box) -> Any:
        """The elements of this rank's own part that are one of its boxes; shares memory."""
        if self.own.shape == box.sizes:  # whole, in whatever memory format
            return self.own.detach()
        flat = self.own.detach().view(-1)
        return flat[box.start : box.start + box.numel].view(box.sizes)


def parameter_names(model: ParallelModule, optimizer: Any) -> dict[int, str]:
    """The names of the optimizer's parameters, by their ``id``.

    Raises:
        SettingsError: one is not the model's.
    """
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise SettingsError(
                    "the optimizer has a parameter that is not this model's: make it of model.parameters()"
                )
    return names


def divided_tensors(
    model: ParallelModule, optimizer: Any = None, plan: Plan | None = None
) -> list[DividedTensor]:
    """The model's parameters and buffers, and what the optimizer keeps, in an order that all ranks share.

    Args:
        model: whose tensors.
        optimizer: of ``model.parameters()``; None: the model's alone.
        plan: says who holds what; None: the model's own.

    Raises:
        SettingsError: a parameter is layerwise, or the optimizer's parameter is not the model's.
    """
    found = list(_of_model(model, plan or model.plan))
    if optimizer is None:
        return found
    parameter_names(model, optimizer)
    by_id = {id(each.own): each for each in found}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            like = by_id[id(parameter)]
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if not isinstance(value, torch.Tensor):
                    continue
                name = f"optimizer.state.{like.name.removeprefix('model.')}.{key}"
                if value.shape == parameter.shape and value.dim():
                    found.append(DividedTensor(name, like.shape, value, like.parts, like.local))
                else:  # a number of steps, say: the same on all ranks
                    shape = tuple(value.shape)
                    if value.numel() > 1 and any(part != like.parts[0] for part in like.parts):
                        raise SettingsError(
                            f"the optimizer keeps {key} of shape {list(shape)} for {like.name}, of which"
                            " ranks have parts: only optimizers that treat elements one by one fit"
                        )
                    parts = [whole_part(shape)] * len(like.parts)
                    found.append(DividedTensor(name, shape, value, parts, shape))
    return found


def _of_model(model: ParallelModule, plan: Plan) -> Iterator[DividedTensor]:
    graph, nodes = plan.graph, plan.graph.by_name()
    named = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    parts = parts_of(graph, plan.states, plan.mesh)
    held = parameter_shards(graph, plan.states, plan.mesh)
    for node_name, tensor in model.held_tensors():
        node = graph.nodes[nodes[node_name]]
        if node.layerwise:
            raise SettingsError(
                f"{names[id(tensor)][0]} is layerwise: each rank has values of its own, which no other rank"
                " could take over. Save it by yourself, a file for each rank"
            )
        shape = graph.values[node.outputs[0]].shape
        local = parts[node_name][0].sizes
        if node_name in held and held[node_name].sharded:
            local = held[node_name].own_shape
        yield _named(names.pop(id(tensor)), shape, tensor, parts[node_name], local)
    for unused in names.values():  # what the forward pass does not use is whole everywhere
        tensor = named[unused[0]]
        shape = tuple(tensor.shape)
        yield _named(unused, shape, tensor, [whole_part(shape)] * math.prod(plan.mesh), shape)


def _named(
    names: Sequence[str], shape: Shape, tensor: Any, parts: Sequence[Part], local: Shape
) -> DividedTensor:
    first, *others = (f"model.{name}" for name in names)
    return DividedTensor(first, shape, tensor, parts, local, tuple(others))
