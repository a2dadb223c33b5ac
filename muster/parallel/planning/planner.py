"""From a graph to a plan: meshes tried, what users fixed, data parallelism for comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.costs import Machine
from muster.parallel.planning.graph import HUB, Graph, Node
from muster.parallel.planning.layouts import (
    REPLICATED,
    Entry,
    Layout,
    Mesh,
    Shape,
    factorisations,
    fits,
    replicated,
)
from muster.parallel.planning.plan import SAME, Plan
from muster.parallel.planning.problem import ALWAYS, Options, Pin, Problem, State, build
from muster.parallel.planning.rules import Axis, axes_of, modes_of
from muster.parallel.planning.search import Solution, TooWide, solve

Slices = tuple[int, ...]
Strategy = tuple[Slices, ...] | Mapping[str, int]
SEARCHES = {
    "exact": False,
    "propagation": True,
    "sharding_propagation": True,
    "recursive_programming": False,
    "dynamic_programming": False,
}
"""Names of searches, and whether only communication counts in them."""

RESTS = ("search", "data_parallel")
"""What operators without a strategy do in mode "semi_auto"."""


# ---------------------------------------------------------------- what users fix


def slices_by_axis(graph: Graph, node: Node, strategy: Strategy) -> dict[str, int]:
    """A strategy as the number of slices of each axis.

    Args:
        graph: of the node.
        node: the operator.
        strategy: the slices of each dimension of each input, as MindSpore has them (of a linear layer the
            weight may be given as stored, or as the second factor of a product), or slices by axis name.

    Raises:
        SettingsError: it does not fit the operator; says why.
    """
    _check_slices(node, strategy)
    axes = axes_of(graph, node)
    if axes is None:
        raise SettingsError(f"{_what(node)} cannot be divided: there is no rule for it, so it is kept whole")
    if isinstance(strategy, Mapping):
        unknown = set(strategy) - {axis.name for axis in axes}
        if unknown:
            raise SettingsError(
                f"{_what(node)} has no axis {sorted(unknown)[0]!r}; it has"
                f" {', '.join(f'{axis.name} ({axis.size})' for axis in axes)}"
            )
        wanted = {name: count for name, count in strategy.items() if count > 1}
    else:
        wanted = _of_tuples(graph, node, axes, strategy)
    _check_sizes(node, axes, wanted)
    return wanted


def _check_slices(node: Node, strategy: Any) -> None:
    counts: Any = None
    if isinstance(strategy, Mapping):
        counts = list(strategy.values())
    elif isinstance(strategy, (list, tuple)) and all(isinstance(cuts, (list, tuple)) for cuts in strategy):
        counts = [count for cuts in strategy for count in cuts]
    if counts is None or not all(isinstance(count, int) and count > 0 for count in counts):
        raise SettingsError(
            "a strategy is a tuple of slices for each input, such as ((2, 4), (4, 1)), or slices by axis,"
            f" such as {{'n': 8}}; {_what(node)} was given {strategy!r}"
        )


def _of_tuples(
    graph: Graph, node: Node, axes: Sequence[Axis], strategy: Sequence[Sequence[int]]
) -> dict[str, int]:
    shapes = [graph.values[v].shape for v in node.inputs]
    given = [tuple(cuts) for cuts in strategy]
    variants = [given]
    if node.op == "linear" and len(given) > 1 and len(given[1]) == 2:
        variants.append([given[0], given[1][::-1], *given[2:]])
    problems = []
    for variant in variants:
        found, problem = _match(node, axes, shapes, variant)
        if not problem:
            return found
        problems.append(problem)
    raise SettingsError(f"the strategy {tuple(given)} does not fit {_what(node)}: {problems[0]}")


def _match(
    node: Node, axes: Sequence[Axis], shapes: Sequence[Shape], given: Sequence[Slices]
) -> tuple[dict[str, int], str]:
    """Slices by axis, or a sentence on what is wrong."""
    wanted: dict[str, int] = {}
    if len(given) > len(shapes):
        return {}, f"it has {len(shapes)} inputs, not {len(given)}"
    for position, cuts in enumerate(given):
        if len(cuts) != len(shapes[position]):
            return {}, f"input {position} has {len(shapes[position])} dimensions {list(shapes[position])}"
        for dim, count in enumerate(cuts):
            axis = next((a for a in axes if a.ins[position] == dim), None)
            if count == 1:
                if axis is not None and wanted.get(axis.name, 1) != 1:
                    return {}, f"the axis {axis.name} is cut into {wanted[axis.name]} and into 1"
                if axis is not None:
                    wanted[axis.name] = 1
                continue
            if axis is None:
                return {}, f"dimension {dim} of input {position} cannot be split"
            if wanted.get(axis.name, count) != count:
                return {}, f"the axis {axis.name} is cut into {wanted[axis.name]} and into {count}"
            wanted[axis.name] = count
    return {name: count for name, count in wanted.items() if count > 1}, ""


def _check_sizes(node: Node, axes: Sequence[Axis], wanted: Mapping[str, int]) -> None:
    for axis in axes:
        count = wanted.get(axis.name, 1)
        if axis.size % count:
            padded = -(-axis.size // count) * count
            more = ""
            if node.op in ("embedding", "linear", "cross_entropy_loss") and axis.name in ("v", "n"):
                more = f" Build the layer with {padded}: targets never name the others."
            raise SettingsError(
                f"{_what(node)}: its axis {axis.name} has {axis.size} elements, which {count} slices"
                f" cannot share evenly; {padded} could.{more}"
            )


def _what(node: Node) -> str:
    where = f" of {node.module}" if node.module else ""
    return f"the operator {node.name}{where}"


def pins_of(graph: Graph, strategies: Mapping[str, Strategy]) -> dict[str, dict[str, int]]:
    """What users fixed, as slices by axis by operator.

    A name is that of an operator, or of a module: then its only operator that has parameters, or its only
    one.

    Raises:
        SettingsError: nothing is called so, or more than one operator; or see :func:`slices_by_axis`.
    """
    found = {}
    for name, strategy in strategies.items():
        node = _named(graph, name)
        if node.name in found:
            raise SettingsError(
                f"two strategies are for {_what(node)}, one of them as {name!r}: leave one out"
            )
        found[node.name] = slices_by_axis(graph, node, strategy)
    return found


def _named(graph: Graph, name: str) -> Node:
    calls = [node for node in graph.nodes if node.kind == "call"]
    exact = [node for node in calls if node.name == name]
    own = [node for node in calls if node.module == name]
    held = [
        node
        for node in own
        if any(graph.nodes[graph.values[v].node].kind == "parameter" for v in node.inputs)
    ]
    for candidates in (exact, held, own):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            names = ", ".join(node.name for node in candidates)
            raise SettingsError(f"{name!r} has several operators: {names}; name one of them")
    known = sorted({node.module for node in calls if node.module} | {node.name for node in calls})
    raise SettingsError(f"nothing is called {name!r}; there are: {', '.join(known[:40])}")


def _pin(mesh: Mesh, wanted: Mapping[str, int]) -> Pin:
    def fits_wanted(node: Node, state: State) -> bool:
        counts: dict[str, int] = {}
        for size, axis in zip(mesh, state.modes, strict=True):
            counts[axis] = counts.get(axis, 1) * size
        if "sum" in counts or "grad" in counts:
            return False
        counts.pop("-", None)
        return counts == dict(wanted)

    return fits_wanted


# ---------------------------------------------------------------- batches


def feeding(
    mesh: Mesh, dataset: str | Sequence[Slices], shapes: Sequence[Shape]
) -> tuple[Layout, ...] | None:
    """The layouts of the inputs; None: they cannot be so on this mesh.

    Args:
        mesh: sizes.
        dataset: "data_parallel" (each rank feeds its part of the batch), "full_batch" (each feeds all), or
            the slices of each input, which ranks take row by row, neighbours the same where there are more.
        shapes: of the whole inputs.
    """
    grid: Slices = ()
    if not isinstance(dataset, str):
        grid = tuple(max(cuts) for cuts in itertools.zip_longest(*dataset, fillvalue=1))
    found = []
    if not isinstance(dataset, str) and len(dataset) > len(shapes):
        raise SettingsError(
            f"dataset_strategy has {len(dataset)} tuples, and the batch {len(shapes)} tensors"
        )
    for number, shape in enumerate(shapes):
        if dataset == "full_batch" or not shape:
            layout: Layout | None = replicated(mesh)
        elif dataset == "data_parallel":
            layout = (0,) * len(mesh)
        else:
            layout = _layout_of(mesh, _cuts(dataset, number, len(shape)), grid)
        if layout is None or not fits(layout, mesh, shape):
            return None
        found.append(layout)
    return tuple(found)


def _cuts(dataset: str | Sequence[Slices], number: int, ndim: int) -> Slices:
    if isinstance(dataset, str) or number >= len(dataset) or len(dataset[number]) != ndim:
        raise SettingsError(
            f'dataset_strategy is "data_parallel", "full_batch", or one tuple of slices for each input with'
            f" one number for each dimension, not {dataset!r}"
        )
    return tuple(dataset[number])


def _dealt(mesh: Mesh, grid: Slices) -> Layout | None:
    """The tensor dimension that each mesh dimension splits, so that ranks in order get the grid row by row.

    A search tries several meshes, and which rank feeds what must not depend on the one that it takes.
    """
    found: list[Entry] = []
    left = [(d, n) for d, n in enumerate(grid) if n > 1]
    for size in mesh:
        if not left or size == 1:
            found.append(REPLICATED)
            continue
        d, n = left.pop(0)
        if n % size:
            return None
        found.append(d)
        if n > size:
            left.insert(0, (d, n // size))
    return None if left else tuple(found)


def _layout_of(mesh: Mesh, cuts: Slices, grid: Slices) -> Layout | None:
    """The layout of an input with so many slices of each dimension, where the inputs' grid is this one."""
    left = list(cuts)
    found: list[Entry] = []
    for size, entry in zip(mesh, _dealt(mesh, grid) or (), strict=False):
        if not isinstance(entry, int) or entry >= len(cuts) or left[entry] == 1:
            found.append(REPLICATED)
            continue
        if left[entry] % size:
            return None
        left[entry] //= size
        found.append(entry)
    return tuple(found) if found and all(n == 1 for n in left) else None


