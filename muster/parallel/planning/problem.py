"""The search problem: the states of each node, their costs, and the costs of redistribution between them.

The total is a sum over nodes and edges, so ``search`` finds its minimum exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muster.parallel.planning.axes import WHOLE, Mode
from muster.parallel.planning.costs import Hardware, OperatorTimes, inner_collectives
from muster.parallel.planning.graph import FAN_OUT, Graph, Node
from muster.parallel.planning.kept import KeptPart, casts_again, kept_bytes, kept_parts
from muster.parallel.planning.layouts import (
    PARTIAL,
    REPLICATE,
    Mesh,
    Placement,
    Placements,
    coordinates,
    fits,
    layout_text,
    parts,
    plan_move,
)
from muster.parallel.planning.recomputed import RECOMPUTED, layers_of
from muster.parallel.planning.rules import modes_of

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class State:
    """One way to run a node, or to hold a parameter.

    Attributes:
        key: the state's name, unique among the node's states and the same in every process: axes or layouts.
        modes: for an operator, the axis that each mesh dimension splits.
        ins: the inputs' layouts.
        in_grads: the layouts of the inputs' gradients.
        outs: the outputs' layouts.
        out_grads: the layouts of the outputs' gradients.
        seconds: the predicted time in a step.
        nbytes: the memory on each rank at the end of the forward pass, in bytes.
        grad_nbytes: for a parameter, the memory of its gradient at the end of the backward pass, in bytes.
        sharded: whether a parameter's update is sharded over the ranks that hold the same part (ZeRO-1).
        regathered: whether those ranks hold only their shards of the part, and gather it when it is used
            (ZeRO-3).
        recomputed: whether an operator's activations are recomputed in the backward pass instead of kept.
    """

    key: str
    modes: tuple[str, ...]
    ins: tuple[Placements, ...]
    in_grads: tuple[Placements, ...]
    outs: tuple[Placements, ...]
    out_grads: tuple[Placements, ...]
    seconds: float
    nbytes: float
    sharded: bool = False
    grad_nbytes: float = 0.0
    regathered: bool = False
    recomputed: bool = False


ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Options:
    """What users may choose about a plan.

    Attributes:
        inputs: the layout of each input, in order.
        outputs: the layout of each output, in order.
        optimizer_states: the number of tensors that the optimizer keeps per parameter: 2 for Adam, 1 for
            momentum.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
        shard_updates: whether updates may be sharded (ZeRO-1); with ``ALWAYS`` they are, wherever possible.
        shard_parameters: whether parameters may be held as shards and gathered when they are used (ZeRO-3),
            provided that updates may be sharded; with ``ALWAYS`` they are, wherever possible.
        checkpoint_activations: whether layers may be recomputed in the backward pass; with ``ALWAYS`` all
            layers are that keep more bytes than their inputs have.
        recomputed: the names of the layers that are recomputed.
        whole_parameters: whether every rank holds all parameters, as in data parallelism.
        communication_only: whether only communication counts as time, as in sharding propagation.
        hosts: the host of each rank, if two hosts must hold every part of the state; else empty.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    optimizer_states: int = 2
    local_norm: bool = False
    shard_updates: bool | str = True
    shard_parameters: bool | str = True
    checkpoint_activations: bool | str = True
    recomputed: tuple[str, ...] = ()
    whole_parameters: bool = False
    communication_only: bool = False
    hosts: tuple[str, ...] = ()


Pin = Callable[[Node, State], bool]


@dataclass(slots=True)
class Problem:
    """States of each node, and a matrix of seconds for each edge (producer, consumer)."""

    graph: Graph
    mesh: Mesh
    machine: Hardware
    states: list[list[State]] = field(default_factory=list)
    edges: list[tuple[int, int, Matrix]] = field(default_factory=list)
    without_rule: list[str] = field(default_factory=list)

    def seconds(self, choice: Sequence[int]) -> float:
        """Predicted seconds of a step."""
        total = sum(states[c].seconds for states, c in zip(self.states, choice, strict=True))
        return float(total + sum(matrix[choice[u], choice[v]] for u, v, matrix in self.edges))

    def nbytes(self, choice: Sequence[int]) -> float:
        """Returns each rank's memory in bytes: the larger of both passes' ends, which is at most the peak."""
        first, last = self.nbytes_at_ends(choice)
        return max(first, last)

    def nbytes_at_ends(self, choice: Sequence[int]) -> tuple[float, float]:
        """Returns each rank's memory in bytes at the end of the forward and of the backward pass."""
        first = last = 0.0
        for node, states, c in zip(self.graph.nodes, self.states, choice, strict=True):
            first += states[c].nbytes
            if node.kind in ("parameter", "buffer"):
                last += states[c].nbytes + states[c].grad_nbytes
        return first, last

    def chosen(self, choice: Sequence[int]) -> list[State]:
        """Returns the states of a choice."""
        return [states[c] for states, c in zip(self.states, choice, strict=True)]

    def choice_of(self, keys: Mapping[str, str]) -> list[int]:
        """Returns the choice of the states with these keys, which are given by node.

        Raises:
            KeyError: a node is missing in ``keys``, or has no such state; with a sentence about the first.
        """
        choice = []
        for node, states in zip(self.graph.nodes, self.states, strict=True):
            if node.name not in keys:
                raise KeyError(f"it has no layout of {node.name}")
            found = [i for i, state in enumerate(states) if state.key == keys[node.name]]
            if not found:
                raise KeyError(f"{node.name} cannot be split as {keys[node.name]!r}")
            choice.append(found[0])
        return choice


