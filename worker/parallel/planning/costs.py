"""What a plan costs: time of operators and collectives, and memory, on a measured or assumed machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from muster.worker.parallel.planning.graph import Graph, Node, Ref
from muster.worker.parallel.planning.layouts import COLLECTIVES, Layout, Mesh, Step, local_shape, parts
from muster.worker.parallel.planning.rules import LINEAR_VIEWS, MEAN

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan, as the communicator gets it.

    Attributes:
        phase: "forward", "backward", "gradients" or "parameters".
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
class Machine:
    """How fast one rank computes and the group communicates.

    Attributes:
        name: for people.
        flops_per_s: of a matrix product.
        memory_bytes_per_s: of reading and writing memory.
        column_bytes_per_s: of reading rows to add them up, as gradients of biases and norms do.
        bus_bytes_per_s: of collectives, as nccl-tests define it.
        latency_s: of a collective that has to be waited for.
        launch_s: of a kernel of a captured step, beside what it computes.
        memory_bytes: of one rank.
        exposed: the share of gradient communication that is not hidden behind the backward pass, 0 to 1.
        measured: seconds of collectives: kind -> ranks as text -> [bytes, seconds] rows, smallest first.
    """

    name: str = "H200, assumed"
    flops_per_s: float = 600e12
    memory_bytes_per_s: float = 3.6e12
    column_bytes_per_s: float = 1e12
    bus_bytes_per_s: float = 355e9
    latency_s: float = 15e-6
    launch_s: float = 2e-6
    memory_bytes: float = 139e9
    exposed: float = 0.7
    measured: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(default_factory=dict)

    def collective_s(self, kind: str, ranks: int, nbytes: float, *, latency: bool = True) -> float:
        """Seconds of one collective; ``nbytes`` is that of the larger buffer."""
        if ranks == 1 or not nbytes:
            return 0.0
        rows = self.measured.get(kind, {}).get(str(ranks))
        if rows:
            seconds = _interpolated(rows, nbytes)
            return seconds if latency else max(0.0, seconds - rows[0][1])
        factor = {"all_reduce": 2.0, "all_to_all": 1.3}.get(kind, 1.0)
        moved = factor * (ranks - 1) / ranks * nbytes / self.bus_bytes_per_s
        return moved + (self.latency_s if latency else 0.0)

    def move_s(self, steps: Sequence[Step], nbytes: float, mesh: Mesh) -> float:
        """Seconds of a move of a tensor that has ``nbytes`` as a whole."""
        return sum(
            self.collective_s(step.kind, math.prod(mesh[d] for d in step.dims), nbytes / step.divisor)
            for step in steps
            if step.kind in COLLECTIVES
        )

    def gradients_s(self, ranks: int, nbytes: float, *, sharded: bool) -> float:
        """Seconds of what a parameter adds to its bucket, as far as the backward pass does not hide it.

        With ``sharded`` (ZeRO-1) gradients are reduced and scattered, and the updated parameters gathered.
        """
        if ranks == 1:
            return 0.0
        share = min(1.0, nbytes / BUCKET_BYTES)  # of a bucket's latency
        if not sharded:
            whole = self.collective_s("all_reduce", ranks, nbytes, latency=False)
            return self.exposed * (whole + share * self.latency_s)
        scatter = self.collective_s("reduce_scatter", ranks, nbytes, latency=False)
        gather = self.collective_s("all_gather", ranks, nbytes, latency=False)
        return self.exposed * (scatter + share * self.latency_s) + gather + share * self.latency_s

    def to_json(self) -> dict[str, Any]:
        """All attributes, as a measurement is saved."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _interpolated(rows: Sequence[Sequence[float]], nbytes: float) -> float:
    """Between measured sizes in a straight line; beyond the largest in proportion."""
    if nbytes <= rows[0][0]:
        return float(rows[0][1])
    for (a, s), (b, t) in itertools.pairwise(rows):
        if nbytes <= b:
            return float(s + (t - s) * (nbytes - a) / (b - a))
    return float(rows[-1][1] * nbytes / rows[-1][0])


# ---------------------------------------------------------------- operators


def kept_bytes(graph: Graph, node: Node, outs: Sequence[Layout], mesh: Mesh) -> float:
    """Bytes that an operator's results hold on one rank until the backward pass has used them."""
    if node.kind != "call" or node.op in LINEAR_VIEWS:
        return 0.0
    values = [graph.values[v] for v in node.outputs]
    return sum(value.nbytes / parts(layout, mesh) for value, layout in zip(values, outs, strict=True))


def inner_collectives(
    graph: Graph, node: Node, names: Sequence[str], ins: Sequence[Layout], mesh: Mesh, *, local_norm: bool
) -> list[Collective]:
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
        found.append(Collective(phase, node.name, kind, dims, elements * item))

    needs_grad = bool(node.outputs) and graph.values[node.outputs[0]].needs_grad
    if node.op == "cross_entropy_loss" or node.op.startswith("nll_loss"):
        reduction = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", MEAN)
        if "m" in along and reduction == MEAN:
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
