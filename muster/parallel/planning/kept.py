"""Computes what each operator keeps for the backward pass, as sums that a search can minimise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.parallel.planning.graph import FAN_OUT, Graph, Node, Ref, names
from muster.parallel.planning.layouts import Mesh, Placements, parts
from muster.parallel.planning.precision import RUNS_EXACT, RUNS_LOW, feeds_a_loss
from muster.parallel.planning.recomputed import Layer, layers_of
from muster.parallel.planning.rules import LINEAR_VIEWS

SAVES_INPUTS = names(
    "linear matmul mm bmm addmm einsum conv1d conv2d conv3d batch_norm layer_norm group_norm gelu silu "
    "elu mish softplus hardtanh hardswish hardsigmoid leaky_relu pow log log1p abs sin cos square clamp "
    "clamp_min clamp_max mul div maximum minimum mse_loss l1_loss smooth_l1_loss huber_loss avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d "
    "max_pool3d scaled_dot_product_attention rms_norm var std prelu embedding binary_cross_entropy "
    "binary_cross_entropy_with_logits logsigmoid where masked_fill"
)
SAVES_OUTPUTS = names(
    "relu tanh sigmoid softmax log_softmax _softmax _log_softmax exp sqrt rsqrt reciprocal "
    "scaled_dot_product_attention amax amin logsumexp expm1"
)
SAVES_NOTHING = LINEAR_VIEWS | names(
    "add sub neg rsub cat stack mean sum to _to_copy detach zeros_like ones_like full_like type_as pad "
    "constant_pad_nd cumsum flip roll dropout cross_entropy_loss nll_loss nll_loss_nd eq ne lt gt le ge "
    "floor ceil round sign arange zeros ones full"
)
_COPIES = names("contiguous clone")
_CASTS_WEIGHT = names("linear matmul mm addmm")
_BY_FACTORS = names("linear matmul mm bmm addmm einsum mul")
_UNREAD = (
    dict.fromkeys(names("embedding embedding_bag _embedding_bag"), 0)
    | {"batch_norm": 2, "group_norm": 3, "convolution": 2}
    | dict.fromkeys((f"conv{turned}{n}d" for turned in ("", "_transpose") for n in (1, 2, 3)), 2)
)
"""By operator, the argument whose values its backward pass does not read."""
_RECURRENT = names(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)  # their backward passes do not read biases
TURNS = names("transpose permute t numpy_T movedim swapaxes expand")


def is_view(graph: Graph, node: Node, turned: set[int]) -> bool:
    """Whether a node's result shares the memory of its first input.

    Args:
        graph: the node's graph.
        node: the node.
        turned: the values whose elements are in another order than in memory.
    """
    if node.kind == FAN_OUT or node.op == "detach" or feeds_a_loss(graph, node):
        return True
    if node.op in ("reshape", "flatten") and node.inputs[0] in turned:
        return False  # a copy, in the order of the new shape
    return node.op in LINEAR_VIEWS and node.op not in _COPIES


def turns(node: Node, turned: set[int]) -> bool:
    """Whether the elements of a view's result are in another order than in memory."""
    return node.op in TURNS or (node.kind == FAN_OUT and node.inputs[0] in turned)


def cast_width(graph: Graph, node: Node, position: int) -> int:
    """Returns the element size in bytes of an input's copy in the node's precision; 0 if it is not cast."""
    value = graph.values[node.inputs[position]]
    width = graph.values[node.outputs[0]].itemsize
    cast = (
        node.op in RUNS_LOW | RUNS_EXACT
        and node.op != "cross_entropy_loss"
        and value.floating
        and value.itemsize != width
        and len(value.shape) > 1
    )
    return width if cast else 0


def kept_inputs(graph: Graph, node: Node) -> list[int]:
    """Returns the positions of the inputs whose values an operator's backward pass reads."""
    if node.kind != "call" or not any(graph.values[v].needs_grad for v in node.outputs):
        return []
    if node.op in SAVES_INPUTS | SAVES_OUTPUTS | SAVES_NOTHING and node.op not in SAVES_INPUTS:
        return []
    every = list(range(len(node.inputs)))
    if node.op in _UNREAD:
        unread = next((a.position for a in node.args[_UNREAD[node.op] :][:1] if isinstance(a, Ref)), None)
        return [position for position in every if position != unread]
    if node.op == "instance_norm":  # it keeps a repeated copy of its weight
        return every[:1]
    if node.op in _RECURRENT:
        of_matrices = [position for position, v in enumerate(node.inputs) if len(graph.values[v].shape) > 1]
        if graph.edge_needs_grad(node, 0):
            return of_matrices
        return [p for p in of_matrices if "weight_ih_l0" not in graph.source(node.inputs[p]).name]
    if node.op in _BY_FACTORS:  # each factor is read for the other's gradient; a summand is not read
        first = 1 if node.op == "addmm" else 0
        pair = every[first : first + 2]
        return [p for p in pair if any(graph.edge_needs_grad(node, other) for other in pair if other != p)]
    return every


def casts_weight(graph: Graph, node: Node, position: int) -> bool:
    """Whether an operator casts a weight by itself, and need not keep the copy of a gathered one."""
    value = graph.values[node.inputs[position]]
    return (
        node.op in _CASTS_WEIGHT
        and position == (2 if node.op == "addmm" else 1)
        and len(value.shape) == 2
        and graph.source(node.inputs[position]).kind == "parameter"
        and cast_width(graph, node, position) == 2
    )


