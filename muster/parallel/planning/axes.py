"""Named axes of operators, what splitting one means, and operators as rules see them."""

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
    """What one mesh dimension may do to an operator.

    Attributes:
        name: the axis that is split; ``WHOLE``: every rank computes the same.
        size: what the number of slices of this axis must divide; 0: any.
        ins: the entry of each input's layout.
        in_grads: the entry of the layout of each input's gradient.
        outs: the entry of each output's layout.
        out_grads: the entry of the layout of each output's gradient.
    """

    name: str
    size: int
    ins: tuple[Placement, ...]
    in_grads: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    out_grads: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis: the dimension that it is of each input and output; None: not there.

    An output that is ``EXCHANGED`` comes out whole: the ranks exchange what is needed within the operator.
    """

    name: str
    size: int
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]

    def mode(self) -> Mode:
        """What splitting this axis means."""
        return Mode(
            self.name,
            self.size,
            tuple(REPLICATE if d is None else d for d in self.ins),
            tuple(PARTIAL if d is None else d for d in self.ins),
            tuple(PARTIAL if d is None else REPLICATE if d == EXCHANGED else d for d in self.outs),
            tuple(REPLICATE if d in (None, EXCHANGED) else d for d in self.outs),
        )


class OperatorCall:
    """An operator as rules see it: names, arguments and shapes."""

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
        """An argument by position or name."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def dim(self, value: int, of: Shape | None = None) -> int:
        """A dimension of the first input counted from 0."""
        return value % max(1, len(self.ins[0] if of is None else of))

    def dims(self, value: Any) -> list[int]:
        """Dimensions of the first input counted from 0; None: all."""
        if value is None or value == [] or isinstance(value, bool):
            return list(range(len(self.ins[0])))
        return [self.dim(d) for d in ([value] if isinstance(value, int) else value)]

    def one(self, position: int, dim: int | None) -> tuple[int | None, ...]:
        """``dim`` for one input, None for the others."""
        return tuple(dim if i == position else None for i in range(len(self.ins)))


Rule = Callable[[OperatorCall], "list[Axis] | None"]
RULES: dict[str, Rule] = {}

MEAN = 1
"""The reduction of a loss that is its mean, as torch numbers them."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators."""

    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register
