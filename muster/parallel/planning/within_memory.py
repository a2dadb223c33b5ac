"""Searches the best choice on one mesh, with sharded parameters and recomputed layers if need be. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.kept import worth_recomputing
from muster.parallel.planning.layouts import Mesh, parts
from muster.parallel.planning.memory import peak_of, step_memory
from muster.parallel.planning.problem import ALWAYS, Options, Pin, Problem, State, build
from muster.parallel.planning.recomputed import Layer
from muster.parallel.planning.search import Eliminator, Solution, solve


@dataclass(frozen=True, slots=True)
class Searched:
    """The result of a search on one mesh.

    Attributes:
        options: the options, with the layers that are recomputed.
        problem: the problem that was searched with them.
        solution: the best choice; None if none fits.
    """

    options: Options
    problem: Problem
    solution: Solution | None

    @property
    def states(self) -> list[State]:
        """The chosen state of each node; empty if no choice fits."""
        return [] if self.solution is None else self.problem.chosen(self.solution.choice)

    @property
    def seconds(self) -> float:
        """The predicted time of a step; infinite if no choice fits."""
        return float("inf") if self.solution is None else self.solution.seconds


def best_on(
    graph: Graph, mesh: Mesh, machine: Hardware, options: Options, pins: Mapping[str, Pin], limit: float
) -> Searched:
    """Returns the best choice on a mesh within a memory limit.

    Parameters that are gathered for moments, and recomputed activations, are in no sum on which the search
    could put a price. So there is one search with whole and one with sharded parameters. If memory binds,
    both are repeated with all layers recomputed, and then as few layers as fit are: first those that free the
    most bytes per second of recomputation.

    Args:
        graph: the graph of the forward pass, with fan-out nodes.
        mesh: the mesh's sizes.
        machine: the machine's costs.
        options: the mesh's options.
        pins: by node, a function that says which states may be chosen.
        limit: the memory limit of a rank, in bytes.

    Returns:
        The fastest result; if none fits, the last one, which needs the least memory of those searched.

    Raises:
        KeyError: a pinned node has no such state on this mesh.
        TooWide: the graph is too connected for the search.
    """
    found: list[Searched] = []
    kept: dict[bool | str, Problem] = {}
    for each in _holdings(options) if options.checkpoint_activations != ALWAYS else ():
        problem = build(graph, mesh, machine, each, pins)
        kept[each.shard_parameters] = problem
        solution = solve(problem, limit, peak_of(problem, options.optimizer_states))
        found.append(Searched(each, problem, solution))
        if solution is not None and solution.seconds <= solution.bound_s:
            return found[-1]  # the limit does not bind
    bounds = [each.solution.bound_s for each in found if each.solution is not None]
    layers = worth_recomputing(graph) if options.checkpoint_activations else []
    if layers and kept:
        free = kept[found[0].options.shard_parameters]
        bounds.append(free.seconds(Eliminator(free).best()))  # also a bound with some layers recomputed
    for each in _holdings(options) if layers else ():
        every = replace(each, recomputed=tuple(layer.name for layer in layers))
        problem = build(graph, mesh, machine, every, pins)
        solution = solve(problem, limit, peak_of(problem, options.optimizer_states))
        searched = Searched(every, problem, solution)
        if solution is not None and kept:
            searched = _fewer(searched, kept[each.shard_parameters], layers, machine, pins, limit)
        elif solution is not None:
            bounds.append(solution.bound_s)
        found.append(searched)
    best = min(reversed(found), key=lambda each: each.seconds)  # the last one, if none fits
    if best.solution is None:
        return best
    bound = min(best.solution.seconds, *bounds)
    return replace(best, solution=replace(best.solution, bound_s=bound))


def _holdings(options: Options) -> Iterator[Options]:
    """Yields the options of each search: without and with gathered parameters, as far as they allow it."""
    if options.shard_parameters != ALWAYS:
        yield replace(options, shard_parameters=False)
    if options.shard_parameters == ALWAYS or (options.shard_parameters and options.shard_updates):
        yield options


def _fewer(
    every: Searched,
    kept: Problem,
    layers: Sequence[Layer],
    machine: Hardware,
    pins: Mapping[str, Pin],
    limit: float,
) -> Searched:
    """Returns the same choice with the fewest layers recomputed that fit into the limit.

    Args:
        every: the result with all layers recomputed.
        kept: the same problem with no layer recomputed.
        layers: all layers.
        machine: see :func:`best_on`.
        pins: see :func:`best_on`.
        limit: see :func:`best_on`.
    """
    assert every.solution is not None
    choice, graph, mesh = every.solution.choice, kept.graph, kept.mesh
    worth = _worth(every.problem, kept, layers, choice)
    order = sorted(layers, key=lambda layer: (-worth[layer.name], layer.first))

    def fits(count: int) -> bool:
        again = {index for layer in order[:count] for index in layer.indices}
        states = [
            (every.problem if index in again else kept).states[index][number]
            for index, number in enumerate(choice)
        ]
        memory = step_memory(graph, states, mesh, optimizer_states=every.options.optimizer_states)
        return memory.peak <= limit

    few, many = 0, len(order)
    while few < many:
        middle = (few + many) // 2
        few, many = (few, middle) if fits(middle) else (middle + 1, many)
    chosen = {layer.name for layer in order[:many]}
    options = replace(every.options, recomputed=tuple(each.name for each in layers if each.name in chosen))
    problem = build(graph, mesh, machine, options, pins)
    nbytes = peak_of(problem, options.optimizer_states)(choice)
    seconds = problem.seconds(choice)
    return Searched(options, problem, Solution(choice, seconds, nbytes, seconds))


def _worth(every: Problem, kept: Problem, layers: Sequence[Layer], choice: Sequence[int]) -> dict[str, float]:
    """Returns, by layer, the bytes that recomputing it frees per second that it takes."""
    graph, mesh = kept.graph, kept.mesh
    of = {index: layer.name for layer in layers for index in layer.indices}
    nbytes, seconds = dict.fromkeys(of.values(), 0.0), dict.fromkeys(of.values(), 0.0)
    for index, name in of.items():
        again, once = (each.states[index][choice[index]] for each in (every, kept))
        nbytes[name] += once.nbytes
        seconds[name] += again.seconds - once.seconds
    for (maker, index, twice), (_, _, once_moved) in zip(every.edges, kept.edges, strict=True):
        if index in of:
            place = choice[maker], choice[index]
            seconds[of[index]] += float(twice[place] - once_moved[place])
    for layer in layers:
        for value in layer.given:
            node = graph.values[value].node
            if graph.source(value).kind == "call":
                layout = kept.states[node][choice[node]].outs[graph.nodes[node].outputs.index(value)]
                nbytes[layer.name] -= graph.values[value].nbytes / parts(layout, mesh)
    # Rounded, so that equal layers keep their order.
    return {name: float(f"{nbytes[name] / max(seconds[name], 1e-12):.6g}") for name in nbytes}