def whole_shape(shape: Shape, number: int, world: int, dataset: str | Sequence[Slices]) -> Shape:
    """The shape of the job's input number ``number`` if each rank feeds ``shape``.

    Raises:
        SettingsError: the strategy of the data does not fit.
    """
    if dataset == "full_batch" or not shape:
        return shape
    if dataset == "data_parallel":
        return (shape[0] * world, *shape[1:])
    return tuple(size * cut for size, cut in zip(shape, _cuts(dataset, number, len(shape)), strict=True))


# ---------------------------------------------------------------- plans


def meshes_for(world: int, pins: Mapping[str, Mapping[str, int]], mesh: Mesh | None = None) -> list[Mesh]:
    """The meshes to try: that of the fixed strategies first, in the order of their axes.

    Raises:
        SettingsError: a given mesh has another number of ranks.
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


def check_divides(mode: str, strategies: Mapping[str, Strategy]) -> None:
    """Makes sure that a mode heeds strategies, if there are any.

    Raises:
        SettingsError: it divides no operators.
    """
    if strategies and mode in ("data_parallel", "stand_alone"):
        raise SettingsError(
            f'mode "{mode}" divides no operators: the strategy of {next(iter(strategies))!r} needs'
            ' "semi_auto" or "auto"'
        )


def _checked(mesh: Any, world: int) -> Mesh:
    if not isinstance(mesh, (list, tuple)) or not all(isinstance(size, int) and size > 0 for size in mesh):
        raise SettingsError(f"a mesh is the ranks along each of its dimensions, such as (2, 4), not {mesh!r}")
    if math.prod(mesh) != world:
        raise SettingsError(f"the mesh {list(mesh)} has {math.prod(mesh)} ranks, and the job {world}")
    return tuple(mesh)


def options_for(graph: Graph, mesh: Mesh, dataset: str | Sequence[Slices], base: Options) -> Options | None:
    """The options of a mesh; None: the batch cannot be fed so."""
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


def batch_led(graph: Graph) -> set[int]:
    """The values whose first dimension is the batch's, as inputs that are fed in parts have it."""
    where: dict[int, int] = {}  # by value, the dimension of the batch
    sizes = {graph.values[node.outputs[0]].shape[:1] for node in graph.nodes if node.kind == "input"} - {()}
    for node in graph.nodes:
        if node.kind == "input":
            where |= dict.fromkeys((v for v in node.outputs if graph.values[v].shape), 0)
        elif node.kind in ("call", HUB) and any(v in where for v in node.inputs):
            axes = axes_of(graph, node)
            for value in node.outputs if axes is None else ():  # no rule: its shape must do
                if graph.values[value].shape[:1] in sizes:
                    where[value] = 0
            for axis in axes or ():
                if all(where.get(v, d) == d for v, d in zip(node.inputs, axis.ins, strict=True)):
                    outs = zip(node.outputs, axis.outs, strict=True)
                    where |= {value: d for value, d in outs if d is not None and d >= 0}
                    break
    return {
        value
        for value, dim in where.items()
        if dim == 0 and all(graph.values[value].shape[0] % size == 0 for (size,) in sizes)
    }