def build(
    graph: Graph,
    mesh: Mesh,
    machine: Hardware,
    options: Options,
    pins: Mapping[str, Pin] | None = None,
    *,
    limit: float = math.inf,
) -> Problem:
    """Builds the states and edges of a graph on a mesh.

    Args:
        graph: with fan-out nodes.
        mesh: sizes.
        machine: what things cost.
        options: see there.
        pins: the states that may be chosen, by node.
        limit: bytes of a rank: an operator whose results alone are more is left out, if it has other states.

    Raises:
        KeyError: a pinned node has no such state on this mesh.
    """
    problem, times = Problem(graph, mesh, machine), OperatorTimes(graph, mesh, machine)
    inputs, outputs = iter(options.inputs), iter(options.outputs)
    layers = [layer for layer in layers_of(graph) if layer.name in options.recomputed]
    twice = {index for layer in layers for index in layer.indices}
    used, kept, casts = _dims_used(graph), kept_parts(graph, layers), casts_again(graph, layers)
    alike: dict[str, list[State]] = {}  # layers come again and again
    for index, node in enumerate(graph.nodes):
        if node.kind == "input":
            layout = next(inputs)
            states = [State(layout_text(layout), (), (), (), (layout,), (layout,), 0.0, 0.0)]
        elif node.kind in ("parameter", "buffer"):
            value, dims = graph.values[node.outputs[0]], used.get(node.outputs[0], set())
            cast = casts.get(node.name, 0.0)
            of_value = (value.shape, value.itemsize, value.needs_grad, node.layerwise)
            memo = f"{node.kind} {of_value} {sorted(dims)} {cast}"
            if memo not in alike:
                alike[memo] = _holdings(problem, node, options, dims, cast)
            states = alike[memo]
        elif node.kind == "output":
            wanted = tuple(next(outputs) for _ in node.inputs)
            states = [State("output", (), wanted, wanted, (), (), 0.0, 0.0)]
        else:
            modes, known = modes_of(graph, node)
            if not known and not node.op.endswith("_"):
                problem.without_rule.append(node.name)
            shapes = [(graph.values[v].shape, graph.values[v].dtype) for v in (*node.inputs, *node.outputs)]
            grad = [graph.values[v].needs_grad for v in node.outputs]
            place = (times.traits(node), kept[index], index in twice)
            memo = f"{node.op} {node.kind} {modes} {shapes} {grad} {node.args} {node.kwargs} {place}"
            if memo not in alike:
                alike[memo] = ways_of(
                    problem, times, node, modes, options, kept[index], recomputed=index in twice
                )
                alike[memo] = _within(graph, node, alike[memo], mesh, limit)
            states = alike[memo]
        if pins and node.name in pins:
            states = [state for state in states if pins[node.name](node, state)]
            if not states:
                raise KeyError(node.name)
        problem.states.append(states)
    _connect(problem)
    return problem


def _within(graph: Graph, node: Node, states: Sequence[State], mesh: Mesh, limit: float) -> list[State]:
    """The states whose results fit into memory; all, if none do."""

    def nbytes(state: State) -> float:
        made = zip(node.outputs, state.outs, strict=True)
        return sum(graph.values[value].nbytes / parts(layout, mesh) for value, layout in made)

    return [state for state in states if nbytes(state) <= limit] or list(states)


def _dims_used(graph: Graph) -> dict[int, set[int]]:
    """Returns, by value, the dimensions along which a consumer could use it split."""
    used: dict[int, set[int]] = {}
    for node in reversed(graph.nodes):
        if node.kind not in ("call", FAN_OUT):
            continue
        modes, _ = modes_of(graph, node)
        for position, value in enumerate(node.inputs):
            wanted = used.setdefault(value, set())
            for mode in modes:
                entry = mode.ins[position]
                passes = node.kind != FAN_OUT or entry in used.get(node.outputs[0], set())
                if isinstance(entry, int) and passes:
                    wanted.add(entry)
    return used


