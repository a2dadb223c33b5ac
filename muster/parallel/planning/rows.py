"""Summarises a plan by modules: how each is split, what it communicates, its time and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.parallel.planning.buckets import (
    move_collectives,
    node_collectives,
    parameter_shards,
    split_text,
)
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.layouts import Mesh, local_shape
from muster.parallel.planning.problem import State, whole_mode
from muster.parallel.planning.words import size_text


@dataclass(frozen=True, slots=True)
class Row:
    """One module of a plan: times in ms, memory in GB, of one rank; ``measured_ms`` is the forward pass."""

    module: str
    strategies: str
    local: str
    collectives: str
    predicted_ms: float
    gigabytes: float
    measured_ms: float | None


def module_rows(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    machine: Hardware,
    *,
    local_norm: bool,
    measured_ms: Mapping[str, float],
) -> list[Row]:
    """Returns one row per module that computes, in the order of the forward pass.

    Args:
        graph: the graph of the forward pass.
        states: the chosen state of each node.
        mesh: the mesh's sizes.
        machine: the machine's costs.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
        measured_ms: the measured forward times of modules, in ms; modules may be missing.
    """
    order: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.kind == "call":
            order.setdefault(node.module, []).append(index)
    own = _parameters_of(graph)
    return [
        _row(
            graph,
            states,
            mesh,
            machine,
            module,
            indices,
            own.get(module, []),
            local_norm=local_norm,
            measured_ms=measured_ms.get(module),
        )
        for module, indices in order.items()
    ]


def _parameters_of(graph: Graph) -> dict[str, list[int]]:
    """Returns the indices of parameters by the module that owns them."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.kind == "parameter":
            found.setdefault(node.module, []).append(index)
    return found


def _row(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    machine: Hardware,
    module: str,
    indices: list[int],
    own: list[int],
    *,
    local_norm: bool,
    measured_ms: float | None,
) -> Row:
    texts, shapes = [], []
    for index in indices:
        node, state = graph.nodes[index], states[index]
        if whole_mode(state) and len(indices) > 1 and not node.inputs:
            continue
        texts.append(f"{node.op} {split_text(graph, node, state, mesh)}")
        local = [
            "x".join(map(str, local_shape(a, mesh, graph.values[v].shape))) or "1"
            for a, v in zip(state.ins, node.inputs, strict=True)
        ]
        shapes.append(" ".join(local))
    fan_outs = [
        i
        for i, node in enumerate(graph.nodes)
        if node.kind == FAN_OUT and node.module == module and i not in indices
    ]
    moved: dict[tuple[str, tuple[int, ...]], int] = {}
    seconds = sum(states[i].seconds for i in (*indices, *own))
    for index in (*indices, *fan_outs):
        for each in node_collectives(graph, states, mesh, index, local_norm=local_norm):
            moved[each.kind, each.dims] = moved.get((each.kind, each.dims), 0) + each.nbytes
        for each in move_collectives(graph, states, mesh, index):
            seconds += machine.along_s(each.kind, each.dims, mesh, each.nbytes)
    held = parameter_shards(graph, states, mesh)
    for index in own:
        each_held = held.get(graph.nodes[index].name)
        if each_held is not None and each_held.dims:
            key = ("gradients", each_held.dims)
            moved[key] = moved.get(key, 0) + each_held.numel * each_held.itemsize
    text = ", ".join(
        f"{kind} over {_ranks(dims, mesh)}: {size_text(nbytes)}" for (kind, dims), nbytes in moved.items()
    )
    memory = sum(states[i].nbytes for i in (*indices, *own)) / 1e9
    return Row(
        module or "(top)",
        "; ".join(texts),
        "; ".join(shapes),
        text or "-",
        1e3 * seconds,
        memory,
        measured_ms,
    )


def _ranks(dims: tuple[int, ...], mesh: Mesh) -> str:
    return "x".join(str(mesh[d]) for d in dims) + " ranks"
