"""How long operators take: the kernels of their two passes, by what these read, write and multiply. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from muster.worker.parallel.planning.costs import Machine, is_training_norm
from muster.worker.parallel.planning.graph import HUB, Graph, Node, Value, names
from muster.worker.parallel.planning.layouts import Layout, Mesh, parts
from muster.worker.parallel.planning.precision import RUNS_EXACT, feeds_a_loss
from muster.worker.parallel.planning.rules import LINEAR_VIEWS

_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_SPEED = 0.3
"""Of a product's: between its two products an attention kernel takes exponentials, which are slower."""
_PRODUCTS = names("linear matmul mm bmm addmm einsum conv1d conv2d conv3d")
_WRITES_WIDER = names("linear matmul mm addmm")  # gradients of weights, in their own precision at once
_RECURRENT = names("lstm gru rnn_tanh rnn_relu")
_NORMS = names("layer_norm group_norm rms_norm")
_COPIES = names("contiguous clone")
_INDEX_BYTES = 8


def flops(graph: Graph, node: Node) -> float:
    """Floating-point operations of the forward pass of a whole operator, of those that count."""
    shapes = [graph.values[v].shape for v in node.inputs]
    out = graph.values[node.outputs[0]].numel if node.outputs else 0
    if node.op in ("linear", "matmul", "mm", "bmm"):
        return 2.0 * out * shapes[0][-1]
    if node.op == "addmm":
        return 2.0 * out * shapes[1][-1]
    if node.op in ("conv1d", "conv2d", "conv3d"):
        return 2.0 * out * math.prod(shapes[1][1:])
    if node.op == _ATTENTION:
        causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
        return (2.0 if causal else 4.0) * out * shapes[1][-2]
    if node.op in _RECURRENT and shapes:
        steps = math.prod(shapes[0][:-1])
        return 2.0 * steps * sum(math.prod(shape) for shape in shapes[2:] if len(shape) == 2)
    if node.op == "einsum":
        sizes: dict[str, int] = {}
        for term, shape in zip(
            str(node.args[0]).replace(" ", "").split("->")[0].split(","), shapes, strict=False
        ):
            sizes.update(zip(term, shape, strict=False))
        return 2.0 * math.prod(sizes.values())
    return 0.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of the two passes of an operator on one rank."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        """One after the other."""
        return Seconds(self.forward + other.forward, self.backward + other.backward)


class Works:
    """The time of the operators of one graph on one machine, as a step runs them: kernel by kernel.

    Nothing is fused but the cross entropy: an operator reads its inputs and writes its results. Kernels are
    launched by a captured graph.
    """

    def __init__(self, graph: Graph, mesh: Mesh, machine: Machine) -> None:
        self.graph, self.mesh, self.machine = graph, mesh, machine
        self._uses = Counter(
            value
            for node in graph.nodes
            for position, value in enumerate(node.inputs)
            if graph.edge_needs_grad(node, position)
        )

    def traits(self, node: Node) -> tuple[object, ...]:
        """What of a node's place in the graph its time depends on, beside operator, arguments and shapes."""
        values = self.graph.values
        grads = [self.graph.edge_needs_grad(node, position) for position in range(len(node.inputs))]
        return (
            [values[v].itemsize for v in (*node.inputs, *node.outputs)],
            grads,
            self._uses[node.outputs[0]] if node.kind == HUB else feeds_a_loss(self.graph, node),
        )

    def seconds(self, node: Node, ins: Sequence[Layout], outs: Sequence[Layout], divided: int) -> Seconds:
        """Of a node on one rank.

        Args:
            node: of the graph.
            ins: the layouts of its inputs.
            outs: the layouts of its outputs.
            divided: how many ranks share its products.
        """
        return _Work(self, node, ins, outs, divided).seconds()

    def gradients_of(self, node: Node) -> int:
        """How many gradients a hub adds up."""
        return self._uses[node.outputs[0]]


