"""Layers whose activations are recomputed in the backward pass instead of kept for it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.parallel.planning.graph import FAN_OUT, Graph, Node, names
from muster.parallel.planning.rules import LINEAR_VIEWS

RECOMPUTED = "|recomputed"
"""The suffix of the state's key of an operator in such a layer."""

_SAVES_NOTHING = names("add sub") | LINEAR_VIEWS
_NORMS = names("batch_norm instance_norm")


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive operators of one module, up to the last one that keeps something for its backward pass.

    Attributes:
        name: the module's name, with a number if the module runs several times.
        first: the index of the first operator's node.
        last: the index of the last operator's node.
        given: the values that it reads and does not make, parameters and buffers included.
        left: the values that it makes and that other nodes read.
    """

    name: str
    first: int
    last: int
    given: tuple[int, ...]
    left: tuple[int, ...]

    @property
    def indices(self) -> range:
        """The indices of the layer's nodes."""
        return range(self.first, self.last + 1)


def layers_of(graph: Graph) -> list[Layer]:
    """Returns the layers of a model that may be recomputed, in the order of the forward pass.

    A layer is an element of a list of modules, such as ``blocks.3``, or a direct child of the model that is
    in no list. A module that reads what the forward pass changes is left out: its second run would read other
    values.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
    """
    last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
    found: list[Layer] = []
    runs: dict[str, int] = {}
    for module, group in itertools.groupby(enumerate(graph.nodes), lambda each: _layer(graph, each[1])):
        indices = [index for index, _ in group]
        while indices and _keeps_nothing(graph.nodes[indices[-1]]):
            indices.pop()
        nodes = [graph.nodes[index] for index in indices]
        if not module or not nodes or any(_rereads(graph, node) for node in nodes):
            continue
        made = {value for node in nodes for value in node.outputs}
        given = dict.fromkeys(value for node in nodes for value in node.inputs if value not in made)
        left = [v for node in nodes for v in node.outputs if last_use.get(v, -1) > indices[-1]]
        if not any(graph.values[value].needs_grad for value in left):
            continue
        runs[module] = runs.get(module, 0) + 1
        name = module if runs[module] == 1 else f"{module} ({runs[module]})"
        found.append(Layer(name, indices[0], indices[-1], tuple(given), tuple(left)))
    return found


def _layer(graph: Graph, node: Node) -> str:
    """Returns the name of an operator's layer; empty if it is in none."""
    if node.kind not in ("call", FAN_OUT) or not node.module:
        return ""
    if node.kind == FAN_OUT and graph.nodes[graph.values[node.inputs[0]].node].kind in (
        "parameter",
        "buffer",
    ):
        return ""  # it comes before all layers
    path = node.module.split(".")
    number = next((place for place, part in enumerate(path) if part.isdigit()), 0)
    return ".".join(path[: number + 1])


def _keeps_nothing(node: Node) -> bool:
    return node.kind == FAN_OUT or node.op in _SAVES_NOTHING


def _rereads(graph: Graph, node: Node) -> bool:
    """Whether an operator's result depends on a buffer that the forward pass changes."""
    counts = node.op.endswith("_") and not node.op.startswith("_")
    if node.kind == FAN_OUT or node.op in _NORMS or counts:
        return False
    return any(graph.nodes[graph.values[value].node].mutated for value in node.inputs)


def chosen_layers(graph: Graph, recomputed: Sequence[bool]) -> list[Layer]:
    """Returns the layers that a plan recomputes.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        recomputed: for each node, whether its state is a recomputed one.
    """
    return [layer for layer in layers_of(graph) if recomputed[layer.first]] if any(recomputed) else []


def recomputed_in(graph: Graph, keys: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the layers that a saved plan recomputes, from its states' keys by node."""
    return tuple(
        layer.name
        for layer in layers_of(graph)
        if keys.get(graph.nodes[layer.first].name, "").endswith(RECOMPUTED)
    )


def backward_order(graph: Graph, layers: Sequence[Layer]) -> Iterator[tuple[int, bool]]:
    """Yields nodes in the order of the backward pass, each with whether its forward pass runs again there.

    A layer is recomputed when the backward pass reaches its last operator.
    """
    ends = {layer.last: layer for layer in layers}
    for index in reversed(range(len(graph.nodes))):
        if index in ends:
            yield from ((each, True) for each in ends[index].indices)
        yield index, False


def layers_text(layers: Sequence[Layer]) -> str:
    """Returns the names of layers; of more than three, the first and the last."""
    if len(layers) <= 3:
        return ", ".join(layer.name for layer in layers)
    return f"{layers[0].name} to {layers[-1].name}"
