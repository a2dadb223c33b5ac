"""Predicts the time of operators and collectives on a measured or assumed machine."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from muster.parallel.planning.axes import MEAN
from muster.parallel.planning.graph import FAN_OUT, Graph, Node, Ref, TensorValue, names
from muster.parallel.planning.layouts import (
    COLLECTIVES,
    Mesh,
    Placements,
    RedistributionStep,
    hosts_of,
    local_shape,
    parts,
)
from muster.parallel.planning.precision import RUNS_EXACT, feeds_a_loss
from muster.parallel.planning.rules import LINEAR_VIEWS

BUCKET_BYTES = 25 * 2**20
_GATHERS_EXPOSED = 0.6
"""The share of the time of a parameter's all_gather, in each pass, that computing does not hide, although it
starts early. With this share both gathers cost more than a sharded update, and less than collectives that
block."""


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective of a plan.

    Attributes:
        phase: "forward", "recomputed" (the forward pass again), "backward", "gradients" or "parameters".
        node: the name of the node or bucket that needs it.
        kind: one of ``COLLECTIVES``.
        dims: the mesh dimensions along which ranks take part.
        nbytes: the size of the larger of the communicator's two buffers, in bytes.
    """

    phase: str
    node: str
    kind: str
    dims: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Hardware:
    """How fast one rank computes and the group communicates.

    Attributes:
        name: the machine's name for people.
        flops_per_s: the speed of a matrix product.
        memory_bytes_per_s: the bandwidth of reading and writing memory.
        column_bytes_per_s: the bandwidth of summing rows, as for gradients of biases and norms.
        bus_bytes_per_s: the bus bandwidth of collectives, as nccl-tests define it.
        latency_s: the latency of a blocking collective within a host.
        host_ranks: the number of neighbouring ranks that share a host.
        network_bytes_per_s: the bandwidth of each rank's own link to other hosts.
        network_latency_s: the latency of one step of a collective from host to host.
        launch_s: the overhead of a kernel of a captured step.
        memory_bytes: the memory of one rank.
        exposed: the share of gradient communication that the backward pass does not hide, 0 to 1.
        measured: measured times of collectives: kind -> :func:`group_text` -> rows of [bytes, seconds],
            smallest first.
    """

    name: str = "H200, assumed"
    flops_per_s: float = 600e12
    memory_bytes_per_s: float = 3.6e12
    column_bytes_per_s: float = 1e12
    bus_bytes_per_s: float = 355e9
    latency_s: float = 15e-6
    host_ranks: int = 8
    network_bytes_per_s: float = 50e9
    network_latency_s: float = 10e-6
    launch_s: float = 2e-6
    memory_bytes: float = 139e9
    exposed: float = 0.7
    measured: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(default_factory=dict)

    def collective_s(
        self, kind: str, ranks: int, nbytes: float, *, hosts: int = 1, latency: bool = True
    ) -> float:
        """Predicts the seconds of one collective.

        Without a measurement: on several hosts there is one ring per rank that a host has in the group, over
        all links at once, and the slower of links and bus sets the speed. The latency of an all_reduce is
        that of trees; those of all_gather and reduce_scatter are that of a ring of all hosts.

        Args:
            kind: one of ``COLLECTIVES``.
            ranks: the number of ranks that take part.
            nbytes: the size of the larger buffer, in bytes.
            hosts: the number of hosts of these ranks, with the same number of ranks on each.
            latency: whether to add the latency, as for a collective that blocks.
        """
        if ranks == 1 or not nbytes:
            return 0.0
        rows = self.measured.get(kind, {}).get(group_text(ranks, hosts))
        if rows:
            seconds = _interpolated(rows, nbytes)
            return seconds if latency else max(0.0, seconds - rows[0][1])
        waiting = self.wait_s(kind, hosts) if latency else 0.0
        if kind == "all_to_all":
            away = (hosts - 1) / hosts * nbytes / self.network_bytes_per_s
            return max(1.3 * (ranks - 1) / ranks * nbytes / self.bus_bytes_per_s, away) + waiting
        bus = self.bus_bytes_per_s
        if hosts > 1:
            bus = min(bus, ranks / hosts * self.network_bytes_per_s)
        factor = 2.0 if kind == "all_reduce" else 1.0
        return factor * (ranks - 1) / ranks * nbytes / bus + waiting

    def wait_s(self, kind: str, hosts: int = 1) -> float:
        """Predicts the seconds of a collective without data: its latency."""
        around = {"all_reduce": 2 * math.ceil(math.log2(hosts)), "all_to_all": min(1, hosts - 1)}
        return self.latency_s + around.get(kind, hosts - 1) * self.network_latency_s

    def hosts_along(self, dims: Sequence[int], mesh: Mesh) -> int:
        """Returns the number of hosts of a group of ranks that differ only along these mesh dimensions."""
        return hosts_of(tuple(dims), mesh, self.host_ranks)

    def along_s(self, kind: str, dims: Sequence[int], mesh: Mesh, nbytes: float) -> float:
        """Predicts the seconds of a collective of the ranks that differ only along these mesh dimensions."""
        ranks = math.prod(mesh[d] for d in dims)
        return self.collective_s(kind, ranks, nbytes, hosts=self.hosts_along(dims, mesh))

    def move_s(self, steps: Sequence[RedistributionStep], nbytes: float, mesh: Mesh) -> float:
        """Predicts the seconds of a redistribution of a tensor that has ``nbytes`` as a whole."""
        return sum(
            self.along_s(step.kind, step.dims, mesh, nbytes / step.divisor)
            for step in steps
            if step.kind in COLLECTIVES
        )

    def gradients_s(
        self, ranks: int, nbytes: float, *, sharded: bool, regathered: bool = False, hosts: int = 1
    ) -> float:
        """Predicts the seconds that one parameter adds to a step by its share of a bucket's communication.

        Only the time that computing does not hide counts. With ``sharded`` (ZeRO-1) there is a reduce_scatter
        of gradients and an all_gather of the updated parameters; with ``regathered`` (ZeRO-3) the parameters
        are gathered in both passes instead.
        """
        if ranks == 1:
            return 0.0
        share = min(1.0, nbytes / BUCKET_BYTES)  # of a bucket's latency

        def once(kind: str) -> float:
            sent = self.collective_s(kind, ranks, nbytes, hosts=hosts, latency=False)
            return sent + share * self.wait_s(kind, hosts)

        if not sharded:
            return self.exposed * once("all_reduce")
        if regathered:
            return self.exposed * once("reduce_scatter") + 2 * _GATHERS_EXPOSED * once("all_gather")
        return self.exposed * once("reduce_scatter") + once("all_gather")

    def to_json(self) -> dict[str, Any]:
        """Returns all attributes, as they are saved in JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


H200 = Hardware()
H100 = Hardware(
    "H100, assumed",
    memory_bytes_per_s=2.7e12,
    launch_s=1.3e-6,
    memory_bytes=85e9,
)
MACHINES = {"h200": H200, "h100": H100}
"""Machines by the names that ``muster plan`` takes: hosts of eight GPUs, with 400 Gb/s per GPU in between."""


def group_text(ranks: int, hosts: int) -> str:
    """Returns the key of a group's size in :attr:`Hardware.measured`."""
    return str(ranks) if hosts == 1 else f"{ranks} on {hosts} hosts"


