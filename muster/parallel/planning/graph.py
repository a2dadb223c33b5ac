"""The forward graph of a training step: the data on which rules, search and plan work."""

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
    """Returns the words of a text."""
    return frozenset(text.split())


_ONLY_LIKE_SECOND = names("type_as view_as expand_as reshape_as")
"""Operators that read only the dtype or shape of their second input, which therefore gets no gradient."""

_CONSTANT = names(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like "
    "new_zeros new_ones new_full new_empty"
)


@dataclass(frozen=True, slots=True)
class Ref:
    """The place of a tensor among a node's arguments: the node's input number ``position``."""

    position: int


@dataclass(slots=True)
class TensorValue:
    """A tensor of the graph.

    Attributes:
        name: the name of the node that makes it, with a number if that node makes several.
        shape: the shape of the whole tensor.
        dtype: the dtype, such as "float32".
        itemsize: the size of an element in bytes.
        floating: whether it can have a gradient.
        needs_grad: whether it gets a gradient in the backward pass.
        node: the index of the node that makes it.
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
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.numel * self.itemsize


@dataclass(slots=True)
class Node:
    """One operator, or a parameter, buffer, input, fan-out node or output.

    A fan-out node follows a value that is used several times: it redistributes the value once for all
    consumers that need the same layout, and sums their gradients before these are communicated.

    Attributes:
        name: the node's name, unique in the graph.
        kind: "call", "parameter", "buffer", "input", ``FAN_OUT`` or "output".
        op: for a call, the operator's name without overload, such as "linear"; otherwise the kind.
        inputs: the indices of the values that it reads.
        outputs: the indices of the values that it makes.
        args: the positional arguments of a call, with :class:`Ref` for tensors.
        kwargs: the keyword arguments of a call, with :class:`Ref` for tensors.
        module: the path of the module that calls it, "" for the outermost.
        line: its place in the source, as ``file.py:12``.
        trained: whether a parameter or an input requires a gradient.
        layerwise: whether a parameter is left out of broadcasts and reductions.
        mutated: whether the forward pass writes the buffer, or for a fan-out node the buffer before it.
        of_parameters: whether it depends on parameters and buffers only.
        random: whether the operator draws random numbers.
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
    """Nodes in the order in which they run, and the values that pass between them."""

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
        """Returns the indices of nodes by their names."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    def with_fan_outs(self) -> Graph:
        """Returns the same graph with a fan-out node behind each value of several uses, gradients marked."""
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
        """Clears ``needs_grad`` of values without a differentiable path to an output."""
        flows: set[int] = set()
        for node in reversed(self.nodes):
            if node.kind == "output" or any(value in flows for value in node.outputs):
                flows |= {value for value in _differentiated(node) if self.values[value].needs_grad}
        for index, value in enumerate(self.values):
            value.needs_grad = index in flows

    def source(self, value: int) -> Node:
        """Returns the node that makes a value, looking through fan-out nodes."""
        maker = self.nodes[self.values[value].node]
        while maker.kind == FAN_OUT:
            maker = self.nodes[self.values[maker.inputs[0]].node]
        return maker

    def edge_needs_grad(self, node: Node, position: int) -> bool:
        """Whether the backward pass sends a gradient from a node to the maker of its input."""
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
        """Returns one line per node, by which a saved plan recognizes its model."""
        lines = []
        for node in self.nodes:
            shapes = " ".join(f"{self.values[v].dtype}{list(self.values[v].shape)}" for v in node.outputs)
            sources = " ".join(self.values[v].name for v in node.inputs)
            traits = " trained" if node.trained else " frozen" if node.kind == "parameter" else ""
            lines.append(f"{node.name}: {node.op}({sources}) -> {shapes}{traits}")
        return lines

    def fingerprint(self) -> str:
        """Returns a digest of :meth:`signature` and of all arguments but tensors, regardless of devices.

        Each rank has its own GPU, and a plan may have been made on a machine without one.
        """
        text = "\n".join([*self.signature(), *(f"{node.args}{node.kwargs}" for node in self.nodes)])
        text = _DEVICE.sub("device", text)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _copy(value: TensorValue) -> TensorValue:
    return TensorValue(value.name, value.shape, value.dtype, value.itemsize, value.floating)


def _differentiated(node: Node) -> tuple[int, ...]:
    """Returns the inputs with respect to which a node is differentiated."""
    return node.inputs[:1] if node.op in _ONLY_LIKE_SECOND else node.inputs
