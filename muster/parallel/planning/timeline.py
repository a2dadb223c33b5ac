"""When each part of a step runs: gradients travel beside the backward pass, all else waits its turn. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.parallel.planning.buckets import gradient_buckets, node_collectives, parameter_shards
from muster.parallel.planning.costs import Hardware, OperatorTimes
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.layouts import Mesh
from muster.parallel.planning.problem import State


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step.

    Attributes:
        forward_s: of the forward pass, with what it waits for.
        backward_s: of the backward pass, with what it waits for.
        exposed_s: how long sums of gradients go on when the backward pass is over.
        gradients_s: of the sums of gradients themselves.
        update_s: of the optimizer, and of gathering parameters whose update is divided.
    """

    forward_s: float
    backward_s: float
    exposed_s: float
    gradients_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.exposed_s + self.update_s

    @property
    def hidden(self) -> float:
        """The share of the sums of gradients that the backward pass hides, 0 to 1."""
        return 1 - self.exposed_s / self.gradients_s if self.gradients_s else 0.0


def timeline(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    machine: Hardware,
    *,
    optimizer_states: int = 2,
    local_norm: bool = False,
) -> Timeline:
    """Plays a step: operators and moves one after the other, buckets of gradients beside them in their order.

    A bucket starts when its last gradient is there and the one before it is done. What computing beside a
    collective costs both is not counted.

    Args:
        graph: with fan-out nodes.
        states: one of each node's.
        mesh: sizes.
        machine: what things cost.
        optimizer_states: tensors that the optimizer keeps for each parameter.
        local_norm: BatchNorm takes the statistics of each rank's own part of the batch.
    """
    forward_s, now = 0.0, 0.0
    operator_times = OperatorTimes(graph, mesh, machine)
    times = []
    for index, (node, state) in enumerate(zip(graph.nodes, states, strict=True)):
        divided = math.prod(
            size for size, mode in zip(mesh, state.modes, strict=False) if mode not in ("-", "grad", "sum")
        )
        work = operator_times.seconds(node, state.ins, state.outs, divided)
        moved = {"forward": 0.0, "backward": 0.0}
        for each in node_collectives(graph, states, mesh, index, local_norm=local_norm):
            moved[each.phase] += machine.along_s(each.kind, each.dims, mesh, each.nbytes)
        forward_s += work.forward + moved["forward"]
        times.append(work.backward + moved["backward"])
    ready: dict[int, float] = {}  # by value, when its gradient is there
    for node, seconds in zip(reversed(graph.nodes), reversed(times), strict=True):
        if node.kind == FAN_OUT and not seconds:
            done = ready.get(node.outputs[0], 0.0)
        else:
            now += seconds
            done = now
        for value in node.inputs:
            ready[value] = max(ready.get(value, 0.0), done)
    return _with_gradients(graph, states, mesh, machine, optimizer_states, forward_s, now, ready)


def _with_gradients(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    machine: Hardware,
    optimizer_states: int,
    forward_s: float,
    backward_s: float,
    ready: dict[int, float],
) -> Timeline:
    held = parameter_shards(graph, states, mesh)
    values = {node.name: node.outputs[0] for node in graph.nodes if node.name in held}
    free = gradients_s = update_s = 0.0
    for bucket in gradient_buckets(list(held.values())):
        kind = "reduce_scatter" if bucket.sharded else "all_reduce"
        seconds = machine.along_s(kind, bucket.dims, mesh, bucket.sent_nbytes)
        free = max(free, *(ready.get(values[name], backward_s) for name in bucket.nodes)) + seconds
        gradients_s += seconds
        if bucket.sharded:
            update_s += machine.along_s("all_gather", bucket.dims, mesh, bucket.nbytes)
    own = sum(each.own_bytes(0)[0] for each in held.values())
    update_s += (3 + 2 * optimizer_states) * own / machine.memory_bytes_per_s
    return Timeline(forward_s, backward_s, max(0.0, free - backward_s), gradients_s, update_s)