def _interpolated(rows: Sequence[Sequence[float]], nbytes: float) -> float:
    """Interpolates linearly between measured sizes; beyond the largest, in proportion to the size."""
    if nbytes <= rows[0][0]:
        return float(rows[0][1])
    for (a, s), (b, t) in itertools.pairwise(rows):
        if nbytes <= b:
            return float(s + (t - s) * (nbytes - a) / (b - a))
    return float(rows[-1][1] * nbytes / rows[-1][0])


# ---------------------------------------------------------------- operators

_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_SPEED = 0.5
"""The speed of an attention kernel relative to a matrix product: it computes exponentials between its two."""
_CAT_SPEED = 0.36
"""The speed of torch's kernel of ``cat`` relative to a plain copy (measured on one H100, torch 2.11)."""
_REORDER_SPEED = 0.47
"""The same of a copy that changes the order of elements."""
CONVOLUTIONS = names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
_PRODUCTS = names("linear matmul mm bmm addmm einsum") | CONVOLUTIONS
_WRITES_WIDER = names("linear matmul mm addmm")  # gradients of weights, in their own precision at once
_RECURRENT = names("lstm gru rnn_tanh rnn_relu")
_NORMS = names("layer_norm group_norm rms_norm")
_COPIES = names("contiguous clone")
_DIVIDERS = names("chunk split split_with_sizes unbind tensor_split")  # their parts' gradients are joined
_REORDERERS = names("transpose permute movedim swapaxes t numpy_T")
_INDEX_BYTES = 8


