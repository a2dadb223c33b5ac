"""The tensors of a sharded model and its optimizer: their whole shapes, and which rank holds which part."""

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
        name: the name, such as "model.fc.weight" or "optimizer.state.fc.weight.exp_avg".
        shape: the shape of the whole tensor.
        own: this rank's part, contiguous; it may have more elements than the part, as padding.
        parts: the part that each rank holds, by rank.
        local: the shape in which a rank holds its part; flat and padded if the update is sharded.
        aliases: other names of the same tensor, if the module ties parameters.
    """

    name: str
    shape: Shape
    own: Any
    parts: Sequence[Part]
    local: Shape
    aliases: tuple[str, ...] = ()

    def view(self, box: Box) -> Any:
        """Returns a view of the elements of one box of this rank's part."""
        if self.own.shape == box.sizes:  # the whole part, in any memory format
            return self.own.detach()
        flat = self.own.detach().view(-1)
        return flat[box.start : box.start + box.numel].view(box.sizes)


def parameter_names(model: ParallelModule, optimizer: Any) -> dict[int, str]:
    """Returns the names of the optimizer's parameters, by their ``id``.

    Raises:
        SettingsError: a parameter does not belong to the model.
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
    """Returns the model's parameters and buffers and the optimizer's state, in the same order on all ranks.

    Args:
        model: the sharded model.
        optimizer: the optimizer of ``model.parameters()``; None: only the model's tensors are returned.
        plan: the plan by which ranks hold parts; None: the model's own plan.

    Raises:
        SettingsError: a parameter is layerwise, a parameter of the optimizer does not belong to the model,
            or the optimizer keeps a tensor of another shape for a sharded parameter.
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
                else:  # the same on all ranks, such as the number of steps
                    shape = tuple(value.shape)
                    if value.numel() > 1 and any(part != like.parts[0] for part in like.parts):
                        raise SettingsError(
                            f"the optimizer keeps {key} of shape {list(shape)} for {like.name}, which is"
                            " sharded: use one that updates each element by itself (SGD, Adam, AdamW)"
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
    for unused in names.values():  # tensors that the forward pass does not use are whole on all ranks
        tensor = named[unused[0]]
        shape = tuple(tensor.shape)
        yield _named(unused, shape, tensor, [whole_part(shape)] * math.prod(plan.mesh), shape)


def _named(
    names: Sequence[str], shape: Shape, tensor: Any, parts: Sequence[Part], local: Shape
) -> DividedTensor:
    first, *others = (f"model.{name}" for name in names)
    return DividedTensor(first, shape, tensor, parts, local, tuple(others))