def find_plan(
    graph: Graph,
    world: int,
    *,
    machine: Machine,
    mode: str = "auto",
    search: str = "exact",
    strategies: Mapping[str, Strategy] | None = None,
    memory: float = 0.9,
    dataset: str | Sequence[Slices] = "data_parallel",
    mesh: Mesh | None = None,
    optimizer_states: int = 2,
    local_norm: bool = False,
    shard_updates: bool | str = True,
    rest: str = "search",
    hosts: Sequence[str] = (),
) -> Plan:
    """The fastest plan of all meshes within the memory limit.

    Args:
        graph: with hubs, of whole tensors.
        world: number of ranks.
        machine: what things cost.
        mode: "auto", "semi_auto" or "data_parallel".
        search: one of ``SEARCHES``.
        strategies: what is fixed, by operator or module.
        memory: the share of the machine's memory that may be used, 0 to 1.
        dataset: how the batch is fed.
        mesh: this one only.
        optimizer_states: tensors that the optimizer keeps for each parameter.
        local_norm: BatchNorm takes the statistics of each rank's own part of the batch.
        shard_updates: whether updates may be divided (ZeRO-1); "always": they are.
        rest: "data_parallel": operators without a strategy compute their part of the batch; "search".
        hosts: the host of each rank, if every part of the state must be on two of them.

    Raises:
        SettingsError: something fixed does not fit, sizes do not divide, or nothing fits into memory.
    """
    if search not in SEARCHES:
        raise SettingsError(f"search is one of {', '.join(SEARCHES)}, not {search!r}")
    if not 0 < memory <= 1:
        raise SettingsError(f"memory is a share above 0 and up to 1, not {memory}")
    pins = pins_of(graph, strategies or {})
    check_divides(mode, strategies or {})
    if rest not in RESTS or (rest != "search" and mode != "semi_auto"):
        raise SettingsError(
            f'rest is one of {", ".join(RESTS)}, the second in mode "semi_auto" only, not {rest!r}'
        )
    limit = memory * machine.memory_bytes
    base = Options((), (), optimizer_states, local_norm, shard_updates, hosts=tuple(hosts))
    texts = {name: strategy_text(strategy) for name, strategy in (strategies or {}).items()}
    baseline = _data_parallel(graph, world, machine, base, dataset)

    def plan_of(mesh: Mesh, options: Options, found: Found) -> Plan:
        return _plan(graph, mesh, machine, options, found, mode, baseline, limit, texts)

    if mode == "data_parallel":
        if mesh is not None and _checked(mesh, world) != (world,):
            raise SettingsError(
                f'mode "data_parallel" arranges ranks as {[world]}: the mesh {list(mesh)} needs "auto"'
            )
        if baseline is None:
            raise SettingsError(_indivisible(graph, world, dataset))
        found, options = baseline
        return plan_of((world,), options, found)
    meshes = {each: options_for(graph, each, dataset, base) for each in meshes_for(world, pins, mesh)}
    given = {each: options for each, options in meshes.items() if options is not None}
    if not given:
        raise SettingsError(_indivisible(graph, world, dataset))
    others = _rest_pins(graph, world, base) if rest == "data_parallel" else {}
    found_mesh, (solution, states) = _best_of(graph, given, machine, pins, others, limit, search)
    if baseline is not None and not pins and not SEARCHES[search]:
        (plain, plain_states), options = baseline
        if plain.nbytes <= limit and plain.seconds <= solution.seconds * (1 + SAME):
            exact = replace(options, whole_parameters=False, shard_updates=shard_updates)
            bounded = Solution(plain.choice, plain.seconds, plain.nbytes, solution.bound_s)
            return plan_of((world,), exact, (bounded, plain_states))
    return plan_of(found_mesh, given[found_mesh], (solution, states))


