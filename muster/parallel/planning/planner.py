"""Finds a plan for a graph: searches each mesh, and compares with data parallelism."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.baseline import data_parallel_seconds
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.feeding import batch_led, feeding
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.kept import worth_recomputing
from muster.parallel.planning.layouts import (
    REPLICATE,
    Mesh,
    Placement,
    factorisations,
    replicated,
)
from muster.parallel.planning.memory import peak_of
from muster.parallel.planning.obstacles import too_large
from muster.parallel.planning.plan import SAME, Plan
from muster.parallel.planning.problem import ALWAYS, Options, Pin, State, build
from muster.parallel.planning.rules import modes_of
from muster.parallel.planning.search import Solution, TooWide, solve
from muster.parallel.planning.strategies import (
    Slices,
    Strategy,
    check_divides,
    pin_of,
    pins_of,
    strategy_text,
)
from muster.parallel.planning.within_memory import Searched, best_on, leanest_s

LARGE_GRAPH = 1000
"""Nodes of a graph from which on at most ``MOST_MESHES`` meshes are searched."""

MOST_MESHES = 2

SEARCHES = ("exact", "propagation")
"""The ways to search; in "propagation" only communication counts as time."""

RESTS = ("search", "data_parallel")
"""How operators without a strategy are split in mode "semi_auto"."""


def meshes_for(world: int, pins: Mapping[str, Mapping[str, int]], mesh: Mesh | None = None) -> list[Mesh]:
    """Returns the meshes to search, those of the fixed strategies first, in the order of their axes.

    Args:
        world: the number of ranks.
        pins: the fixed numbers of slices by axis, by operator.
        mesh: the only mesh to search; None for all.

    Raises:
        SettingsError: ``mesh`` is not a mesh, or has another number of ranks.
    """
    if mesh is not None:
        return [_checked(mesh, world)]
    found: list[Mesh] = []
    for wanted in pins.values():
        sizes = tuple(wanted.values())
        rest = world // max(1, math.prod(sizes))
        if sizes and math.prod(sizes) * rest == world:
            found.append((rest, *sizes) if rest > 1 else sizes)
    deepest = max((len(each) for each in found), default=2)
    found += factorisations(world, max(2, min(3, deepest)))
    return list(dict.fromkeys(found))


def _checked(mesh: Any, world: int) -> Mesh:
    if not isinstance(mesh, (list, tuple)) or not all(isinstance(size, int) and size > 0 for size in mesh):
        raise SettingsError(f"a mesh is the ranks along each of its dimensions, such as (2, 4), not {mesh!r}")
    if math.prod(mesh) != world:
        raise SettingsError(f"the mesh {list(mesh)} has {math.prod(mesh)} ranks, and the job {world}")
    return tuple(mesh)


def options_for(graph: Graph, mesh: Mesh, dataset: str | Sequence[Slices], base: Options) -> Options | None:
    """Returns the options of a mesh; None if the batch cannot be fed like that on it."""
    shapes = [graph.values[node.outputs[0]].shape for node in graph.nodes if node.kind == "input"]
    inputs = feeding(mesh, dataset, shapes)
    if inputs is None:
        return None
    led = batch_led(graph) if dataset == "data_parallel" else set()
    outputs = [
        (0,) * len(mesh) if index in led else replicated(mesh)
        for node in graph.nodes
        if node.kind == "output"
        for index in node.inputs
    ]
    return replace(base, inputs=inputs, outputs=tuple(outputs))


def find_plan(
    graph: Graph,
    world: int,
    *,
    machine: Hardware,
    mode: str = "auto",
    search: str = "exact",
    strategies: Mapping[str, Strategy] | None = None,
    memory: float = 0.9,
    dataset: str | Sequence[Slices] = "data_parallel",
    mesh: Mesh | None = None,
    optimizer_states: int = 2,
    local_norm: bool = False,
    shard_updates: bool | str = True,
    shard_parameters: bool | str = True,
    checkpoint_activations: bool | str = True,
    rest: str = "search",
    hosts: Sequence[str] = (),
) -> Plan:
    """Returns the fastest plan of all meshes within the memory limit.

    Args:
        graph: the graph of the forward pass on whole tensors, with fan-out nodes.
        world: the number of ranks.
        machine: the machine's costs.
        mode: "auto", "semi_auto" or "data_parallel".
        search: one of ``SEARCHES``.
        strategies: the fixed strategies, by operator or module.
        memory: the share of the machine's memory that may be used, above 0 and up to 1.
        dataset: how the batch is fed, see :func:`~muster.parallel.planning.feeding.feeding`.
        mesh: the only mesh to search; None for all.
        optimizer_states: the number of tensors that the optimizer keeps per parameter.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
        shard_updates: whether updates may be sharded (ZeRO-1); with "always" they are, wherever possible.
        shard_parameters: whether parameters may be held as shards and gathered when they are used (ZeRO-3);
            with "always" they are, wherever possible.
        checkpoint_activations: whether layers may be recomputed in the backward pass; with "always" all are
            that keep more bytes than their inputs have.
        rest: how operators without a strategy are split: by "search", or "data_parallel" by the batch.
        hosts: the host of each rank, if two hosts must hold every part of the state.

    Raises:
        SettingsError: a fixed strategy does not fit, the ranks cannot share the batch, or no plan fits into
            memory.
    """
    _check_search(search, memory)
    pins = pins_of(graph, strategies or {})
    check_divides(mode, strategies or {})
    _check_rest(rest, mode)
    limit = memory * machine.memory_bytes
    base = Options(
        (),
        (),
        optimizer_states,
        local_norm,
        shard_updates,
        shard_parameters,
        checkpoint_activations,
        hosts=tuple(hosts),
    )
    texts = {name: strategy_text(strategy) for name, strategy in (strategies or {}).items()}
    plain_base = replace(base, shard_parameters=False, checkpoint_activations=False)
    baseline = _data_parallel(graph, world, machine, plain_base, dataset)
    asked = ALWAYS in (shard_parameters, checkpoint_activations)

    skipped: list[str] = []

    def plan_of(mesh: Mesh, options: Options, found: Found) -> Plan:
        return _plan(graph, mesh, machine, options, found, mode, baseline, limit, texts, skipped)

    if mode == "data_parallel":
        _check_one_dimension(mesh, world)
        if baseline is None:
            raise SettingsError(_indivisible(graph, world, dataset))
        found, options = (asked and _data_parallel(graph, world, machine, base, dataset)) or baseline
        return plan_of((world,), options, found)
    meshes = {each: options_for(graph, each, dataset, base) for each in meshes_for(world, pins, mesh)}
    given = {each: options for each, options in meshes.items() if options is not None}
    if not given:
        raise SettingsError(_indivisible(graph, world, dataset))
    others = _rest_pins(graph, world, base) if rest == "data_parallel" else {}
    batch = {} if baseline is None else _batch_pins(graph, world, baseline[1])
    best, skipped = _best_of(graph, given, machine, pins, others, batch, limit, search)
    assert best.solution is not None
    is_free = not pins and not asked and mesh in (None, (world,))
    if baseline is not None and is_free and search == "exact":
        (plain, plain_states), options = baseline
        if plain.nbytes <= limit and plain.seconds <= best.seconds * (1 + SAME):
            exact = replace(
                options,
                whole_parameters=False,
                shard_updates=shard_updates,
                shard_parameters=shard_parameters,
                checkpoint_activations=checkpoint_activations,
            )
            bounded = Solution(plain.choice, plain.seconds, plain.nbytes, best.solution.bound_s)
            return plan_of((world,), exact, (bounded, plain_states))
    return plan_of(best.problem.mesh, best.options, (best.solution, best.states))


def _check_search(search: str, memory: float) -> None:
    if search not in SEARCHES:
        raise SettingsError(f"search is one of {', '.join(SEARCHES)}, not {search!r}")
    if not 0 < memory <= 1:
        raise SettingsError(f"memory is a share above 0 and up to 1, not {memory}")


def _check_one_dimension(mesh: Mesh | None, world: int) -> None:
    if mesh is not None and _checked(mesh, world) != (world,):
        raise SettingsError(
            f'mode "data_parallel" arranges ranks as {[world]}: the mesh {list(mesh)} needs "auto"'
        )


def _check_rest(rest: str, mode: str) -> None:
    if rest not in RESTS or (rest != "search" and mode != "semi_auto"):
        raise SettingsError(
            f'rest is one of {", ".join(RESTS)}, the last only in mode "semi_auto"; it is {rest!r}'
        )


def _best_of(
    graph: Graph,
    given: Mapping[Mesh, Options],
    machine: Hardware,
    pins: Mapping[str, Mapping[str, int]],
    others: Mapping[str, Pin],
    batch: Mapping[str, Pin],
    limit: float,
    search: str,
) -> tuple[Searched, list[str]]:
    """Returns the fastest result of all meshes, and the meshes that could not be searched.

    The result's bound is that of all meshes that were searched.

    Args:
        graph: see :func:`find_plan`.
        given: the options of each mesh.
        machine: see :func:`find_plan`.
        pins: the states that users fixed.
        others: the states that other operators may have.
        batch: the states in which operators compute their part of the batch.
        limit: the memory limit of a rank, in bytes.
        search: see :func:`find_plan`.

    Raises:
        SettingsError: no mesh has a plan; the message says why.
    """
    best: Searched | None = None
    refused, bound, skipped = "", math.inf, list[str]()
    smallest = (math.inf, "")
    if len(graph.nodes) > LARGE_GRAPH and len(given) > MOST_MESHES and not pins:
        given, skipped = _promising(graph, given, machine, others)
    for mesh, options in given.items():
        fixed = {**others, **{name: pin_of(mesh, wanted) for name, wanted in pins.items()}}
        try:
            found = best_on(graph, mesh, machine, options, fixed, limit, batch)
            if search == "propagation" and found.solution is not None:
                found = replace(found, solution=_propagated(found, fixed, limit, found.solution))
        except KeyError as error:
            refused = refused or (
                f"{error.args[0]} cannot be split as its strategy says on {math.prod(mesh)} ranks: the slices"
                " must divide the number of ranks, and what others fix must agree"
            )
            continue
        except TooWide as error:
            refused = refused or f"{error}: fix some strategies, or give a mesh of one dimension"
            skipped.append(" x ".join(map(str, mesh)))
            continue
        if found.solution is None:
            smallest = min(
                smallest,
                too_large(found.problem, limit, options.optimizer_states),
                key=operator.itemgetter(0),
            )
            continue
        bound = min(bound, found.solution.bound_s)
        if best is None or found.seconds < best.seconds * (1 - 1e-9):
            best = replace(found, options=replace(options, recomputed=found.options.recomputed))
    if best is None or best.solution is None:
        raise SettingsError(smallest[1] or refused)
    return replace(best, solution=replace(best.solution, bound_s=min(bound, best.seconds))), skipped


def _promising(
    graph: Graph, given: Mapping[Mesh, Options], machine: Hardware, others: Mapping[str, Pin]
) -> tuple[dict[Mesh, Options], list[str]]:
    """The meshes on which what needs the least memory is fastest, and the names of the others."""
    seconds: dict[Mesh, float] = {}
    for mesh, options in given.items():
        with contextlib.suppress(TooWide):
            seconds[mesh] = leanest_s(graph, mesh, machine, options, others)
    chosen = sorted(seconds, key=lambda mesh: seconds[mesh])[:MOST_MESHES]
    left = [" x ".join(map(str, mesh)) for mesh in given if mesh not in chosen]
    return {mesh: given[mesh] for mesh in chosen}, left


Found = tuple[Solution, list[State]]


def _propagated(searched: Searched, pins: Mapping[str, Pin], limit: float, best: Solution) -> Solution:
    """Returns the choice with the fewest bytes to communicate, with its predicted costs.

    Returns ``best`` if no choice fits; its bound holds in any case.
    """
    problem, options = searched.problem, searched.options
    volume = replace(problem.machine, latency_s=0.0, measured={})
    least = build(problem.graph, problem.mesh, volume, replace(options, communication_only=True), pins)
    found = solve(least, limit, peak_of(problem, options.optimizer_states))
    if found is None:
        return best
    return Solution(found.choice, problem.seconds(found.choice), found.nbytes, best.bound_s)


def _data_parallel(
    graph: Graph, world: int, machine: Hardware, base: Options, dataset: str | Sequence[Slices]
) -> tuple[Found, Options] | None:
    """Returns the solution of data parallelism; None if there is none.

    Every rank holds all parameters, or with ``ALWAYS`` shards of all, and computes its part of the batch.
    """
    options = options_for(graph, (world,), dataset, base)
    if options is None:
        return None
    options = replace(
        options,
        whole_parameters=True,
        shard_updates=ALWAYS if options.shard_updates == ALWAYS else False,
        shard_parameters=ALWAYS if options.shard_parameters == ALWAYS else False,
        recomputed=(
            tuple(layer.name for layer in worth_recomputing(graph))
            if options.checkpoint_activations == ALWAYS
            else ()
        ),
    )
    problem = build(graph, (world,), machine, options, _batch_pins(graph, world, options))
    solution = solve(problem, peak=peak_of(problem, options.optimizer_states))
    return None if solution is None else ((solution, problem.chosen(solution.choice)), options)


def _rest_pins(graph: Graph, world: int, base: Options) -> dict[str, Pin]:
    """Returns pins for any mesh by which operators on a part of the batch compute that part.

    Raises:
        SettingsError: the ranks cannot share the batch.
    """
    options = options_for(graph, (world,), "data_parallel", base)
    if options is None:
        raise SettingsError(_indivisible(graph, world, "data_parallel"))
    return _batch_pins(graph, world, options)


def _batch_pins(graph: Graph, world: int, options: Options) -> dict[str, Pin]:
    """Returns pins by which operators on a part of the batch compute that part, if they can be split so.

    Args:
        graph: the graph of the operators.
        world: the number of ranks.
        options: the options of a mesh of one dimension; the pins hold on other meshes, too.
    """
    fed = iter(options.inputs)
    known: dict[int, Placement] = {}
    pins: dict[str, Pin] = {}
    for node in graph.nodes:
        if node.kind == "input":
            known[node.outputs[0]] = next(fed)[0]
        elif node.kind in ("parameter", "buffer") or node.of_parameters:
            known.update(dict.fromkeys(node.outputs, REPLICATE))
        elif node.kind in ("call", FAN_OUT):
            entries = [known.get(value) for value in node.inputs]
            if not any(isinstance(entry, int) for entry in entries):
                continue
            fitting = [
                mode
                for mode in modes_of(graph, node)[0]
                if mode.size
                and mode.size % world == 0  # a view may leave the batch's dimension another size
                and all(e in (None, wanted) for e, wanted in zip(entries, mode.ins, strict=True))
            ]
            if not fitting:
                continue
            pins[node.name] = _one_of({mode.name for mode in fitting})
            known.update(
                (value, entry)
                for value, entry in zip(node.outputs, fitting[0].outs, strict=True)
                if isinstance(entry, int)
            )
    return pins


def _one_of(axes: set[str]) -> Pin:
    return lambda _, state: state.modes[0] in axes and len(set(state.modes)) == 1


def _plan(
    graph: Graph,
    mesh: Mesh,
    machine: Hardware,
    options: Options,
    found: Found,
    mode: str,
    baseline: tuple[Found, Options] | None,
    limit: float,
    strategies: dict[str, str],
    skipped: Sequence[str],
) -> Plan:
    solution, states = found
    plan = Plan(
        graph, mesh, machine, options, states, mode, solution.seconds, solution.nbytes, solution.bound_s
    )
    plan.limit_bytes, plan.strategies, plan.skipped = limit, strategies, tuple(skipped)
    if baseline is not None:
        plain, plain_states = baseline[0]
        world = (math.prod(mesh),)
        plan.baseline_nbytes = plain.nbytes
        if plain.nbytes <= limit:
            plan.baseline_s = data_parallel_seconds(graph, plain_states, world, machine)
    return plan


def _indivisible(graph: Graph, world: int, dataset: str | Sequence[Slices]) -> str:
    shapes = [
        f"{node.name} {list(graph.values[node.outputs[0]].shape)}"
        for node in graph.nodes
        if node.kind == "input"
    ]
    more = "" if isinstance(dataset, str) else ", or a mesh whose first dimensions are the numbers of slices"
    return (
        f"the batch ({', '.join(shapes)}) cannot be shared by {world} ranks as dataset_strategy says: choose"
        f' sizes that the ranks divide, dataset_strategy="full_batch"{more}'
    )