def ways_of(
    problem: Problem,
    times: OperatorTimes,
    node: Node,
    modes: Sequence[Mode],
    options: Options,
    kept: Sequence[KeptPart],
    *,
    recomputed: bool,
) -> list[State]:
    """Returns an operator's states: one per assignment of axes to mesh dimensions that fits its sizes."""
    graph, mesh, machine = problem.graph, problem.mesh, problem.machine
    ins = [graph.values[v].shape for v in node.inputs]
    outs = [graph.values[v].shape for v in node.outputs]
    found = []
    for combination in itertools.product(modes, repeat=len(mesh)):
        names = tuple(mode.name for mode in combination)
        sizes = {mode.name: mode.size for mode in combination if mode.size}
        if any(
            size % math.prod(n for n, name in zip(mesh, names, strict=True) if name == axis)
            for axis, size in sizes.items()
        ):
            continue

        def layouts(entries: Sequence[Sequence[Placement]], count: int) -> tuple[Placements, ...]:
            return tuple(tuple(each[i] for each in entries) for i in range(count))

        state_ins = layouts([mode.ins for mode in combination], len(ins))
        state_outs = layouts([mode.outs for mode in combination], len(outs))
        if not all(fits(a, mesh, s) for a, s in zip(state_ins, ins, strict=True)):
            continue
        if not all(fits(a, mesh, s) for a, s in zip(state_outs, outs, strict=True)):
            continue
        divided = math.prod(n for n, mode in zip(mesh, combination, strict=True) if mode.size)
        work = times.seconds(node, state_ins, state_outs, divided)
        runs = 1 + recomputed
        seconds = 0.0 if options.communication_only else runs * work.forward + work.backward
        for each in inner_collectives(graph, node, names, state_ins, mesh, local_norm=options.local_norm):
            times_sent = runs if each.phase == "forward" else 1
            seconds += times_sent * machine.along_s(each.kind, each.dims, mesh, each.nbytes)
        found.append(
            State(
                ",".join(names) + RECOMPUTED * recomputed,
                names,
                state_ins,
                layouts([mode.in_grads for mode in combination], len(ins)),
                state_outs,
                layouts([mode.out_grads for mode in combination], len(outs)),
                seconds,
                kept_bytes(kept, state_ins, state_outs, mesh),
                recomputed=recomputed,
            )
        )
    return found


def _holdings(problem: Problem, node: Node, options: Options, dims: set[int], cast: float) -> list[State]:
    """Returns the states in which a parameter or buffer can be held; ``cast`` is its :func:`casts_again`."""
    graph, mesh, machine = problem.graph, problem.mesh, problem.machine
    value = graph.values[node.outputs[0]]
    entries: list[Placement] = [REPLICATE]
    if not (options.whole_parameters or node.layerwise):
        entries += sorted(dims)
    found = []
    for layout in itertools.product(entries, repeat=len(mesh)):
        if not fits(layout, mesh, value.shape):
            continue
        local = value.nbytes / parts(layout, mesh)
        if not value.needs_grad:
            found.append(State(layout_text(layout), (), (), (), (layout,), (layout,), 0.0, local))
            continue
        choices = [(REPLICATE, PARTIAL) if entry == REPLICATE else (entry,) for entry in layout]
        for grad in itertools.product(*choices):
            ranks = math.prod(n for n, entry in zip(mesh, grad, strict=True) if entry == PARTIAL)
            hosts = machine.hosts_along([d for d, entry in enumerate(grad) if entry == PARTIAL], mesh)
            if node.layerwise:
                ranks = 1
            traffic = (3 + 2 * options.optimizer_states) * local / machine.memory_bytes_per_s
            # A scalar is not sharded: flattened, its optimizer state could not be told from a step count.
            divisible = ranks > 1 and bool(value.shape)
            ways = [(False, False)]
            ways += [(True, False)] if divisible and options.shard_updates else []
            also = options.shard_parameters == ALWAYS or (options.shard_parameters and options.shard_updates)
            ways += [(True, True)] if divisible and also else []
            possible = []
            for sharded, regathered in ways:
                apart = [
                    isinstance(entry, int) or (sharded and of_grad == PARTIAL)
                    for entry, of_grad in zip(layout, grad, strict=True)
                ]
                if options.hosts and not _on_two_hosts(apart, mesh, options.hosts):
                    continue
                update = 0.0 if options.communication_only else traffic / (ranks if sharded else 1)
                own = local / ranks if sharded else local
                memory = (0.0 if regathered else local) + options.optimizer_states * own
                memory += own if sharded else 0.0
                grads = local * (2 if ranks > 1 else 1)  # with its part of a bucket
                if regathered:
                    memory -= local * cast
                    grads = own
                seconds = update + machine.gradients_s(
                    ranks, local, sharded=sharded, regathered=regathered, hosts=hosts
                )
                key = f"{layout_text(layout)}|{layout_text(grad)}"
                key += "|regathered" if regathered else "|sharded" if sharded else ""
                layouts = (layout,), (grad,)
                possible.append(State(key, (), (), (), *layouts, seconds, memory, sharded, grads, regathered))
            found += _asked_for(possible, options)
    return found