def _best_of(
    graph: Graph,
    given: Mapping[Mesh, Options],
    machine: Machine,
    pins: Mapping[str, Mapping[str, int]],
    others: Mapping[str, Pin],
    limit: float,
    search: str,
) -> tuple[Mesh, Found]:
    """The mesh with the fastest plan, and that plan.

    Args:
        graph: see :func:`find_plan`, as for all that is not here.
        given: the options of each mesh.
        machine: likewise.
        pins: what users fixed.
        others: what the operators are held to that users did not fix.
        limit: bytes of memory of a rank.
        search: likewise.

    Raises:
        SettingsError: there is none; says what is in the way.
    """
    best: tuple[Mesh, Found] | None = None
    refused = ""
    for mesh, options in given.items():
        fixed = {**others, **{name: _pin(mesh, wanted) for name, wanted in pins.items()}}
        try:
            problem = build(graph, mesh, machine, options, fixed)
            solution = solve(problem, limit)
            if SEARCHES[search] and solution is not None:
                solution = _propagated(problem, options, fixed, limit, solution)
        except KeyError as error:
            refused = refused or (
                f"{error.args[0]} cannot be split as its strategy says on {math.prod(mesh)} ranks: the slices"
                " must divide the number of ranks, and what others fix must agree"
            )
            continue
        except TooWide as error:
            refused = refused or f"{error}: fix some strategies, or give a mesh of one dimension"
            continue
        if solution is None:
            refused = f"no plan fits into {limit / 1e9:.1f} GB a rank: take more ranks, a smaller batch, or"
            refused += " memory=1"
        elif best is None or solution.seconds < best[1][0].seconds * (1 - 1e-9):
            best = mesh, (solution, problem.chosen(solution.choice))
    if best is None:
        raise SettingsError(refused)
    return best


