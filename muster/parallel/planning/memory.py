"""Simulates a step's memory on one rank, with what is kept for the backward pass. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from muster.parallel.planning.buckets import (
    PlannedBucket,
    edge_layouts,
    gradient_buckets,
    parameter_shards,
    read_again,
)
from muster.parallel.planning.graph import FAN_OUT, Graph, Node, TensorValue
from muster.parallel.planning.kept import (
    SAVES_INPUTS,
    SAVES_NOTHING,
    SAVES_OUTPUTS,
    cast_width,
    casts_weight,
    is_view,
    turns,
)
from muster.parallel.planning.layouts import Mesh, Placements, parts
from muster.parallel.planning.precision import (
    FUSED_FROM,
    RUNS_LOW,
    is_plain_loss,
    reads_alone,
)
from muster.parallel.planning.problem import Problem, State
from muster.parallel.planning.recomputed import Layer, backward_order, chosen_layers


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        held: parameters, buffers and optimizer state, which are held all the time.
        kept: what the forward pass keeps for the backward pass, at its end.
        peak: the maximum during forward and backward pass, gradients included.
    """

    held: int
    kept: int
    peak: int


def step_memory(graph: Graph, states: Sequence[State], mesh: Mesh, *, optimizer_states: int = 2) -> Memory:
    """Simulates a step, and sums the live memory at each moment.

    Gradients begin as None. Workspaces of operators are not counted, nor temporary memory of the optimizer's
    step.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        states: the chosen state of each node.
        mesh: the mesh's sizes.
        optimizer_states: the number of tensors that the optimizer keeps per parameter.
    """
    return _Play(graph, states, mesh).play(optimizer_states)


def peak_of(problem: Problem, optimizer_states: int) -> Callable[[Sequence[int]], float]:
    """Returns a function from a choice to its peak memory in bytes."""

    def peak(choice: Sequence[int]) -> float:
        states = problem.chosen(choice)
        return step_memory(problem.graph, states, problem.mesh, optimizer_states=optimizer_states).peak

    return peak


