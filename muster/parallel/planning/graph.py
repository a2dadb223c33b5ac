"""The forward graph of a training step, as values: what rules, search and plan work on."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from muster.parallel.planning.layouts import Shape

FAN_OUT = "hub"  # the word of saved plans
_DEVICE = re.compile(r"'(cpu|meta|cuda(:\d+)?)'")


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_ONLY_LIKE_SECOND = names("type_as view_as expand_as reshape_as")
"""Operators that take only dtype or shape of their second input, which so gets no gradient."""

_CONSTANT = names(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like "
    "new_zeros new_ones new_full new_empty"
)


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in arguments for the tensor that is a node's input number ``position``."""

    position: int


@dataclass(slots=True)
class TensorValue:
    """A tensor of the graph.

    Attributes:
        name: of the node that makes it, with a number if that makes several.
        shape: of the whole tensor.
        dtype: such as "float32".
        itemsize: bytes of one element.
        floating: whether it can have a gradient.
        needs_grad: whether it depends on something that is trained.
        node: index of the node that makes it.
    """

    name: str
    shape: Shape
    dtype: str
    itemsize: int
    floating: bool
    needs_grad: bool = False
    node: int = -1

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


@dataclass(slots=True)
class Node:
    """One operator, or a parameter, buffer, input, fan-out node or output.

    A fan-out node stands behind a value that is used several times: it changes the layout once for all who
    want the same one, and adds their gradients before these travel.

    Attributes:
        name: unique in the graph.
        kind: "call", "parameter", "buffer", "input", ``FAN_OUT`` or "output".
        op: of a call, the operator's name without overload, such as "linear"; otherwise the kind.
        inputs: indices of values.
        outputs: indices of values.
        args: of a call, with :class:`Ref` for tensors.
        kwargs: likewise.
        module: the path of the module that calls it, "" for the outermost.
        line: where in the source, as ``file.py:12``.
        trained: whether a parameter, or an input, requires a gradient.
        layerwise: whether a parameter is left out of broadcasts and reductions.
        mutated: whether a buffer, or that behind a fan-out node, is written in the forward pass.
        of_parameters: whether it depends on parameters and buffers only.
        random: whether it draws random numbers.
    """

    name: str
    kind: str
    op: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    line: str = ""
    trained: bool = False
    layerwise: bool = False
    mutated: bool = False
    of_parameters: bool = False
    random: bool = False

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers with these arguments, in training."""
        place = {"dropout": 1, "scaled_dot_product_attention": 4}.get(self.op)
        if place is None:
            return self.random
        p = self.args[place] if len(self.args) > place else self.kwargs.get("dropout_p", 0.0)
        return bool(p)


@dataclass(slots=True)
class Graph:
    """Nodes in the order in which they run; ``values`` are what passes between them."""

    nodes: list[Node] = field(default_factory=list)
    values: list[TensorValue] = field(default_factory=list)

    def add_value(self, value: TensorValue) -> int:
        """Adds a value; returns its index."""
        self.values.append(value)
        return len(self.values) - 1

    def add(self, node: Node) -> int:
        """Adds a node that makes the values of ``node.outputs``; returns its index."""
        self.nodes.append(node)
        for index in node.outputs:
            self.values[index].node = len(self.nodes) - 1
        return len(self.nodes) - 1

    def by_name(self) -> dict[str, int]:
        """Indices of nodes by their names."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    def with_fan_outs(self) -> Graph:
        """The same graph with a fan-out node behind what is used more than once, and gradients marked."""
        uses = Counter(value for node in self.nodes for value in node.inputs)
        graph = Graph()
        renamed: dict[int, int] = {}
        for node in self.nodes:
            outputs = []
            for index in node.outputs:
                renamed[index] = graph.add_value(_copy(self.values[index]))
                outputs.append(renamed[index])
            inputs = tuple(renamed[index] for index in node.inputs)
            made = Node(
                **{name: getattr(node, name) for name in Node.__dataclass_fields__}
                | {"inputs": inputs, "outputs": tuple(outputs)}
            )
            graph.add(made)
            graph._mark(made)
            for index in node.outputs:
                if uses[index] > 1:
                    source = renamed[index]
                    behind = _copy(graph.values[source])
                    behind.name += f".{FAN_OUT}"
                    renamed[index] = graph.add_value(behind)
                    fan_out = Node(behind.name, FAN_OUT, FAN_OUT, (source,), (renamed[index],), (Ref(0),))
                    fan_out.module, fan_out.mutated = node.module, node.mutated and node.kind == "buffer"
                    graph.add(fan_out)
                    graph._mark(fan_out)
        graph._leave_dead_ends()
        return graph

    def _leave_dead_ends(self) -> None:
        """Marks values without a differentiable way to an output: they get no gradient."""
        flows: set[int] = set()
        for node in reversed(self.nodes):
            if node.kind == "output" or any(value in flows for value in node.outputs):
                flows |= {value for value in _differentiated(node) if self.values[value].needs_grad}
        for index, value in enumerate(self.values):
            value.needs_grad = index in flows

    def source(self, value: int) -> Node:
        """The node that makes a value, behind the fan-out nodes that hand it on."""
        maker = self.nodes[self.values[value].node]
        while maker.kind == FAN_OUT:
            maker = self.nodes[self.values[maker.inputs[0]].node]
        return maker

    def edge_needs_grad(self, node: Node, position: int) -> bool:
        """Whether a gradient comes back from a node to the maker of its input."""
        leads_on = node.kind == "output" or any(self.values[v].needs_grad for v in node.outputs)
        return (
            leads_on
            and position < len(_differentiated(node))
            and self.values[node.inputs[position]].needs_grad
        )

    def _mark(self, node: Node) -> None:
        sources = [self.values[index] for index in node.inputs]
        grad = any(value.needs_grad for value in sources) or (
            node.kind in ("parameter", "input") and node.trained
        )
        for index in node.outputs:
            self.values[index].needs_grad = grad and self.values[index].floating and node.op not in _CONSTANT
        if node.kind in ("call", FAN_OUT):
            node.of_parameters = bool(sources) and all(
                self.nodes[value.node].kind in ("parameter", "buffer") or self.nodes[value.node].of_parameters
                for value in sources
            )

    def signature(self) -> list[str]:
        """One line per node, from which a plan knows its model again."""
        lines = []
        for node in self.nodes:
            shapes = " ".join(f"{self.values[v].dtype}{list(self.values[v].shape)}" for v in node.outputs)
            sources = " ".join(self.values[v].name for v in node.inputs)
            traits = " trained" if node.trained else " frozen" if node.kind == "parameter" else ""
            lines.append(f"{node.name}: {node.op}({sources}) -> {shapes}{traits}")
        return lines

    def fingerprint(self) -> str:
        """A digest of :meth:`signature` and of the arguments that are no tensors; devices do not count.

        Each rank has a GPU of its own, and a plan may have been made without any.
        """
        text = "\n".join([*self.signature(), *(f"{node.args}{node.kwargs}" for node in self.nodes)])
        text = _DEVICE.sub("device", text)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _copy(value: TensorValue) -> TensorValue:
    return TensorValue(value.name, value.shape, value.dtype, value.itemsize, value.floating)


def _differentiated(node: Node) -> tuple[int, ...]:
    """The inputs by whose contents a node is differentiated."""
    return node.inputs[:1] if node.op in _ONLY_LIKE_SECOND else node.inputs
