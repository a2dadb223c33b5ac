"""Searches the best choice on one mesh, with sharded parameters and recomputed layers if need be. Pure."""

from __future__ import annotations

import contextlib
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

_NOTHING: Mapping[str, Pin] = {}


@dataclass(frozen=True, slots=True)
class Searched:
    """The result of a search on one mesh.

    Attributes:
        options: with the layers that are computed again.
        problem: what was searched with them.
        solution: the best choice; None: none fits.
        batch: what operators were held to beside what users fixed.
    """

    options: Options
    problem: Problem
    solution: Solution | None
    batch: Mapping[str, Pin]

    @property
    def states(self) -> list[State]:
        """The chosen state of each node; empty if no choice fits."""
        return [] if self.solution is None else self.problem.chosen(self.solution.choice)

    @property
    def seconds(self) -> float:
        """The predicted time of a step; infinite if no choice fits."""
        return float("inf") if self.solution is None else self.solution.seconds


def best_on(
    graph: Graph,
    mesh: Mesh,
    machine: Hardware,
    options: Options,
    pins: Mapping[str, Pin],
    limit: float,
    batch: Mapping[str, Pin],
) -> Searched:
    """Returns the best choice on a mesh within a memory limit.

    What is whole for moments only, and what is computed again, is in no sum that prices could see. So
    parameters in shares are a search of their own, and layers that are computed again another two: with all
    of them first; then as few are as fit, those first that free the most for their time. Where prices lead to
    what does not fit, data parallelism may yet, with parameters in shares: so that is tried by itself.

    Args:
        graph: with fan-out nodes.
        mesh: sizes.
        machine: what things cost.
        options: the options of the mesh.
        pins: the states that may be chosen, by node.
        limit: bytes of a rank.
        batch: the states in which a node computes its part of the batch, by node.

    Returns:
        The fastest result; if none fits, the last one, which needs the least memory of those searched.

    Raises:
        KeyError: a pinned node has no such state on this mesh.
        TooWide: the graph is too connected for the search.
    """
    search = _Search(graph, mesh, machine, pins, limit)
    found: list[Searched] = []
    bounds: list[float] = []
    always = options.checkpoint_activations == ALWAYS
    for each in () if always else _holdings(options):
        found.append(search.searched(each))
        solution = found[-1].solution
        if solution is not None:
            if solution.seconds <= solution.bound_s:
                return found[-1]  # memory binds nothing
            bounds.append(solution.bound_s)
    layers = worth_recomputing(graph) if options.checkpoint_activations else []
    names = tuple(layer.name for layer in layers)
    if layers and found:
        free = found[0].problem  # of some layers nothing better is known
        bounds.append(free.seconds(Eliminator(free).best()))
    for number, each in enumerate(_holdings(options)):
        wanted = replace(each, recomputed=names)
        every = search.searched(wanted) if names or always else found[number]
        if always and every.solution is not None:
            bounds.append(every.solution.bound_s)
        if every.solution is None and batch:
            with contextlib.suppress(KeyError):  # users fixed something else
                every = search.searched(wanted, batch)
        found.append(every if always else search.fewer(every, layers))
    best = min(reversed(found), key=lambda each: each.seconds)  # of none that fits the last
    if best.solution is None:
        return best
    bound = min([best.solution.seconds, *bounds])
    return replace(best, solution=replace(best.solution, bound_s=bound))


def leanest_s(
    graph: Graph, mesh: Mesh, machine: Hardware, options: Options, pins: Mapping[str, Pin]
) -> float:
    """Returns the seconds of the fastest choice with all parameters sharded and all layers recomputed.

    Raises:
        KeyError: see :func:`best_on`.
        TooWide: see :func:`best_on`.
    """
    names = tuple(layer.name for layer in worth_recomputing(graph)) if options.checkpoint_activations else ()
    shares = ALWAYS if options.shard_parameters and options.shard_updates else options.shard_parameters
    lean = replace(options, shard_parameters=shares, recomputed=names)
    problem = build(graph, mesh, machine, lean, pins)
    return problem.seconds(Eliminator(problem).best())


def _holdings(options: Options) -> Iterator[Options]:
    """Yields the options of each search: without and with gathered parameters, as far as they allow it."""
    if options.shard_parameters != ALWAYS:
        yield replace(options, shard_parameters=False)
    if options.shard_parameters == ALWAYS or (options.shard_parameters and options.shard_updates):
        yield options


class _Search:
    """What all searches on a mesh share."""

    def __init__(
        self, graph: Graph, mesh: Mesh, machine: Hardware, pins: Mapping[str, Pin], limit: float
    ) -> None:
        self.graph, self.mesh, self.machine, self.pins, self.limit = graph, mesh, machine, pins, limit
        self._problems: dict[object, Problem] = {}

    def problem(self, options: Options, batch: Mapping[str, Pin]) -> Problem:
        """The problem of some options."""
        key = options, bool(batch)
        if key not in self._problems:
            pins = {**batch, **self.pins}
            self._problems[key] = build(self.graph, self.mesh, self.machine, options, pins, limit=self.limit)
        return self._problems[key]

    def searched(self, options: Options, batch: Mapping[str, Pin] = _NOTHING) -> Searched:
        """What is found with some options."""
        problem = self.problem(options, batch)
        solution = solve(problem, self.limit, peak_of(problem, options.optimizer_states))
        return Searched(options, problem, solution, batch)

    def fewer(self, every: Searched, layers: Sequence[Layer]) -> Searched:
        """The same choice with as few layers computed again as fit.

        Args:
            every: all are.
            layers: all.
        """
        if every.solution is None:
            return every
        kept = self.problem(replace(every.options, recomputed=()), every.batch)
        choice = every.solution.choice
        worth = _worth(every.problem, kept, layers, choice)
        order = sorted(layers, key=lambda layer: (-worth[layer.name], layer.first))
        few, many = 0, len(order)
        while few < many:
            middle = (few + many) // 2
            again = {index for layer in order[:middle] for index in layer.indices}
            states = [
                (every.problem if index in again else kept).states[index][number]
                for index, number in enumerate(choice)
            ]
            memory = step_memory(
                self.graph, states, self.mesh, optimizer_states=every.options.optimizer_states
            )
            few, many = (few, middle) if memory.peak <= self.limit else (middle + 1, many)
        chosen = {layer.name for layer in order[:many]}
        names = tuple(each.name for each in layers if each.name in chosen)
        options = replace(every.options, recomputed=names)
        problem = self.problem(options, every.batch)
        nbytes = peak_of(problem, options.optimizer_states)(choice)
        seconds = problem.seconds(choice)
        return Searched(options, problem, Solution(choice, seconds, nbytes, seconds), every.batch)


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