def flops(graph: Graph, node: Node) -> float:
    """Returns the floating-point operations of a whole operator's forward pass; 0 for all but products."""
    shapes = [graph.values[v].shape for v in node.inputs]
    out = graph.values[node.outputs[0]].numel if node.outputs else 0
    if node.op in ("linear", "matmul", "mm", "bmm"):
        return 2.0 * out * shapes[0][-1]
    if node.op == "addmm":
        return 2.0 * out * shapes[1][-1]
    if node.op in CONVOLUTIONS:
        turned = node.args[6] if node.op == "convolution" else "transpose" in node.op
        return 2.0 * (math.prod(shapes[0]) if turned else out) * math.prod(shapes[1][1:])
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
    """The seconds of an operator's two passes on one rank."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        """Returns the sum, as for two operators that run one after the other."""
        return Seconds(self.forward + other.forward, self.backward + other.backward)


class OperatorTimes:
    """Predicts the times of a graph's operators on one machine, kernel by kernel.

    Except for the cross entropy no operators are fused: each reads its inputs and writes its results. Kernels
    are launched by a captured graph.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        mesh: the mesh's sizes.
        machine: the machine's costs.
    """

    def __init__(self, graph: Graph, mesh: Mesh, machine: Hardware) -> None:
        self.graph, self.mesh, self.machine = graph, mesh, machine
        self._uses = Counter(
            value
            for node in graph.nodes
            for position, value in enumerate(node.inputs)
            if graph.edge_needs_grad(node, position)
        )

    def traits(self, node: Node) -> tuple[object, ...]:
        """Returns what a node's time depends on besides operator, arguments and shapes."""
        values = self.graph.values
        grads = [self.graph.edge_needs_grad(node, position) for position in range(len(node.inputs))]
        return (
            [values[v].itemsize for v in (*node.inputs, *node.outputs)],
            grads,
            self._uses[node.outputs[0]] if node.kind == FAN_OUT else feeds_a_loss(self.graph, node),
        )

    def seconds(
        self, node: Node, ins: Sequence[Placements], outs: Sequence[Placements], divided: int
    ) -> Seconds:
        """Predicts the times of a node's passes on one rank.

        Args:
            node: a node of the graph.
            ins: the layouts of its inputs.
            outs: the layouts of its outputs.
            divided: the number of ranks that share its floating-point operations.
        """
        return _OperatorTime(self, node, ins, outs, divided).seconds()

    def gradients_of(self, node: Node) -> int:
        """Returns the number of gradients that a fan-out node sums."""
        return self._uses[node.outputs[0]]


