"""When each part of a step runs: gradients travel beside the backward pass, all else waits its turn. Pure."""

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
        forward_s: of the forward pass, with what it waits for.
        backward_s: of the backward pass, with what it waits for and what it computes again.
        exposed_s: how long sums of gradients go on when the backward pass is over.
        gradients_s: of the sums of gradients themselves.
        update_s: of the optimizer, and of gathering parameters whose update alone is divided.
        gathers_s: of gathering parameters that are whole only while they are computed with.
        waited_s: how long both passes wait for these; part of them.
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
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.exposed_s + self.update_s

    @property
    def hidden(self) -> float:
        """The share of the sums of gradients that the backward pass hides, 0 to 1."""
        return 1 - self.exposed_s / self.gradients_s if self.gradients_s else 0.0

    @property
    def gathers_hidden(self) -> float:
        """The share of gathering parameters that computing hides, 0 to 1."""
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
    """Plays a step: operators and moves one after the other, buckets of gradients beside them in their order.

    A bucket starts when its last gradient is there and the one before it is done. Parameters that are
    gathered for their use come on the same way, the next bucket while one is computed with. What computing
    beside a collective costs both is not counted.

    Args:
        graph: with fan-out nodes.
        states: one of each node's.
        mesh: sizes.
        machine: what things cost.
        optimizer_states: tensors that the optimizer keeps for each parameter.
        local_norm: BatchNorm takes the statistics of each rank's own part of the batch.
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
    """The two passes of a step, and what travels beside them, one after the other."""

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
        self._now = self._free = 0.0  # the way is free from then on
        self._coming: dict[int, float] = {}  # by bucket, when it will be there
        self._gathers_s = self._waited_s = self._gradients_s = 0.0

    def forward(self, times: Sequence[float]) -> float:
        """Plays the forward pass; returns how long it takes."""
        number_of = self._numbers()
        readers: dict[int, int] = {}  # by bucket, who reads it first
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
        """Plays the backward pass; returns how long it takes.

        Args:
            times: by node, of its backward pass.
            again: by node, of its forward pass, where that is computed again.
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
        for bucket in left:  # what nobody gives a gradient
            self._sum(bucket)
        return self._now - begin

    def over(self, forward_s: float, backward_s: float, optimizer_states: int) -> Timeline:
        """What came of it, with the optimizer's step."""
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
        """By operator, the parameters that have their gradients when its backward pass is over."""
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
        """Buckets are needed now; behind each, the next one sets out."""
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