def casts_again(graph: Graph, layers: Sequence[Layer] = ()) -> dict[str, float]:
    """By parameter, the bytes of its cast that its readers count as kept, for each byte of the parameter.

    Readers in layers that are computed again count none.
    """
    found: dict[str, float] = {}
    inside = {index for layer in layers for index in layer.indices}
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.inputs if node.kind == "call" and index not in inside else ()):
            if casts_weight(graph, node, position):
                width = cast_width(graph, node, position)
                found[graph.source(value).name] = width / graph.values[value].itemsize
    return found


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A tensor that a node keeps for the backward pass.

    Attributes:
        of_output: whether it has the layout of an output, rather than of an input.
        position: the position of that output or input.
        nbytes: the size of the whole tensor in bytes.
    """

    of_output: bool
    position: int
    nbytes: float


def kept_parts(graph: Graph, layers: Sequence[Layer] = ()) -> list[tuple[KeptPart, ...]]:
    """Returns, for each node, what it keeps at least that no earlier node keeps.

    A tensor that several nodes keep is counted once, at the first of them, in the layout in which that one
    reads it. Copies that later nodes keep in other layouts are not counted, so the sum is a lower bound of
    what a step holds at the end of its forward pass. A recomputed layer keeps its inputs, which are counted
    at the nodes that make them.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        layers: the layers that are recomputed.
    """
    return _Savings(graph, layers).parts()


def worth_recomputing(graph: Graph) -> list[Layer]:
    """Returns the layers that keep more bytes than their inputs have."""
    kept = kept_parts(graph)
    found = []
    for layer in layers_of(graph):
        nbytes = sum(part.nbytes for index in layer.indices for part in kept[index])
        given = [graph.values[value] for value in layer.given if graph.source(value).kind == "call"]
        if nbytes > sum(value.nbytes for value in given):
            found.append(layer)
    return found


class _Savings:
    def __init__(self, graph: Graph, layers: Sequence[Layer]) -> None:
        self.graph = graph
        self._inside = {index for layer in layers for index in layer.indices}
        self._given = {value for layer in layers for value in layer.given}
        self._root: dict[int, int] = {}  # by value, the value whose memory it shares
        self._turned: set[int] = set()
        self._counted: set[object] = set()

    def parts(self) -> list[tuple[KeptPart, ...]]:
        found = []
        for index, node in enumerate(self.graph.nodes):
            if node.kind in ("call", FAN_OUT):
                view = is_view(self.graph, node, self._turned)
                for value in node.outputs if view else ():
                    self._root[value] = self._root.get(node.inputs[0], node.inputs[0])
                    if turns(node, self._turned):
                        self._turned.add(value)
            grad = node.kind == "call" and any(self.graph.values[v].needs_grad for v in node.outputs)
            parts = self._of(node) if grad and index not in self._inside else []
            for place, value in enumerate(node.outputs):
                if value in self._given and self._first(value):
                    parts.append(KeptPart(True, place, self._nbytes(value)))
            found.append(tuple(parts))
        return found

    def _of(self, node: Node) -> list[KeptPart]:
        known = node.op in SAVES_INPUTS | SAVES_OUTPUTS | SAVES_NOTHING
        found: list[KeptPart] = []
        if node.op in SAVES_INPUTS or not known or node.op == "cross_entropy_loss":
            single = node.op in ("mul", "div") and len(node.inputs) == 1
            inputs = 1 if node.op == "cross_entropy_loss" else len(node.inputs)
            for position in range(inputs):
                found += [] if single else self._input(node, position)
        if node.op in SAVES_OUTPUTS or not known:
            for position, value in enumerate(node.outputs):
                nbytes = self.graph.values[value].nbytes
                found += [KeptPart(True, position, nbytes)] if self._first(value) else []
        extra = self._extra(node)
        return [*found, KeptPart(True, 0, extra)] if extra else found

    def _input(self, node: Node, position: int) -> list[KeptPart]:
        value = node.inputs[position]
        whole = self.graph.values[value]
        maker = self.graph.source(value)
        width = cast_width(self.graph, node, position)
        if width:
            name = (maker.name, position) if maker.kind == "parameter" else (node.name, position)
            if name in self._counted:
                return []
            self._counted.add(name)
            return [KeptPart(False, position, whole.numel * width)]
        if not self._first(value):
            return []
        return [KeptPart(False, position, self._nbytes(value))]

    def _nbytes(self, value: int) -> int:
        """Returns the bytes of a value's memory, which an expanded view may exceed."""
        root = self._root.get(value, value)
        return min(self.graph.values[value].nbytes, self.graph.values[root].nbytes)

    def _first(self, value: int) -> bool:
        """Whether a value's memory was not counted before; counts it. False for parameters and inputs."""
        root = self._root.get(value, value)
        held = self.graph.nodes[self.graph.values[root].node].kind in ("parameter", "buffer", "input")
        if held or root in self._counted:
            return False
        self._counted.add(root)
        return True

    def _extra(self, node: Node) -> float:
        """Returns the bytes of what an operator makes only for its backward pass."""
        out = self.graph.values[node.outputs[0]]
        if node.op == "dropout" and node.draws:
            return out.nbytes  # the mask
        if node.op == "layer_norm":
            width: int = math.prod(node.args[1])
            return out.numel / width * 8
        if node.op == "scaled_dot_product_attention":
            return out.numel / out.shape[-1] * 4
        return out.numel * 8 if node.op.startswith("max_pool") else 0


def kept_bytes(
    kept: Sequence[KeptPart], ins: Sequence[Placements], outs: Sequence[Placements], mesh: Mesh
) -> float:
    """Returns the bytes of what a node keeps on one rank."""
    found = 0.0
    for each in kept:
        layouts = outs if each.of_output else ins
        found += each.nbytes / parts(layouts[each.position], mesh)
    return found