class _OperatorTime:
    """One operator on one rank."""

    def __init__(
        self,
        times: OperatorTimes,
        node: Node,
        ins: Sequence[Placements],
        outs: Sequence[Placements],
        divided: int,
    ) -> None:
        graph, mesh = times.graph, times.mesh
        self.times, self.node, self.graph, self.machine = times, node, graph, times.machine
        self.values: list[TensorValue] = [graph.values[v] for v in node.inputs]
        self.counts = [v.numel / parts(at, mesh) for v, at in zip(self.values, ins, strict=True)]
        results = [graph.values[v] for v in node.outputs]
        self.out = sum(v.nbytes / parts(at, mesh) for v, at in zip(results, outs, strict=True))
        self.width = results[0].itemsize if results else 0
        self.grads = [graph.edge_needs_grad(node, position) for position in range(len(self.values))]
        self.sizes = [n * v.itemsize for n, v in zip(self.counts, self.values, strict=True)]
        self.flops_s = flops(graph, node) / divided / self.machine.flops_per_s

    def seconds(self) -> Seconds:
        node = self.node
        if node.kind == FAN_OUT:
            more = max(0, self.times.gradients_of(node) - 1)
            return Seconds(0.0, more * self._moves(3 * self.out))
        if node.op in _DIVIDERS:
            return Seconds(0.0, self._joined_gradients() if any(self.grads) else 0.0)
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
        if node.op == "cat":  # each part's gradient is a view
            return self._casts() + Seconds(self._moves((sum(self.sizes) + self.out) / _CAT_SPEED), 0.0)
        return self._elementwise()

    def _moves(self, nbytes: float) -> float:
        """Predicts the seconds of a kernel that reads and writes ``nbytes`` in all."""
        return nbytes / self.machine.memory_bytes_per_s + self.machine.launch_s

    def _column_sums(self, nbytes: float) -> float:
        """Predicts the seconds of a kernel that sums rows of ``nbytes`` in all."""
        return nbytes / self.machine.column_bytes_per_s + self.machine.launch_s

    def _multiplies(self, flops_s: float, nbytes: float) -> float:
        """Predicts the seconds of a kernel that computes and moves data.

        A matrix product does both at once, a convolution with its small tiles one after the other.
        """
        moved_s = nbytes / self.machine.memory_bytes_per_s
        together = flops_s + moved_s if self.node.op in CONVOLUTIONS else max(flops_s, moved_s)
        return together + self.machine.launch_s

    # ------------------------------------------------------------ operators

    def _casts(self) -> Seconds:
        """Predicts the seconds of casting inputs to the operator's precision, and their gradients back."""
        total = Seconds()
        exact = self.node.op in RUNS_EXACT
        for count, value, grad in zip(self.counts, self.values, self.grads, strict=True):
            if not value.floating or value.itemsize == self.width or (exact and len(value.shape) == 1):
                continue
            once = self._moves(count * (value.itemsize + self.width))
            weight = self._is_parameter(value) and self.node.op in _WRITES_WIDER
            total += Seconds(once, once if grad and not weight else 0.0)
        return total

    def _is_parameter(self, value: TensorValue) -> bool:
        maker = self.graph.nodes[value.node]
        return maker.kind == "parameter" or maker.of_parameters

    def _product(self) -> Seconds:
        """Predicts a product's seconds; its backward pass has one product per factor with a gradient."""
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
        """Predicts an attention kernel's seconds: those of its products plus those of reading and writing.

        Its blocks are too short to hide the memory accesses behind the products. The backward pass has five
        products where the forward pass has two. It reads the inputs, the output and the output's gradient; it
        writes three gradients, that of the queries in float32 first, and reads the output and its gradient
        once more for the rows' sums.
        """
        each = self.width * max(self.counts[:3])
        products = self.flops_s / _ATTENTION_SPEED
        forward = products + self._moves(self.width * sum(self.counts[:3]) + self.out)
        backward = 2.5 * products + self._moves(14 * each) + 2 * self.machine.launch_s
        return Seconds(forward, backward if any(self.grads) else 0.0)

    def _joined_gradients(self) -> float:
        """Predicts the seconds of joining the gradients of parts, and of restoring the source's order."""
        moved = 2 * sum(self.sizes)
        made = self.graph.nodes[self.values[0].node]
        ordered = self._moves(moved / _REORDER_SPEED) if made.op in _REORDERERS else 0.0
        return self._moves(moved / _CAT_SPEED) + ordered

    def _batch_norm(self) -> Seconds:
        """Predicts a BatchNorm's seconds: both passes sum over the batch, and then read everything again."""
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
        """Predicts the seconds of an embedding, an elementwise operator, or any other operator."""
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
            if count * self.width < self.out and op in ("add", "sub", "mul", "div"):  # it was broadcast
                backward += self._column_sums(self.out)
            elif op in ("add", "sub", *_COPIES):  # a gradient is handed on, at most in another precision
                backward += self._moves(self.out + size) if value.itemsize != self.width else 0.0
            else:
                backward += self._moves(self.out + 2 * size + extra)
        return Seconds(forward, backward)


def inner_collectives(
    graph: Graph, node: Node, names: Sequence[str], ins: Sequence[Placements], mesh: Mesh, *, local_norm: bool
) -> list[PlannedCollective]:
    """Returns the collectives within an operator, as of a cross entropy over sharded classes.

    Args:
        graph: the node's graph.
        node: the operator.
        names: the axis that each mesh dimension splits.
        ins: the layouts of the inputs.
        mesh: the mesh's sizes.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
    """
    along = {name: tuple(m for m, each in enumerate(names) if each == name) for name in names}
    shape = local_shape(ins[0], mesh, graph.values[node.inputs[0]].shape) if node.inputs else ()
    item = max(4, graph.values[node.inputs[0]].itemsize) if node.inputs else 0  # sums are of float32 at least
    found = []

    def add(phase: str, kind: str, dims: tuple[int, ...], elements: int) -> None:
        found.append(PlannedCollective(phase, node.name, kind, dims, elements * item))

    needs_grad = bool(node.outputs) and graph.values[node.outputs[0]].needs_grad
    if node.op == "cross_entropy_loss" or node.op.startswith("nll_loss"):
        reduction = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", MEAN)
        if "m" in along and reduction == MEAN and not graph.values[node.inputs[1]].floating:
            add("forward", "all_reduce", along["m"], 1)
        if "v" in along:  # maxima, sums and targets' scores
            ranks = math.prod(mesh[d] for d in along["v"])
            add("forward", "all_gather", along["v"], ranks * 3 * shape[0])
    if node.op == "batch_norm" and "b" in along and is_training_norm(node) and not local_norm:
        ranks = math.prod(mesh[d] for d in along["b"])
        add("forward", "all_gather", along["b"], ranks * 2 * shape[1])
        if needs_grad:
            add("backward", "all_reduce", along["b"], 2 * shape[1])
    return found


def is_training_norm(node: Node) -> bool:
    """Whether a BatchNorm uses the statistics of its batch."""
    flag = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", False)
    return bool(flag) or not any(isinstance(argument, Ref) for argument in node.args[3:5])
