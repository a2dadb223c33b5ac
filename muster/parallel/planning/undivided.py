"""Finds operators that every rank computes whole because no rule says how to split them, and their cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.parallel.planning.buckets import move_collectives
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.graph import Graph, Node
from muster.parallel.planning.layouts import Mesh
from muster.parallel.planning.problem import State
from muster.parallel.planning.rules import LINEAR_VIEWS, modes_of

MATTERS = 0.01
"""The share of a step's time from which an operator that is kept whole is named."""


@dataclass(frozen=True, slots=True)
class Undivided:
    """An operator of the graph that no rule can split.

    Attributes:
        node: its name in the graph.
        op: the operator.
        where: its module, or else its source line.
        seconds: its time in a step, with the collectives that gather its inputs.
        share: its share of the step's time.
    """

    node: str
    op: str
    where: str
    seconds: float
    share: float

    def __str__(self) -> str:
        """Returns the operator with its place and share."""
        place = f" of {self.where}" if self.where else ""
        return f"{self.op}{place} ({self.share:.1%})"


def undivided(
    graph: Graph, states: Sequence[State], mesh: Mesh, machine: Hardware, total_s: float
) -> list[Undivided]:
    """Returns the operators that cannot be split and take at least ``MATTERS`` of a step, the slowest first.

    Args:
        graph: the graph of the forward pass.
        states: the chosen state of each node.
        mesh: the mesh's sizes; with one rank the result is empty.
        machine: the machine's costs.
        total_s: the step's time in seconds.
    """
    found = []
    for index, (node, state) in enumerate(zip(graph.nodes, states, strict=True)):
        if math.prod(mesh) == 1 or not _cannot(graph, node):
            continue
        seconds = state.seconds
        for each in move_collectives(graph, states, mesh, index):
            seconds += machine.along_s(each.kind, each.dims, mesh, each.nbytes)
        share = seconds / total_s if total_s else 0.0
        if share >= MATTERS:
            found.append(Undivided(node.name, node.op, node.module or node.line, seconds, share))
    return sorted(found, key=lambda each: -each.share)


def _cannot(graph: Graph, node: Node) -> bool:
    """Whether no axis of an operator can be split.

    False for views, for operators on single numbers, and for those that depend on parameters only.
    """
    if node.kind != "call" or node.op in LINEAR_VIEWS or not node.inputs or node.op.endswith("_"):
        return False
    if node.of_parameters or all(graph.values[v].numel <= 1 for v in node.inputs):
        return False
    return not any(mode.size for mode in modes_of(graph, node)[0])
