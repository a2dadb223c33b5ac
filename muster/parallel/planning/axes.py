"""Named axes of operators, the layouts that splitting one gives, and the view of operators that rules get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.parallel.planning.graph import Graph, Node
from muster.parallel.planning.layouts import PARTIAL, REPLICATE, Placement, Shape

WHOLE = "-"
EXCHANGED = -1


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run an operator along a mesh dimension.

    Attributes:
        name: the axis that is split; ``WHOLE`` if every rank computes the same.
        size: a number that the axis's number of slices must divide; 0 for any.
        ins: the placement of each input.
        in_grads: the placement of each input's gradient.
        outs: the placement of each output.
        out_grads: the placement of each output's gradient.
    """

    name: str
    size: int
    ins: tuple[Placement, ...]
    in_grads: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    out_grads: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis of an operator.

    Attributes:
        name: the axis's name.
        size: a number that the number of slices must divide.
        ins: the dimension of each input that is this axis; None if it does not have it.
        outs: the dimension of each output that is this axis; None if it does not have it, ``EXCHANGED`` if it
            is whole on all ranks because they exchange what is needed within the operator.
    """

    name: str
    size: int
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]

    def mode(self) -> Mode:
        """Returns the placements that splitting this axis gives."""
        return Mode(
            self.name,
            self.size,
            tuple(REPLICATE if d is None else d for d in self.ins),
            tuple(PARTIAL if d is None else d for d in self.ins),
            tuple(PARTIAL if d is None else REPLICATE if d == EXCHANGED else d for d in self.outs),
            tuple(REPLICATE if d in (None, EXCHANGED) else d for d in self.outs),
        )


class OperatorCall:
    """The view of an operator that rules get: name, arguments, shapes and dtypes."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.op = node.op
        self.args = node.args
        self.kwargs = node.kwargs
        self.ins: list[Shape] = [graph.values[v].shape for v in node.inputs]
        self.outs: list[Shape] = [graph.values[v].shape for v in node.outputs]
        self.floating = [graph.values[v].floating for v in node.inputs]
        self.dtypes = [graph.values[v].dtype for v in node.inputs]
        self.makers = [graph.source(v) for v in node.inputs]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Returns an argument by position or name."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def dim(self, value: int, of: Shape | None = None) -> int:
        """Returns a dimension as a number from 0, of ``of`` or else of the first input."""
        return value % max(1, len(self.ins[0] if of is None else of))

    def dims(self, value: Any) -> list[int]:
        """Returns dimensions of the first input as numbers from 0; all of them for None."""
        if value is None or value == [] or isinstance(value, bool):
            return list(range(len(self.ins[0])))
        return [self.dim(d) for d in ([value] if isinstance(value, int) else value)]

    def one(self, position: int, dim: int | None) -> tuple[int | None, ...]:
        """Returns ``dim`` for the input at ``position``, None for the others."""
        return tuple(dim if i == position else None for i in range(len(self.ins)))


Rule = Callable[[OperatorCall], "list[Axis] | None"]
RULES: dict[str, Rule] = {}

MEAN = 1
"""Torch's number of the reduction "mean" of losses."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a rule for operators."""

    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register
