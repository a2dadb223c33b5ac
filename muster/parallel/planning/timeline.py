"""Simulates the times of a step, in which gradients and gathered parameters overlap computation. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.parallel.planning.buckets import (
    ParameterShard,
    PlannedBucket,
    gradient_buckets,
    node_collectives,
    parameter_shards,
    read_again,
)
from muster.parallel.planning.costs import Hardware, OperatorTimes
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.layouts import Mesh
from muster.parallel.planning.problem import State
from muster.parallel.planning.recomputed import backward_order, chosen_layers


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step.

    Attributes:
        forward_s: the forward pass, with its waits.
        backward_s: the backward pass, with its waits and recomputation.
        exposed_s: the time for which gradients are communicated after the backward pass.
        gradients_s: all communication of gradients.
        update_s: the optimizer's update, and the all_gather of parameters whose updates are sharded (ZeRO-1).
        gathers_s: gathering the parameters that are held as shards (ZeRO-3).
        waited_s: the time for which both passes wait for these gathers; it is part of the passes' times.
    """

    forward_s: float
    backward_s: float
    exposed_s: float
    gradients_s: float
    update_s: float
    gathers_s: float = 0.0
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of the whole step, in seconds."""
        return self.forward_s + self.backward_s + self.exposed_s + self.update_s

    @property
    def hidden(self) -> float:
        """The share of gradient communication that the backward pass hides, 0 to 1."""
        return 1 - self.exposed_s / self.gradients_s if self.gradients_s else 0.0

    @property
    def gathers_hidden(self) -> float:
        """The share of the time of gathering parameters that computing hides, 0 to 1."""
        return 1 - self.waited_s / self.gathers_s if self.gathers_s else 0.0


def timeline(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    machine: Hardware,
    *,
    optimizer_states: int = 2,
    local_norm: bool = False,
) -> Timeline:
    """Simulates a step: operators and redistributions in sequence, and gradient buckets in order beside them.

    A bucket starts when its last gradient is ready and the previous bucket is done. Parameters that are held
    as shards are gathered over the same link, the next bucket while the present one is in use. That computing
    and communication slow each other down is not counted.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        states: the chosen state of each node.
        mesh: the mesh's sizes.
        machine: the machine's costs.
        optimizer_states: the number of tensors that the optimizer keeps per parameter.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
    """
    operator_times = OperatorTimes(graph, mesh, machine)
    forward, backward, again = [], [], []
    for index, (node, state) in enumerate(zip(graph.nodes, states, strict=True)):
        divided = math.prod(
            size for size, mode in zip(mesh, state.modes, strict=False) if mode not in ("-", "grad", "sum")
        )
        work = operator_times.seconds(node, state.ins, state.outs, divided)
        moved = {"forward": 0.0, "backward": 0.0, "recomputed": 0.0}
        for each in node_collectives(graph, states, mesh, index, local_norm=local_norm):
            moved[each.phase] += machine.along_s(each.kind, each.dims, mesh, each.nbytes)
        forward.append(work.forward + moved["forward"])
        backward.append(work.backward + moved["backward"])
        again.append(work.forward + moved["recomputed"])
    played = _Passes(graph, states, parameter_shards(graph, states, mesh), mesh, machine)
    forward_s = played.forward(forward)
    backward_s = played.backward(backward, again)
    return played.over(forward_s, backward_s, optimizer_states)


class _Passes:
    """Simulates the two passes of a step, and the buckets that are communicated beside them."""

    def __init__(
        self,
        graph: Graph,
        states: Sequence[State],
        held: dict[str, ParameterShard],
        mesh: Mesh,
        machine: Hardware,
    ) -> None:
        self._graph, self._states = graph, states
        self._held, self._mesh, self._machine = held, mesh, machine
        self._buckets = gradient_buckets(list(held.values()))
        self._gathers = [bucket for bucket in self._buckets if bucket.regathered]
        self._now = self._free = 0.0  # the link is free from then on
        self._coming: dict[int, float] = {}  # by bucket, the time at which it is gathered
        self._gathers_s = self._waited_s = self._gradients_s = 0.0

    def forward(self, times: Sequence[float]) -> float:
        """Simulates the forward pass; returns its time in seconds.

        Args:
            times: the seconds of each node's forward pass.
        """
        number_of = self._numbers()
        readers: dict[int, int] = {}  # by bucket, the node that reads it first
        for index, node in enumerate(self._graph.nodes):
            for value in node.inputs:
                if value in number_of:
                    readers.setdefault(number_of[value], index)
        order = sorted(readers, key=lambda number: readers[number])
        for index, seconds in enumerate(times):
            self._gather([number for number in order if readers[number] == index], order)
            self._now += seconds
        return self._now

    def backward(self, times: Sequence[float], again: Sequence[float]) -> float:
        """Simulates the backward pass; returns its time in seconds.

        Args:
            times: the seconds of each node's backward pass.
            again: the seconds of each node's forward pass, used if it is recomputed.
        """
        self._coming, begin = {}, self._now
        read = read_again(
            self._graph, self._states, self._mesh, [name for bucket in self._gathers for name in bucket.nodes]
        )
        readers = {
            number: min(read[name] for name in bucket.nodes if name in read)
            for number, bucket in enumerate(self._gathers)
            if any(name in read for name in bucket.nodes)
        }
        order = sorted(readers, key=lambda number: readers[number])
        last = self._last_gradients()
        left = list(self._buckets)
        missing = [set(bucket.nodes) for bucket in left]
        layers = chosen_layers(self._graph, [state.recomputed for state in self._states])
        for place, (index, second) in enumerate(backward_order(self._graph, layers)):
            self._gather([number for number in order if readers[number] == place], order)
            self._now += again[index] if second else times[index]
            if second:
                continue
            for names in missing:
                names -= last.get(index, set())
            while missing and not missing[0]:
                missing.pop(0)
                self._sum(left.pop(0))
        for bucket in left:  # their parameters get no gradient
            self._sum(bucket)
        return self._now - begin

    def over(self, forward_s: float, backward_s: float, optimizer_states: int) -> Timeline:
        """Returns the timeline of the simulated passes, with the optimizer's step."""
        update_s = sum(
            self._machine.along_s("all_gather", bucket.dims, self._mesh, bucket.nbytes)
            for bucket in self._buckets
            if bucket.sharded and not bucket.regathered
        )
        own = sum(each.own_bytes(0)[0] for each in self._held.values())
        update_s += (3 + 2 * optimizer_states) * own / self._machine.memory_bytes_per_s
        exposed_s = max(0.0, self._free - self._now)
        return Timeline(
            forward_s, backward_s, exposed_s, self._gradients_s, update_s, self._gathers_s, self._waited_s
        )

    def _numbers(self) -> dict[int, int]:
        values = {node.name: node.outputs[0] for node in self._graph.nodes if node.name in self._held}
        return {values[name]: number for number, each in enumerate(self._gathers) for name in each.nodes}

    def _last_gradients(self) -> dict[int, set[str]]:
        """Returns, by operator, the parameters whose gradients are ready after its backward pass."""
        first: dict[str, int] = {}
        for index, node in enumerate(self._graph.nodes):
            for value in node.inputs if node.kind != FAN_OUT else ():
                maker = self._graph.source(value)
                if maker.name in self._held:
                    first.setdefault(maker.name, index)
        found: dict[int, set[str]] = {}
        for name, index in first.items():
            found.setdefault(index, set()).add(name)
        return found

    def _gather(self, numbers: Sequence[int], order: Sequence[int]) -> None:
        """Waits for buckets that are needed now; after each starts to gather the next one."""
        for number in numbers:
            self._set_out(number)
            self._waited_s += max(0.0, self._coming[number] - self._now)
            self._now = max(self._now, self._coming[number])
            for following in order[order.index(number) + 1 :][:1]:
                self._set_out(following)

    def _set_out(self, number: int) -> None:
        if number not in self._coming:
            bucket = self._gathers[number]
            seconds = self._machine.along_s("all_gather", bucket.dims, self._mesh, bucket.nbytes)
            self._coming[number] = self._free = max(self._free, self._now) + seconds
            self._gathers_s += seconds

    def _sum(self, bucket: PlannedBucket) -> None:
        kind = "reduce_scatter" if bucket.sharded else "all_reduce"
        seconds = self._machine.along_s(kind, bucket.dims, self._mesh, bucket.sent_nbytes)
        self._free = max(self._free, self._now) + seconds
        self._gradients_s += seconds
