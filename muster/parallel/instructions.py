"""The instructions of a plan: its operators in order, their redistributions, and the recomputed layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.parallel.mesh_communicator import MeshCommunicator
from muster.parallel.operators import ForwardPass, Local, local_function
from muster.parallel.planning.buckets import ParameterShard, edge_layouts
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.layouts import plan_move
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.problem import State
from muster.parallel.planning.recomputed import Layer, chosen_layers


@dataclass(slots=True)
class Instruction:
    """One operator's call in the forward pass.

    Attributes:
        index: the index of the operator's node in the graph.
        name: the name of the node.
        module: the name of the module that makes the call.
        sources: the numbers of the values that it reads.
        moves: for each source, its redistribution before the call and that of its gradient; None: neither.
        function: computes this rank's outputs from its parts of the inputs.
        outputs: the numbers of the values that it makes.
        done: the values that no later instruction reads.
        gathered: the parameters that are gathered for it, as it is the first to read them; each by its node
            and its value.
        of_parameters: whether its result may be a view of a parameter.
    """

    index: int
    name: str
    module: str
    sources: tuple[int, ...]
    moves: tuple[tuple[Any, Any] | None, ...]
    function: Local
    outputs: tuple[int, ...]
    done: tuple[int, ...] = ()
    gathered: tuple[tuple[str, int], ...] = ()
    of_parameters: bool = False


@dataclass(slots=True)
class LayerAgain:
    """Instructions whose activations are recomputed in the backward pass.

    Attributes:
        name: the name of the layer.
        instructions: the layer's instructions, in order.
        given: the input values that are kept for the recomputation.
        held: the buffers that it reads; they exist in any case.
        changed: the buffers that it changes.
        left: the values that later instructions read.
        done: the inputs that no later instruction reads.
        shared: the gathered parameters that other layers read, too.
        gathered: the gathered parameters that only this layer reads, in order.
    """

    name: str
    instructions: list[Instruction]
    given: tuple[int, ...]
    held: tuple[int, ...]
    changed: tuple[int, ...]
    left: tuple[int, ...]
    done: tuple[int, ...]
    shared: tuple[str, ...]
    gathered: tuple[str, ...]


def make_instructions(
    graph: Graph,
    plan: Plan,
    states: Sequence[State],
    shards: Mapping[str, ParameterShard],
    functions: Mapping[str, Callable[..., Any]],
    mesh_communicator: MeshCommunicator,
    run: ForwardPass,
) -> list[Instruction | LayerAgain]:
    """Returns the instructions in order; those of a recomputed layer are one :class:`LayerAgain`.

    Args:
        graph: the graph of the recorded forward pass.
        plan: a plan for this graph.
        states: the chosen state of each node.
        shards: how each parameter that this rank holds is sharded, by node.
        functions: the recorded operators, by node.
        mesh_communicator: carries out the redistributions.
        run: the state of a forward pass.
    """
    regathered = {name for name, shard in shards.items() if shard.regathered}
    made = _instructions(graph, plan, states, regathered, functions, mesh_communicator, run)
    every = {each.index: each for each in made}
    layers = {layer.first: layer for layer in chosen_layers(graph, [state.recomputed for state in states])}
    found: list[Instruction | LayerAgain] = []
    inside: set[int] = set()
    for index, instruction in every.items():
        if index in layers:
            layer = layers[index]
            inside |= set(layer.indices)
            found.append(_layer(graph, layer, [every[each] for each in layer.indices], regathered))
        elif index not in inside:
            found.append(instruction)
    return found


def first_gathered(each: Instruction | LayerAgain) -> Iterator[str]:
    """Yields the parameters that are gathered for an instruction or a layer, in order."""
    for one in each.instructions if isinstance(each, LayerAgain) else [each]:
        yield from (name for name, _ in one.gathered)


def _layer(graph: Graph, layer: Layer, instructions: list[Instruction], regathered: set[str]) -> LayerAgain:
    gathered = {value: name for each in instructions for name, value in each.gathered}
    sources = {value: graph.source(value) for value in layer.given if value not in gathered}
    held = tuple(value for value, source in sources.items() if source.kind == "buffer")
    shared = [source.name for source in sources.values() if source.name in regathered]
    return LayerAgain(
        layer.name,
        instructions,
        tuple(value for value in sources if value not in held),
        held,
        tuple(value for value in held if sources[value].mutated),
        layer.left,
        tuple(v for each in instructions for v in each.done if v in sources),
        tuple(dict.fromkeys(shared)),
        tuple(gathered.values()),
    )


def _instructions(
    graph: Graph,
    plan: Plan,
    states: Sequence[State],
    regathered: set[str],
    functions: Mapping[str, Callable[..., Any]],
    mesh_communicator: MeshCommunicator,
    run: ForwardPass,
) -> Iterator[Instruction]:
    mesh = plan.mesh
    last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
    to_gather = {node.outputs[0]: node.name for node in graph.nodes if node.name in regathered}
    for index, (node, state) in enumerate(zip(graph.nodes, states, strict=True)):
        if node.kind not in ("call", FAN_OUT, "output"):
            continue
        moves: list[tuple[Any, Any] | None] = []
        for position, value_index in enumerate(node.inputs):
            value = graph.values[value_index]
            before, after, grad, grad_after = edge_layouts(graph, states, index, position)
            there = plan_move(before, after, mesh, value.shape) or ()
            flows = graph.edge_needs_grad(node, position)
            back = (plan_move(grad, grad_after, mesh, value.shape) or ()) if flows else ()
            moves.append((there, back) if there or back else None)
        function: Local = list
        if node.kind != "output":
            function = local_function(
                graph,
                node,
                state,
                functions.get(node.name),
                mesh_communicator,
                run,
                local_norm=plan.options.local_norm,
            )
        yield Instruction(
            index,
            node.name,
            node.module,
            node.inputs,
            tuple(moves),
            function,
            node.outputs,
            done=tuple({v for v in node.inputs if last_use[v] == index}),
            gathered=tuple((to_gather.pop(v), v) for v in node.inputs if v in to_gather),
            of_parameters=node.of_parameters or node.kind == FAN_OUT,
        )