class _Play:
    """Simulates one step. A storage is named for the node that made it; a view has its source's storage."""

    def __init__(self, graph: Graph, states: Sequence[State], mesh: Mesh) -> None:
        self.graph, self.states, self.mesh = graph, states, mesh
        self.last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
        self.storage: dict[int, tuple[str, int]] = {}  # by value
        self.readers: dict[tuple[str, int], int] = {}  # by storage, the number of values with uses to come
        self.turned: set[int] = set()
        self.live: dict[tuple[str, int], int] = {}
        self.saved: dict[int, list[tuple[str, int]]] = {}  # by node, what it keeps for its backward pass
        self.owners: dict[tuple[str, int], int] = {}  # by storage, the number of nodes that keep it
        self.now = self.peak = 0
        self.shards = parameter_shards(graph, states, mesh)
        self.buckets = gradient_buckets(list(self.shards.values()))
        self.value_of = {node.name: node.outputs[0] for node in graph.nodes if node.name in self.shards}
        self._gathers = [bucket for bucket in self.buckets if bucket.regathered]
        self._gathered_by = {  # by value of a parameter that is held as shards, its bucket's number
            self.value_of[name]: number for number, each in enumerate(self._gathers) for name in each.nodes
        }
        self._packed: list[tuple[int, tuple[str, ...]]] = []  # buckets whose reduce_scatter is in progress
        self.layers = chosen_layers(graph, [state.recomputed for state in states])
        self._begins = {layer.first: layer for layer in self.layers}
        inside = [graph.nodes[index] for layer in self.layers for index in layer.indices]
        self._last_inside = {v: graph.values[v].node for node in inside for v in node.outputs}
        for layer in self.layers:  # by value that a layer makes, the last of its operators that reads it
            for index in layer.indices:
                own = (v for v in graph.nodes[index].inputs if graph.values[v].node >= layer.first)
                self._last_inside.update(dict.fromkeys(own, index))
        self._given: dict[int, list[tuple[str, int]]] = {}  # by first node of a layer, the inputs it keeps
        self._mark = ""  # the suffix of recomputed storages

    def play(self, optimizer_states: int) -> Memory:
        held = self._held(optimizer_states)
        self.now = self.peak = held
        order = self._order_of_gathers()
        for index, node in enumerate(self.graph.nodes):
            for value in node.inputs:
                if value in self._gathered_by and value not in self.storage:
                    self._gather(self._gathered_by[value], order)
            if index in self._begins:
                self._keep_given(self._begins[index])
            self._forward(index, node)
            for value in {v for v in node.inputs if self.last_use[v] == index}:
                self._leave(value)
        kept = self.now - held
        self._backward()
        return Memory(held, kept, self.peak)

    def _held(self, optimizer_states: int) -> int:
        total, held = 0, self.shards
        for node, state in zip(self.graph.nodes, self.states, strict=True):
            if node.kind in ("parameter", "buffer") and not state.regathered:
                total += self._local(self.graph.values[node.outputs[0]], state.outs[0])
            if node.name in held:
                own, kept = held[node.name].own_bytes(optimizer_states)
                total += kept + (own if held[node.name].sharded else 0)
        return total

    def _local(self, value: TensorValue, layout: Placements) -> int:
        return value.nbytes // parts(layout, self.mesh)

    def _take(self, name: tuple[str, int], nbytes: int) -> None:
        self.live[name] = self.live.get(name, 0) + nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _drop(self, name: tuple[str, int]) -> None:
        self.now -= self.live.pop(name, 0)

    def _name(self, value: int, name: tuple[str, int]) -> None:
        """Notes that a value is in this storage."""
        self.storage[value] = name
        if value in self.last_use:
            self.readers[name] = self.readers.get(name, 0) + 1

    def _leave(self, value: int) -> None:
        """Ends a value after its last use; frees its storage unless another view or a node still needs it."""
        name = self.storage.get(value)
        if name is None:
            return
        self.readers[name] -= 1
        if not self.readers[name] and not self.owners.get(name):
            self._drop(name)

    # ------------------------------------------------------------ parameters that are gathered

    def _order_of_gathers(self) -> list[int]:
        read = (self._gathered_by.get(value) for node in self.graph.nodes for value in node.inputs)
        return list(dict.fromkeys(number for number in read if number is not None))

    def _gather(self, number: int, order: Sequence[int]) -> None:
        """Gathers a bucket's parameters into memory of their own, and starts to gather the next bucket."""
        for name in self._arrive(number, ""):
            self._name(self.value_of[name], (name, 0))
        self._set_out(number, order)

    def _arrive(self, number: int, mark: str) -> tuple[str, ...]:
        bucket = self._gathers[number]
        if len(bucket.nodes) == 1:  # it is gathered into its own memory
            self._drop(("rows", number))
        elif ("rows", number) not in self.live:
            self._take(("rows", number), bucket.nbytes)
        for name in bucket.nodes:
            self._take((name + mark, 0), self.shards[name].numel * self.shards[name].itemsize)
        self._drop(("rows", number))
        return bucket.nodes

    def _set_out(self, number: int, order: Sequence[int]) -> None:
        for following in order[order.index(number) + 1 :][:1]:
            self._take(("rows", following), self._gathers[following].nbytes)

    def _is_gathered(self, index: int, position: int) -> bool:
        """Whether an input is a gathered parameter, or a view of one."""
        before, after, _, _ = edge_layouts(self.graph, self.states, index, position)
        name = self.storage.get(self.graph.nodes[index].inputs[position], ("", 0))[0]
        return before == after and self.value_of.get(name) in self._gathered_by

    # ------------------------------------------------------------ the forward pass

    def _forward(self, index: int, node: Node) -> None:
        state = self.states[index]
        moved: dict[int, tuple[str, int]] = {}  # by position, copies in another layout
        for position, value_index in enumerate(node.inputs):
            before, after, _, _ = edge_layouts(self.graph, self.states, index, position)
            if before != after:
                moved[position] = (f"{node.name}<{self._mark}", position)
                self._take(moved[position], self._local(self.graph.values[value_index], after))
        view = is_view(self.graph, node, self.turned)
        for number, value_index in enumerate(node.outputs):
            if node.kind in ("parameter", "buffer", "input"):
                continue
            if view:
                source = moved.get(0, self.storage.get(node.inputs[0]))
                if source is not None:
                    self._name(value_index, source)
                if turns(node, self.turned):
                    self.turned.add(value_index)
                continue
            name = node.name + self._mark, number
            self._name(value_index, name)
            self._take(name, self._local(self.graph.values[value_index], state.outs[number]))
        if not state.recomputed or self._mark:
            self._save(index, node, moved)
        for position, name in moved.items():
            if not self.owners.get(name) and not (view and position == 0):
                self._drop(name)

    def _keep_given(self, layer: Layer) -> None:
        """Keeps a recomputed layer's inputs, except parameters that are gathered again."""
        given = {self.storage[value] for value in layer.given if value in self.storage}
        self._given[layer.first] = [
            name for name in given if self.value_of.get(name[0]) not in self._gathered_by
        ]
        self._own(self._given[layer.first])

    def _own(self, names: Sequence[tuple[str, int]]) -> None:
        for name in names:
            self.owners[name] = self.owners.get(name, 0) + 1

    def _disown(self, names: Sequence[tuple[str, int]]) -> None:
        for name in names:
            self.owners[name] -= 1
            if not self.owners[name]:
                self._drop(name)

    def _again(self, index: int) -> None:
        """Recomputes an operator of a layer, and frees what the layer neither reads nor keeps any more."""
        node = self.graph.nodes[index]
        self._mark = " again"
        self._forward(index, node)
        self._mark = ""
        for value in {*node.inputs, *node.outputs}:
            if self._last_inside.get(value) == index and value in self.last_use:
                self._leave(value)

    def _is_fused(self, index: int) -> bool:
        """Whether an operator is a fused cross entropy, which keeps nothing but its scores."""
        node, state = self.graph.nodes[index], self.states[index]
        if node.op != "cross_entropy_loss":
            return False
        scores = self.graph.values[node.inputs[0]]
        many = scores.numel / parts(state.ins[0], self.mesh) >= FUSED_FROM
        return "v" in state.modes or (many and is_plain_loss(self.graph, node))

    def _save(self, index: int, node: Node, moved: dict[int, tuple[str, int]]) -> None:
        graph = self.graph
        if node.kind != "call" or not any(graph.values[v].needs_grad for v in node.outputs):
            return
        keeps: list[tuple[str, int]] = []
        known = node.op in SAVES_INPUTS | SAVES_OUTPUTS | SAVES_NOTHING
        fused = self._is_fused(index)
        synchronised = node.op == "batch_norm" and "b" in self.states[index].modes
        if (node.op in SAVES_INPUTS and not synchronised) or not known or fused:
            for position, value in enumerate(node.inputs):
                single = node.op in ("mul", "div") and len(node.inputs) == 1
                name = moved.get(position, self.storage.get(value))
                cast = self._cast(index, position)
                gathered = self._is_gathered(index, position)
                if cast is not None and gathered and casts_weight(graph, node, position):
                    self._drop(cast)
                elif cast is not None:
                    keeps.append(cast)
                elif name is not None and not single and not gathered:
                    keeps.append(name)
        if node.op in SAVES_OUTPUTS or not known:
            keeps += [self.storage[value] for value in node.outputs]
        extra = self._extra(index, node)
        if extra:
            self._take((f"{node.name}+", 0), extra)
            keeps.append((f"{node.name}+", 0))
        self.saved[index] = list(dict.fromkeys(keeps))
        self._own(self.saved[index])

    def _cast(self, index: int, position: int) -> tuple[str, int] | None:
        """Returns the storage of an input's copy in the operator's precision; None if it is not cast.

        All readers of a weight share one copy.
        """
        node, value = self.graph.nodes[index], self.graph.values[self.graph.nodes[index].inputs[position]]
        width = cast_width(self.graph, node, position)
        if not width:
            return None
        maker = self.graph.source(node.inputs[position])
        name = (f"{maker.name if maker.kind == 'parameter' else node.name}~", position)
        if name not in self.live:
            self._take(name, self._local(value, self.states[index].ins[position]) * width // value.itemsize)
        return name

    def _extra(self, index: int, node: Node) -> int:
        """Returns the bytes of what an operator makes only for its backward pass."""
        state, values = self.states[index], self.graph.values
        own = self._local(values[node.inputs[0]], state.ins[0]) if node.inputs else 0
        out = self._local(values[node.outputs[0]], state.outs[0])
        if node.op == "cross_entropy_loss" and not self._is_fused(index):
            return own  # the logarithms of the probabilities
        if node.op == "batch_norm" and "b" in state.modes:
            return own  # the normalised input
        if node.op == "dropout" and node.draws:
            return out  # the mask
        results = out // max(1, values[node.outputs[0]].itemsize)
        if node.op == "layer_norm":
            width: int = math.prod(node.args[1])
            return results // width * 8  # mean and deviation of each row, in float32
        if node.op == "scaled_dot_product_attention":
            return results // values[node.outputs[0]].shape[-1] * 4  # each query's sum of exponentials
        if node.op.startswith("max_pool"):
            return results * 8  # indices
        return 0

    # ------------------------------------------------------------ the backward pass

    def _backward(self) -> None:
        graph = self.graph
        buckets = [(set(bucket.nodes), bucket) for bucket in self.buckets]
        again, order = self._gathers_again()
        root: dict[int, int] = {}  # by value behind a fan-out node, the value before it
        left: dict[int, int] = {}  # by value, the number of users whose gradient is still missing
        for node in graph.nodes:
            if node.kind == FAN_OUT:
                root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
                continue
            for position, value in enumerate(node.inputs):
                source = root.get(value, value)
                left[source] = left.get(source, 0) + graph.edge_needs_grad(node, position)
        for place, (index, second) in enumerate(backward_order(graph, self.layers)):
            node = graph.nodes[index]
            for number in again.get(place, ()):
                self._arrive(number, " again")
                self._set_out(number, order)
            if second:
                self._again(index)
                continue
            if node.kind in ("call", "output"):
                self._differentiate(index, root, left, buckets)
            self._disown(self._given.get(index, ()))

    def _differentiate(
        self,
        index: int,
        root: Mapping[int, int],
        left: dict[int, int],
        buckets: list[tuple[set[str], PlannedBucket]],
    ) -> None:
        """Simulates the backward pass of one operator."""
        graph, node = self.graph, self.graph.nodes[index]
        for position, value in enumerate(node.inputs):
            if self._casts_again(index, position):
                cast = self._cast(index, position)
                if cast is not None:
                    self._drop(cast)
            if graph.edge_needs_grad(node, position):
                source = root.get(value, value)
                self._gradient(index, position, source)
                left[source] -= 1
                maker = graph.nodes[graph.values[source].node]
                if maker.kind == "parameter" and not left[source]:
                    self._drop((f"{maker.name} again", 0))
                    self._arrived(maker.name, buckets)
        for value in node.outputs:
            self._drop(("grad", value))
        self._disown(self.saved.get(index, ()))

    def _gradient(self, index: int, position: int, value: int) -> None:
        """Adds the gradient that one user of a value makes."""
        node, state = self.graph.nodes[index], self.states[index]
        handed_on = node.op in ("add", "sub") or is_view(self.graph, node, self.turned)
        scores = self.storage.get(value)
        given, maker = state.in_grads[position], self.graph.values[value].node
        place = self.graph.nodes[maker].outputs.index(value)
        wanted = self.states[maker].out_grads[place]
        nbytes = self._local(self.graph.values[value], wanted)
        moved = given != wanted and parts(given, self.mesh) != parts(wanted, self.mesh)
        if moved:
            self._take(("moved", value), self._local(self.graph.values[value], given))
        name = ("grad", value)
        width = self.graph.values[node.outputs[0]].itemsize if node.outputs else 0
        itemsize = self.graph.values[value].itemsize
        of_weight = self.graph.nodes[self.graph.values[value].node].kind == "parameter"
        if node.op in RUNS_LOW and itemsize > width and not of_weight:  # made in low precision, then cast
            self._take(("low", value), nbytes * width // itemsize)
        if name in self.live:  # added to the gradient so far: for a moment both are live
            if not handed_on:
                self._take(("sum", value), nbytes)
                self._drop(("sum", value))
        elif handed_on and not moved and ("grad", node.outputs[0]) in self.live:
            self.live[name] = self.live.pop(("grad", node.outputs[0]))
        elif scores is not None and not moved and self._is_fused(index) and reads_alone(self.graph, node):
            self.live[name] = self.live.pop(scores, 0)  # it takes the scores' memory
        elif node.kind != "output":
            self._take(name, nbytes)
        self._drop(("low", value))
        self._drop(("moved", value))

    def _gathers_again(self) -> tuple[dict[int, list[int]], list[int]]:
        """Returns, by place in the backward pass, the buckets that are first read there, and their order."""
        read = read_again(
            self.graph, self.states, self.mesh, [name for bucket in self._gathers for name in bucket.nodes]
        )
        first = {
            number: min(read[name] for name in bucket.nodes if name in read)
            for number, bucket in enumerate(self._gathers)
            if any(name in read for name in bucket.nodes)
        }
        order = sorted(first, key=lambda number: first[number])
        again: dict[int, list[int]] = {}
        for number in order:
            again.setdefault(first[number], []).append(number)
        return again, order

    def _casts_again(self, index: int, position: int) -> bool:
        node = self.graph.nodes[index]
        return (
            node.kind == "call"
            and casts_weight(self.graph, node, position)
            and (self._is_gathered(index, position))
        )

    def _arrived(self, name: str, buckets: list[tuple[set[str], PlannedBucket]]) -> None:
        """Notes a parameter's gradient, and packs the buckets that are complete, in order.

        A bucket is a copy of its gradients. If its parameters are held as shards, the previous bucket's
        reduce_scatter is complete by then, and leaves only this rank's shards of the gradients.
        """
        for missing, _ in buckets:
            missing.discard(name)
        while buckets and not buckets[0][0]:
            _, bucket = buckets.pop(0)
            each = [self.shards[member] for member in bucket.nodes]
            self._take(("bucket", len(buckets)), sum(one.numel * one.itemsize for one in each))
            if not bucket.regathered:
                continue
            for number, members in self._packed:
                self._drop(("bucket", number))
                for member in members:
                    self._drop(("grad", self.value_of[member]))
                    self._take(("share", self.value_of[member]), self.shards[member].own_bytes(0)[0])
            self._packed = [(len(buckets), bucket.nodes)]