Found = tuple[Solution, list[State]]


def _propagated(
    problem: Problem, options: Options, pins: Mapping[str, Pin], limit: float, best: Solution
) -> Solution:
    """The choice with the fewest bytes to send, with what it really costs; the best one stays the bound."""
    volume = replace(problem.machine, latency_s=0.0, measured={})
    least = build(problem.graph, problem.mesh, volume, replace(options, communication_only=True), pins)
    found = solve(least, limit)
    if found is None:
        return best
    choice = found.choice
    return Solution(choice, problem.seconds(choice), problem.nbytes(choice), best.bound_s)


def _data_parallel(
    graph: Graph, world: int, machine: Machine, base: Options, dataset: str | Sequence[Slices]
) -> tuple[Found, Options] | None:
    """Every rank holds all parameters, and computes its part of the batch where a rule says how."""
    options = options_for(graph, (world,), dataset, base)
    if options is None:
        return None
    always = options.shard_updates == ALWAYS
    options = replace(options, whole_parameters=True, shard_updates=ALWAYS if always else False)
    problem = build(graph, (world,), machine, options, _batch_pins(graph, world, options))
    solution = solve(problem)
    return None if solution is None else ((solution, problem.chosen(solution.choice)), options)


def _rest_pins(graph: Graph, world: int, base: Options) -> dict[str, Pin]:
    """What gets a part of the batch computes that part, on any mesh.

    Raises:
        SettingsError: the ranks cannot share the batch.
    """
    options = options_for(graph, (world,), "data_parallel", base)
    if options is None:
        raise SettingsError(_indivisible(graph, world, "data_parallel"))
    return _batch_pins(graph, world, options)


def _batch_pins(graph: Graph, world: int, options: Options) -> dict[str, Pin]:
    """What gets a part of the batch computes that part, if it can be shared.

    Args:
        graph: the operators.
        world: number of ranks.
        options: of a mesh of one dimension; the pins hold on others too.
    """
    fed = iter(options.inputs)
    known: dict[int, Entry] = {}
    pins: dict[str, Pin] = {}
    for node in graph.nodes:
        if node.kind == "input":
            known[node.outputs[0]] = next(fed)[0]
        elif node.kind in ("parameter", "buffer") or node.of_parameters:
            known.update(dict.fromkeys(node.outputs, REPLICATED))
        elif node.kind in ("call", HUB):
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
    machine: Machine,
    options: Options,
    found: Found,
    mode: str,
    baseline: tuple[Found, Options] | None,
    limit: float,
    strategies: dict[str, str],
) -> Plan:
    solution, states = found
    plan = Plan(
        graph, mesh, machine, options, states, mode, solution.seconds, solution.nbytes, solution.bound_s
    )
    plan.limit_bytes, plan.strategies = limit, strategies
    if baseline is not None:
        plain = baseline[0][0]
        plan.baseline_nbytes = plain.nbytes
        plan.baseline_s = plain.seconds if plain.nbytes <= limit else None
    return plan


def strategy_text(strategy: Strategy) -> str:
    """A strategy as a plan's file has it."""
    return str(dict(strategy) if isinstance(strategy, Mapping) else tuple(tuple(cut) for cut in strategy))


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
