"""The best choice on one mesh: parameters in shares and layers computed again, where memory binds. Pure."""

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
    """What was found on one mesh.

    Attributes:
        options: with the layers that are computed again.
        problem: what was searched with them.
        solution: the best choice; None: none fits.
    """

    options: Options
    problem: Problem
    solution: Solution | None

    @property
    def states(self) -> list[State]:
        """One of each node's."""
        return [] if self.solution is None else self.problem.chosen(self.solution.choice)

    @property
    def seconds(self) -> float:
        """Predicted of a step."""
        return float("inf") if self.solution is None else self.solution.seconds


def best_on(
    graph: Graph, mesh: Mesh, machine: Hardware, options: Options, pins: Mapping[str, Pin], limit: float
) -> Searched:
    """The best choice on a mesh within a limit of memory.

    What is whole for moments only, and what is computed again, is in no sum that prices could see. So
    parameters in shares are a search of their own, and layers that are computed again another two: with all
    of them first; then as few are as fit, those first that free the most for their time.

    Args:
        graph: with fan-out nodes.
        mesh: sizes.
        machine: what things cost.
        options: of the mesh.
        pins: by node, which states may be chosen.
        limit: bytes of a rank.

    Returns:
        The fastest; if none fits, what needs the least memory of what was searched.

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
            return found[-1]  # memory binds nothing
    bounds = [each.solution.bound_s for each in found if each.solution is not None]
    layers = worth_recomputing(graph) if options.checkpoint_activations else []
    if layers and kept:
        free = kept[found[0].options.shard_parameters]
        bounds.append(free.seconds(Eliminator(free).best()))  # of some layers nothing better is known
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
    best = min(reversed(found), key=lambda each: each.seconds)  # of none that fits the last
    if best.solution is None:
        return best
    bound = min(best.solution.seconds, *bounds)
    return replace(best, solution=replace(best.solution, bound_s=bound))


def _holdings(options: Options) -> Iterator[Options]:
    """How parameters may be held."""
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
    """The same choice with as few layers computed again as fit.

    Args:
        every: all are.
        kept: the same problem where none is.
        layers: all.
        machine: as for :func:`best_on`.
        pins: likewise.
        limit: likewise.
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
    """By layer, the bytes that it frees for each second that it takes again."""
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
    # Rounded: layers that are alike are taken in their order.
    return {name: float(f"{nbytes[name] / max(seconds[name], 1e-12):.6g}") for name in nbytes}
