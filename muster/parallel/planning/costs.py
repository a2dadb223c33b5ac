"""What a plan costs: time of operators and collectives, and memory, on a measured or assumed machine."""

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
"""The share of gathering a parameter, in each pass, that computing does not hide: a bucket sets out early.
Both together cost more than an update that is divided, and less than moves that are waited for."""


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective of a plan, as the communicator gets it.

    Attributes:
        phase: "forward", "recomputed" (the forward pass again), "backward", "gradients" or "parameters".
        node: the name of the node for which it is.
        kind: one of ``COLLECTIVES``.
        dims: the mesh dimensions along which ranks take part.
        nbytes: of the larger of the two buffers.
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
        name: for people.
        flops_per_s: of a matrix product.
        memory_bytes_per_s: of reading and writing memory.
        column_bytes_per_s: of reading rows to add them up, as gradients of biases and norms do.
        bus_bytes_per_s: of collectives, as nccl-tests define it.
        latency_s: of a collective within a host that has to be waited for.
        host_ranks: how many neighbouring ranks share a host.
        network_bytes_per_s: of each rank's own link to other hosts.
        network_latency_s: of a step of a collective from host to host.
        launch_s: of a kernel of a captured step, beside what it computes.
        memory_bytes: of one rank.
        exposed: the share of gradient communication that is not hidden behind the backward pass, 0 to 1.
        measured: seconds of collectives: kind -> :func:`group_text` -> [bytes, seconds] rows, smallest first.
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
        """Seconds of one collective.

        On several hosts, rings go over all links between these at once, one for each of the ranks that a host
        has in the group; the slower of links and bus holds up the rest. Small sums go by trees, gathering and
        scattering go around all hosts.

        Args:
            kind: one of ``COLLECTIVES``.
            ranks: that take part.
            nbytes: of the larger buffer.
            hosts: on which these ranks are, as many on each.
            latency: whether it has to be waited for.
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
        """Seconds of a collective of next to nothing."""
        around = {"all_reduce": 2 * math.ceil(math.log2(hosts)), "all_to_all": min(1, hosts - 1)}
        return self.latency_s + around.get(kind, hosts - 1) * self.network_latency_s

    def hosts_along(self, dims: Sequence[int], mesh: Mesh) -> int:
        """On how many hosts the ranks are that differ along these mesh dimensions only."""
        return hosts_of(tuple(dims), mesh, self.host_ranks)

    def along_s(self, kind: str, dims: Sequence[int], mesh: Mesh, nbytes: float) -> float:
        """Seconds of one collective of the ranks that differ along these mesh dimensions only."""
        ranks = math.prod(mesh[d] for d in dims)
        return self.collective_s(kind, ranks, nbytes, hosts=self.hosts_along(dims, mesh))

    def move_s(self, steps: Sequence[RedistributionStep], nbytes: float, mesh: Mesh) -> float:
        """Seconds of a move of a tensor that has ``nbytes`` as a whole."""
        return sum(
            self.along_s(step.kind, step.dims, mesh, nbytes / step.divisor)
            for step in steps
            if step.kind in COLLECTIVES
        )

    def gradients_s(
        self, ranks: int, nbytes: float, *, sharded: bool, regathered: bool = False, hosts: int = 1
    ) -> float:
        """Seconds of what a parameter adds to its bucket, as far as the rest of the step does not hide it.

        With ``sharded`` (ZeRO-1) gradients are reduced and scattered, and the updated parameters gathered;
        with ``regathered`` (ZeRO-3) they are gathered in both passes, beside what these compute.
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
        """All attributes, as a measurement is saved."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


H200 = Hardware()
H100 = Hardware(
    "H100, assumed",
    memory_bytes_per_s=2.7e12,
    launch_s=1.3e-6,
    memory_bytes=85e9,
)
MACHINES = {"h200": H200, "h100": H100}
"""Hosts of eight GPUs with 400 Gb/s a GPU between them, by the names that ``muster plan`` takes."""


def group_text(ranks: int, hosts: int) -> str:
    """A group's size, as measurements are filed."""
    return str(ranks) if hosts == 1 else f"{ranks} on {hosts} hosts"


