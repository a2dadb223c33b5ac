"""Packs gradients into buckets, and lists every collective of a plan. Pure, and the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from muster.parallel.planning.costs import BUCKET_BYTES, PlannedCollective, inner_collectives
from muster.parallel.planning.graph import FAN_OUT, Graph, Node
from muster.parallel.planning.kept import is_view, kept_inputs, turns
from muster.parallel.planning.layouts import (
    COLLECTIVES,
    PARTIAL,
    Mesh,
    Placements,
    local_shape,
    plan_move,
    slices,
)
from muster.parallel.planning.problem import State
from muster.parallel.planning.recomputed import backward_order, chosen_layers
from muster.training.buckets import ParameterSpec, plan_buckets


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """How one rank holds a parameter.

    Attributes:
        node: the name of the parameter's node.
        shape: the shape of the local part.
        dtype: the dtype, such as "float32".
        itemsize: the size of an element in bytes.
        dims: the mesh dimensions along which its gradient is summed.
        ranks: the number of ranks along ``dims``.
        sharded: whether its update is sharded over these ranks (ZeRO-1).
        regathered: whether it is gathered in both passes when it is used (ZeRO-3); implies ``sharded``.
    """

    node: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    dims: tuple[int, ...]
    ranks: int
    sharded: bool
    regathered: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of the local part."""
        return math.prod(self.shape)

    @property
    def own_numel(self) -> int:
        """The number of elements of this rank's shard of the update, padded to the same on all ranks."""
        return -(-self.numel // self.ranks) if self.sharded else self.numel

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the optimizer's parameter: for a sharded update, a row.

        The row keeps the number of dimensions, by which scripts group parameters so as not to decay biases.
        """
        return (1,) * (len(self.shape) - 1) + (self.own_numel,) if self.sharded else self.shape

    def own_bytes(self, optimizer_states: int) -> tuple[int, int]:
        """Returns the bytes of the optimizer's parameter, and those of its state."""
        own = self.own_numel * self.itemsize
        return own, own * optimizer_states


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Gradients that one collective sums.

    Attributes:
        dims: the mesh dimensions along which ranks take part.
        sharded: whether the updates are sharded (ZeRO-1).
        nodes: the names of the parameters' nodes.
        nbytes: the size of the parameters in bytes.
        sent_nbytes: the size of the communicator's larger buffer in bytes: the gradients, with a flag for
            each that says whether the rank has one.
        regathered: whether the parameters are gathered in both passes when they are used (ZeRO-3).
    """

    dims: tuple[int, ...]
    sharded: bool
    nodes: tuple[str, ...]
    nbytes: int
    sent_nbytes: int
    regathered: bool = False


def parameter_shards(graph: Graph, states: Sequence[State], mesh: Mesh) -> dict[str, ParameterShard]:
    """Returns, by node, how the trained parameters that the graph uses are held."""
    used = {value for node in graph.nodes for value in node.inputs}
    found = {}
    for node, state in zip(graph.nodes, states, strict=True):
        if node.kind != "parameter" or not node.trained or node.outputs[0] not in used:
            continue
        value = graph.values[node.outputs[0]]
        partial = (d for d, entry in enumerate(state.out_grads[0]) if entry == PARTIAL)
        dims = () if node.layerwise else tuple(partial)
        found[node.name] = ParameterShard(
            node.name,
            local_shape(state.outs[0], mesh, value.shape),
            value.dtype,
            value.itemsize,
            dims,
            math.prod(mesh[d] for d in dims),
            state.sharded,
            state.regathered,
        )
    return found


def gradient_buckets(held: Sequence[ParameterShard], bucket_bytes: int = BUCKET_BYTES) -> list[PlannedBucket]:
    """Packs gradients with the same ranks and dtype into buckets, in the order of the backward pass."""
    by_name = {each.node: each for each in held}
    specs = [
        ParameterSpec(
            each.node,
            each.own_numel * each.ranks if each.sharded else each.numel,
            f"{each.dtype} {each.dims} {each.sharded} {each.regathered}",
            each.itemsize,
        )
        for each in reversed(held)
        if each.dims
    ]
    buckets = []
    for bucket in plan_buckets(specs, bucket_bytes=bucket_bytes, first_bytes=bucket_bytes):
        first = by_name[bucket.slots[0].name]
        names = tuple(slot.name for slot in bucket.slots)
        counts = len(names) * (first.ranks if first.sharded else 1)
        nbytes, sent = bucket.size * first.itemsize, (bucket.size + counts) * first.itemsize
        buckets.append(PlannedBucket(first.dims, first.sharded, names, nbytes, sent, first.regathered))
    return buckets


def edge_layouts(
    graph: Graph, states: Sequence[State], node: int, position: int
) -> tuple[Placements, Placements, Placements, Placements]:
    """Returns the layouts along an edge: the value's before and after, its gradient's before and after."""
    value = graph.values[graph.nodes[node].inputs[position]]
    producer = graph.nodes[value.node]
    place = producer.outputs.index(graph.nodes[node].inputs[position])
    source, target = states[value.node], states[node]
    return (
        source.outs[place],
        target.ins[position],
        target.in_grads[position],
        source.out_grads[place],
    )


def read_again(graph: Graph, states: Sequence[State], mesh: Mesh, names: Iterable[str]) -> dict[str, int]:
    """Returns, by parameter, the place in :func:`backward_order` at which the backward pass first reads it.

    A parameter that was redistributed is read as a copy, which is kept, unless the result is a contiguous
    part of it. A recomputed layer reads its inputs when it begins, and its own parameters as it runs.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        states: the chosen state of each node.
        mesh: the mesh's sizes.
        names: the nodes of the parameters of interest.
    """
    wanted = set(names)
    if not wanted:
        return {}
    layers = chosen_layers(graph, [state.recomputed for state in states])
    begins = {index: layer for layer in layers for index in layer.indices}
    place_of = {step: place for place, step in enumerate(backward_order(graph, layers))}
    of: dict[int, str] = {}  # by value, the parameter whose memory it has
    turned, found = set[int](), dict[str, int]()

    def parameter(index: int, position: int) -> str | None:
        before, after, _, _ = edge_layouts(graph, states, index, position)
        value = graph.nodes[index].inputs[position]
        return of.get(value) if _in_place(before, after, mesh, graph.values[value].shape) else None

    def read(name: str | None, index: int, *, again: bool) -> None:
        if name is not None:
            place = place_of[index, again]
            found[name] = min(found.get(name, place), place)

    for index, node in enumerate(graph.nodes):
        layer = begins.get(index)
        for value in node.inputs if layer is not None else ():
            maker = graph.nodes[graph.values[value].node]
            if maker.name in wanted:
                read(maker.name, index, again=True)
            elif layer is not None and value in layer.given:
                read(of.get(value), layer.first, again=True)
        if node.name in wanted:
            of[node.outputs[0]] = node.name
        elif node.kind in ("call", FAN_OUT) and node.inputs and is_view(graph, node, turned):
            source = parameter(index, 0)
            if source is not None:
                of.update(dict.fromkeys(node.outputs, source))
            turned |= set(node.outputs) if turns(node, turned) else set()
        elif layer is None:
            for position in kept_inputs(graph, node):
                read(parameter(index, position), index, again=False)
    return found


def _in_place(before: Placements, after: Placements, mesh: Mesh, shape: tuple[int, ...]) -> bool:
    """Whether a redistribution leaves a view of its source: all of it, or contiguous rows."""
    local = list(local_shape(before, mesh, shape))
    for step in plan_move(before, after, mesh, shape) or ():
        ranks = math.prod(mesh[d] for d in step.dims)
        if ranks > 1 and (step.kind != "slice" or math.prod(local[: step.target]) > 1):
            return False
        local[step.target] //= ranks
    return True


def collectives(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    *,
    local_norm: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[PlannedCollective]:
    """Returns every collective of one training step, by node in the order of the forward pass."""
    found: list[PlannedCollective] = []
    for index in range(len(graph.nodes)):
        found += node_collectives(graph, states, mesh, index, local_norm=local_norm)
    held = parameter_shards(graph, states, mesh)
    again = read_again(graph, states, mesh, [name for name, each in held.items() if each.regathered])
    for number, bucket in enumerate(gradient_buckets(list(held.values()), bucket_bytes)):
        kind = "reduce_scatter" if bucket.sharded else "all_reduce"
        name = f"bucket {number}"
        found.append(PlannedCollective("gradients", name, kind, bucket.dims, bucket.sent_nbytes))
        gathers = bucket.sharded + any(each in again for each in bucket.nodes)
        gather = PlannedCollective("parameters", name, "all_gather", bucket.dims, bucket.nbytes)
        found += [gather] * gathers
    return found


def node_collectives(
    graph: Graph, states: Sequence[State], mesh: Mesh, index: int, *, local_norm: bool
) -> list[PlannedCollective]:
    """Returns a node's collectives: redistributions of inputs and their gradients, and its inner ones."""
    node, state = graph.nodes[index], states[index]
    found = _moves(graph, states, mesh, index)
    if node.kind == "call":
        found += inner_collectives(graph, node, state.modes, state.ins, mesh, local_norm=local_norm)
    return _with_second_run(found, state)


def move_collectives(
    graph: Graph, states: Sequence[State], mesh: Mesh, index: int
) -> list[PlannedCollective]:
    """Returns the collectives that redistribute a node's inputs and their gradients."""
    return _with_second_run(_moves(graph, states, mesh, index), states[index])


def _with_second_run(found: list[PlannedCollective], state: State) -> list[PlannedCollective]:
    """Repeats a node's forward collectives as "recomputed" ones, if the node is recomputed."""
    if not state.recomputed:
        return found
    return found + [replace(each, phase="recomputed") for each in found if each.phase == "forward"]


def _moves(graph: Graph, states: Sequence[State], mesh: Mesh, index: int) -> list[PlannedCollective]:
    node = graph.nodes[index]
    found: list[PlannedCollective] = []
    for position, value_index in enumerate(node.inputs):
        value = graph.values[value_index]
        before, after, grad, grad_after = edge_layouts(graph, states, index, position)
        moves = [("forward", before, after)]
        if graph.edge_needs_grad(node, position):
            moves.append(("backward", grad, grad_after))
        for phase, source, target in moves:
            for step in plan_move(source, target, mesh, value.shape) or ():
                if step.kind in COLLECTIVES:
                    nbytes = value.nbytes // step.divisor
                    found.append(PlannedCollective(phase, node.name, step.kind, step.dims, nbytes))
    return found


def split_text(graph: Graph, node: Node, state: State, mesh: Mesh) -> str:
    """Returns how a node's inputs are split, as MindSpore writes strategies: ((2, 4), (4, 1))."""
    layouts = state.ins or state.outs
    values = node.inputs if state.ins else node.outputs
    cuts = [slices(a, mesh, len(graph.values[v].shape)) for a, v in zip(layouts, values, strict=True)]
    return "(" + ", ".join("(" + ", ".join(map(str, cut)) + ")" for cut in cuts) + ")"