def _asked_for(possible: Sequence[State], options: Options) -> Sequence[State]:
    """Returns the states that remain after the user's demands for sharding (``ALWAYS``)."""
    if options.shard_parameters == ALWAYS and any(state.regathered for state in possible):
        return [state for state in possible if state.regathered]
    if options.shard_updates == ALWAYS and any(state.sharded for state in possible):
        return [state for state in possible if state.sharded]
    return possible


def _on_two_hosts(apart: Sequence[bool], mesh: Mesh, hosts: Sequence[str]) -> bool:
    """Whether each part has holders on two hosts.

    Args:
        apart: for each mesh dimension, whether ranks along it hold different parts.
        mesh: the mesh's sizes.
        hosts: the host of each rank.
    """
    holders: dict[tuple[int, ...], set[str]] = {}
    for rank, host in enumerate(hosts):
        place = coordinates(rank, mesh)
        part = tuple(index for index, differs in zip(place, apart, strict=True) if differs)
        holders.setdefault(part, set()).add(host)
    return all(len(on) > 1 for on in holders.values())


def _connect(problem: Problem) -> None:
    graph, mesh, machine = problem.graph, problem.mesh, problem.machine
    seconds: dict[tuple[object, ...], float] = {}
    matrices: dict[tuple[object, ...], Matrix] = {}
    known: dict[tuple[object, ...], Matrix] = {}  # by which states these are, for layers that come again

    def move(source: Placements, target: Placements, shape: tuple[int, ...], nbytes: int) -> float:
        if source == target:
            return 0.0
        memo = (source, target, shape, nbytes)
        if memo not in seconds:
            steps = plan_move(source, target, mesh, shape)
            seconds[memo] = math.inf if steps is None else machine.move_s(steps, nbytes, mesh)
        return seconds[memo]

    for consumer, node in enumerate(graph.nodes):
        for position, index in enumerate(node.inputs):
            value = graph.values[index]
            producer = value.node
            place = graph.nodes[producer].outputs.index(index)
            fixed = graph.nodes[producer].mutated
            grad = graph.edge_needs_grad(node, position)
            sources, targets = problem.states[producer], problem.states[consumer]
            same = (id(sources), place, id(targets), position, value.shape, value.itemsize, grad, fixed)
            if same in known:
                problem.edges.append((producer, consumer, known[same]))
                continue
            before = tuple((s.outs[place], s.out_grads[place]) for s in problem.states[producer])
            after = tuple((s.ins[position], s.in_grads[position]) for s in problem.states[consumer])
            runs = 1 + problem.states[consumer][0].recomputed
            memo = (before, after, value.shape, value.itemsize, grad, value.floating, fixed, runs)
            if memo not in matrices:
                rows, columns = list(dict.fromkeys(before)), list(dict.fromkeys(after))
                small = np.zeros((len(rows), len(columns)))
                for i, (out, out_grad) in enumerate(rows):
                    for j, (want, want_grad) in enumerate(columns):
                        cost = runs * move(out, want, value.shape, value.nbytes)
                        if (fixed and out != want) or (not value.floating and PARTIAL in want):
                            cost = math.inf
                        if grad:
                            cost += move(want_grad, out_grad, value.shape, value.nbytes)
                        small[i, j] = cost
                index_a = {pair: i for i, pair in enumerate(rows)}
                index_b = {pair: j for j, pair in enumerate(columns)}
                matrices[memo] = small[np.ix_([index_a[p] for p in before], [index_b[p] for p in after])]
            known[same] = matrices[memo]
            problem.edges.append((producer, consumer, matrices[memo]))


def whole_mode(state: State) -> bool:
    """Whether every rank computes the whole operator."""
    return bool(state.modes) and all(mode in (WHOLE, "grad", "sum") for mode in state.modes)