def _interpolated(rows: Sequence[Sequence[float]], nbytes: float) -> float:
    """Between measured sizes in a straight line; beyond the largest in proportion."""
    if nbytes <= rows[0][0]:
        return float(rows[0][1])
    for (a, s), (b, t) in itertools.pairwise(rows):
        if nbytes <= b:
            return float(s + (t - s) * (nbytes - a) / (b - a))
    return float(rows[-1][1] * nbytes / rows[-1][0])


# ---------------------------------------------------------------- operators

_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_SPEED = 0.5
"""Of a product's: between its two products an attention kernel takes exponentials, which are slower."""
_CAT_SPEED = 0.36
"""Of a plain copy's: what torch's kernel that joins tensors reaches (one H100, torch 2.11)."""
_REORDER_SPEED = 0.47
"""Likewise, of a copy that brings elements into another order."""
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
    """Floating-point operations of the forward pass of a whole operator, of those that count."""
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
    """Of the two passes of an operator on one rank."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        """One after the other."""
        return Seconds(self.forward + other.forward, self.backward + other.backward)


class OperatorTimes:
    """The time of the operators of one graph on one machine, as a step runs them: kernel by kernel.

    Nothing is fused but the cross entropy: an operator reads its inputs and writes its results. Kernels are
    launched by a captured graph.
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
        """What of a node's place in the graph its time depends on, beside operator, arguments and shapes."""
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
        """Of a node on one rank.

        Args:
            node: of the graph.
            ins: the layouts of its inputs.
            outs: the layouts of its outputs.
            divided: how many ranks share its products.
        """
        return _OperatorTime(self, node, ins, outs, divided).seconds()

    def gradients_of(self, node: Node) -> int:
        """How many gradients a fan-out node adds up."""
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
        """One kernel that reads and writes so much."""
        return nbytes / self.machine.memory_bytes_per_s + self.machine.launch_s

    def _column_sums(self, nbytes: float) -> float:
        """One kernel that adds up rows."""
        return nbytes / self.machine.column_bytes_per_s + self.machine.launch_s

    def _multiplies(self, flops_s: float, nbytes: float) -> float:
        """One kernel that does both: at once in a matrix product, by turns in a convolution's small tiles."""
        moved_s = nbytes / self.machine.memory_bytes_per_s
        together = flops_s + moved_s if self.node.op in CONVOLUTIONS else max(flops_s, moved_s)
        return together + self.machine.launch_s

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

    def _is_parameter(self, value: TensorValue) -> bool:
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
        """Products on blocks that are read once: no block is long enough to hide that.

        The backward pass has five products for two. It reads what the forward pass read and wrote, and the
        output's gradient; it writes three gradients, that of the queries in float32 first, and reads the
        output and its gradient once more for the rows' sums.
        """
        each = self.width * max(self.counts[:3])
        products = self.flops_s / _ATTENTION_SPEED
        forward = products + self._moves(self.width * sum(self.counts[:3]) + self.out)
        backward = 2.5 * products + self._moves(14 * each) + 2 * self.machine.launch_s
        return Seconds(forward, backward if any(self.grads) else 0.0)

    def _joined_gradients(self) -> float:
        """The gradients of parts become one; where the parts lay in another order, that order is restored."""
        moved = 2 * sum(self.sizes)
        made = self.graph.nodes[self.values[0].node]
        ordered = self._moves(moved / _REORDER_SPEED) if made.op in _REORDERERS else 0.0
        return self._moves(moved / _CAT_SPEED) + ordered

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


def inner_collectives(
    graph: Graph, node: Node, names: Sequence[str], ins: Sequence[Placements], mesh: Mesh, *, local_norm: bool
) -> list[PlannedCollective]:
    """The collectives that an operator needs within itself.

    Args:
        graph: of the node.
        node: the operator.
        names: the axis that each mesh dimension splits.
        ins: the layouts of the inputs.
        mesh: sizes.
        local_norm: BatchNorm takes the statistics of each rank's own part of the batch.
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
