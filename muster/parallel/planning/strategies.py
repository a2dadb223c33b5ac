"""Checks the strategies that users fix for operators, in MindSpore's form or by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.errors import SettingsError
from muster.parallel.planning.axes import Axis
from muster.parallel.planning.graph import Graph, Node
from muster.parallel.planning.layouts import Mesh, Shape
from muster.parallel.planning.problem import Pin, State
from muster.parallel.planning.rules import axes_of

Slices = tuple[int, ...]
Strategy = tuple[Slices, ...] | Mapping[str, int]


def slices_by_axis(graph: Graph, node: Node, strategy: Strategy) -> dict[str, int]:
    """Returns a strategy as the number of slices by axis, without axes that are not split.

    Args:
        graph: the node's graph.
        node: the operator.
        strategy: the number of slices of each dimension of each input, as in MindSpore (a linear layer's
            weight may be given as stored, or as the second factor of a product), or slices by axis name.

    Raises:
        SettingsError: the strategy does not fit the operator; the message says why.
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
    """Returns the slices by axis, and a sentence about what is wrong; empty if nothing is."""
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
    """Returns the users' strategies as slices by axis, by operator.

    A strategy's name is that of an operator, or of a module. A module's name means its only operator that has
    parameters; if none has, its only operator.

    Raises:
        SettingsError: a name fits no operator or several, two strategies are for one operator, or a strategy
            does not fit its operator.
    """
    found = {}
    for name, strategy in strategies.items():
        node = _named(graph, name)
        if node.name in found:
            raise SettingsError(
                f"two strategies apply to {_what(node)}, one of them by the name {name!r}: remove one"
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
    raise SettingsError(f"there is no operator or module {name!r}; there are: {', '.join(known[:40])}")


def pin_of(mesh: Mesh, wanted: Mapping[str, int]) -> Pin:
    """Returns a pin that allows only states with these numbers of slices by axis, on this mesh."""

    def fits_wanted(node: Node, state: State) -> bool:
        counts: dict[str, int] = {}
        for size, axis in zip(mesh, state.modes, strict=True):
            counts[axis] = counts.get(axis, 1) * size
        if "sum" in counts or "grad" in counts:
            return False
        counts.pop("-", None)
        return counts == dict(wanted)

    return fits_wanted


def check_divides(mode: str, strategies: Mapping[str, Strategy]) -> None:
    """Checks that a mode uses strategies, if there are any.

    Raises:
        SettingsError: there are strategies, and the mode splits no operators.
    """
    if strategies and mode in ("data_parallel", "stand_alone"):
        raise SettingsError(
            f'mode "{mode}" divides no operators: the strategy of {next(iter(strategies))!r} needs'
            ' "semi_auto" or "auto"'
        )


def strategy_text(strategy: Strategy) -> str:
    """Returns a strategy as the text that a plan's file has."""
    return str(dict(strategy) if isinstance(strategy, Mapping) else tuple(tuple(cut) for cut in strategy))