class _Work:
    """One operator on one rank."""

    def __init__(
        self, works: Works, node: Node, ins: Sequence[Layout], outs: Sequence[Layout], divided: int
    ) -> None:
        graph, mesh = works.graph, works.mesh
        self.works, self.node, self.graph, self.machine = works, node, graph, works.machine
        self.values: list[Value] = [graph.values[v] for v in node.inputs]
        self.counts = [v.numel / parts(at, mesh) for v, at in zip(self.values, ins, strict=True)]
        results = [graph.values[v] for v in node.outputs]
        self.out = sum(v.nbytes / parts(at, mesh) for v, at in zip(results, outs, strict=True))
        self.width = results[0].itemsize if results else 0
        self.grads = [graph.edge_needs_grad(node, position) for position in range(len(self.values))]
        self.sizes = [n * v.itemsize for n, v in zip(self.counts, self.values, strict=True)]
        self.flops_s = flops(graph, node) / divided / self.machine.flops_per_s

    def seconds(self) -> Seconds:
        node = self.node
        if node.kind == HUB:
            more = max(0, self.works.gradients_of(node) - 1)
            return Seconds(0.0, more * self._moves(3 * self.out))
        if node.kind != "call" or (node.op in LINEAR_VIEWS and node.op not in _COPIES):
            return Seconds()
        if feeds_a_loss(self.graph, node):
            return Seconds()
        if node.op in _PRODUCTS:
            return self._casts() + self._product()
        if node.op == _ATTENTION:
            return self._casts() + self._attention()
        if node.op in _RECURRENT:
            once = max(self.flops_s, self._moves(sum(self.sizes) + self.out))
            return self._casts() + Seconds(once, 2 * once if any(self.grads) else 0.0)
        if node.op == "cross_entropy_loss" or node.op.startswith("nll_loss"):
            scores = self.sizes[0]
            return Seconds(self._moves(scores), self._moves(2 * scores) if self.grads[0] else 0.0)
        if node.op == "batch_norm" and is_training_norm(node):
            return self._batch_norm()
        if node.op in _NORMS:
            return self._casts() + self._norm()
        return self._elementwise()

    def _moves(self, nbytes: float) -> float:
        """One kernel that reads and writes so much."""
        return nbytes / self.machine.memory_bytes_per_s + self.machine.launch_s

    def _column_sums(self, nbytes: float) -> float:
        """One kernel that adds up rows."""
        return nbytes / self.machine.column_bytes_per_s + self.machine.launch_s

    def _multiplies(self, flops_s: float, nbytes: float) -> float:
        """One kernel that does both."""
        return max(flops_s, nbytes / self.machine.memory_bytes_per_s) + self.machine.launch_s

    # ------------------------------------------------------------ operators

    def _casts(self) -> Seconds:
        """Brings inputs to the precision in which the operator runs, and their gradients back."""
        total = Seconds()
        exact = self.node.op in RUNS_EXACT
        for count, value, grad in zip(self.counts, self.values, self.grads, strict=True):
            if not value.floating or value.itemsize == self.width or (exact and len(value.shape) == 1):
                continue
            once = self._moves(count * (value.itemsize + self.width))
            weight = self._is_parameter(value) and self.node.op in _WRITES_WIDER
            total += Seconds(once, once if grad and not weight else 0.0)
        return total

    def _is_parameter(self, value: Value) -> bool:
        maker = self.graph.nodes[value.node]
        return maker.kind == "parameter" or maker.of_parameters

    def _product(self) -> Seconds:
        """A product has two for its backward pass: one for each factor's gradient."""
        first = 1 if self.node.op == "addmm" else 0
        factors = [first, first + 1] if self.node.op != "einsum" else range(len(self.values))
        low = {i: self.counts[i] * self.width for i in factors}
        forward = self._multiplies(self.flops_s, sum(low.values()) + self.out)
        backward = 0.0
        for i, (value, grad) in enumerate(zip(self.values, self.grads, strict=True)):
            if not grad:
                continue
            if i not in low:  # a bias
                backward += self._column_sums(self.out)
                continue
            wider = self._is_parameter(value) and self.node.op in _WRITES_WIDER
            written = self.sizes[i] if wider else low[i]
            others = sum(nbytes for j, nbytes in low.items() if j != i)
            backward += self._multiplies(self.flops_s, self.out + others + written)
        return Seconds(forward, backward)

    def _attention(self) -> Seconds:
        """The backward pass has five products for two."""
        nbytes = self.width * sum(self.counts[:3]) + self.out
        forward = self._multiplies(self.flops_s / _ATTENTION_SPEED, nbytes)
        backward = self._multiplies(2.5 * self.flops_s / _ATTENTION_SPEED, 2 * nbytes)
        return Seconds(forward, backward if any(self.grads) else 0.0)

    def _batch_norm(self) -> Seconds:
        """Both passes sum over the batch first, and then read everything again."""
        x = self.sizes[0]
        forward = self._column_sums(x) + self._moves(x + self.out)
        backward = self._column_sums(x + self.out) + self._moves(2 * x + self.out)
        return Seconds(forward, backward if any(self.grads) else 0.0)

    def _norm(self) -> Seconds:
        x = self.counts[0] * self.width
        backward = self._moves(2 * x + self.out) if self.grads[0] else 0.0
        if any(self.grads[1:]):
            backward += self._column_sums(x + self.out)
        return Seconds(self._moves(x + self.out), backward)

    def _elementwise(self) -> Seconds:
        """Everything else, and what there is no rule for."""
        op = self.node.op
        if op == "embedding":
            back = self._moves(self.sizes[0] + 2 * self.out) if self.grads[0] else 0.0
            return Seconds(self._moves(2 * self.out), back)
        extra = self.out / max(1, self.width) * _INDEX_BYTES if op.startswith("max_pool") else 0.0
        forward = self._moves(sum(self.sizes) + self.out + extra)
        backward = 0.0
        for size, count, value, grad in zip(self.sizes, self.counts, self.values, self.grads, strict=True):
            if not grad:
                continue
            if count * self.width < self.out and op in ("add", "sub", "mul", "div"):  # it was repeated
                backward += self._column_sums(self.out)
            elif op in ("add", "sub", *_COPIES):  # a gradient is handed on, at most in another precision
                backward += self._moves(self.out + size) if value.itemsize != self.width else 0.0
            else:
                backward += self._moves(self.out + 2 * size + extra)
        return Seconds(forward, backward)
