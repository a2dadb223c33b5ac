"""The best choice of a problem: exact elimination of variables, and a memory limit that is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muster.parallel.planning.problem import Matrix, Problem

WIDEST_TABLE = 40_000_000
_ROUNDS = 30


class TooWide(ValueError):  # noqa: N818 - says what is wrong with the problem
    """The graph is too connected for exact elimination on this mesh."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice, and how good it is.

    Attributes:
        choice: index of a state for each node.
        seconds: predicted for a step.
        nbytes: predicted for each rank.
        bound_s: no choice within the memory limit is faster than this.
    """

    choice: list[int]
    seconds: float
    nbytes: float
    bound_s: float

    @property
    def gap(self) -> float:
        """By what share a better choice might be faster, at most."""
        return max(0.0, 1 - self.bound_s / self.seconds) if self.seconds else 0.0


def solve(problem: Problem, limit_bytes: float | None = None) -> Solution | None:
    """The fastest choice whose memory stays within the limit; None: none does.

    Without a binding limit it is the exact optimum. With one it comes from the exact optima with a price on
    memory, which also bound what is possible, and is then refined.

    Raises:
        TooWide: a table of the elimination would not fit into memory.
    """
    eliminator = _Eliminator(problem)
    free = eliminator.best(0.0)
    free_s = problem.seconds(free)
    if limit_bytes is None or problem.nbytes(free) <= limit_bytes:
        return None if math.isinf(free_s) else Solution(free, free_s, problem.nbytes(free), free_s)
    return _within(problem, eliminator, free, limit_bytes)


def _within(
    problem: Problem, eliminator: _Eliminator, free: list[int], limit_bytes: float
) -> Solution | None:
    lean = _leanest(problem, eliminator)
    if problem.nbytes(lean) > limit_bytes or math.isinf(problem.seconds(lean)):
        return None
    bound, fast, best = problem.seconds(free), free, lean
    for _ in range(_ROUNDS):
        excess = problem.nbytes(fast) - problem.nbytes(lean)
        price = (problem.seconds(lean) - problem.seconds(fast)) / excess if excess > 0 else 0.0
        if price <= 0:
            break
        found = eliminator.best(price)
        seconds, nbytes = problem.seconds(found), problem.nbytes(found)
        bound = max(bound, seconds + price * (nbytes - limit_bytes))
        line = problem.seconds(fast) + price * problem.nbytes(fast)
        if nbytes <= limit_bytes:
            lean = found
            best = found if seconds < problem.seconds(best) else best
        else:
            fast = found
        if seconds + price * nbytes >= line - 1e-12 * abs(line):
            break  # the price at which both are best: the bound cannot rise
    best = _refined(problem, best, fast, limit_bytes)
    return Solution(best, problem.seconds(best), problem.nbytes(best), bound)


def _leanest(problem: Problem, eliminator: _Eliminator) -> list[int]:
    """The choice with the least memory, among those that can be run at all."""
    states = [state for each in problem.states for state in each]
    seconds = sum(max((s.seconds for s in each), default=0.0) for each in problem.states)
    seconds += sum(float(m[np.isfinite(m)].max(initial=0.0)) for _, _, m in problem.edges)
    smallest = min((s.nbytes for s in states if s.nbytes > 0), default=1.0)
    return eliminator.best(1e3 * (seconds + 1e-9) / smallest)


def _refined(problem: Problem, lean: list[int], fast: list[int], limit_bytes: float) -> list[int]:
    """Takes the fast choice layer by layer where memory allows, then node by node."""
    best = lean
    count = len(lean)
    stride = max(1, count // 200)
    for cut in range(0, count + 1, stride):
        for mixed in (fast[:cut] + lean[cut:], lean[:cut] + fast[cut:]):
            if problem.nbytes(mixed) <= limit_bytes and problem.seconds(mixed) < problem.seconds(best):
                best = mixed
    around: list[list[tuple[int, Matrix]]] = [[] for _ in range(count)]
    for u, v, matrix in problem.edges:
        around[u].append((v, matrix))
        around[v].append((u, matrix.T))
    choice, used = list(best), problem.nbytes(best)
    for _ in range(4):
        changed = False
        for node, states in enumerate(problem.states):
            costs = np.array([state.seconds for state in states])
            for other, matrix in around[node]:
                costs = costs + matrix[:, choice[other]]
            memory = np.array([state.nbytes for state in states])
            now = choice[node]
            legal = used - states[now].nbytes + memory <= limit_bytes
            better = np.where(legal, costs, np.inf)
            found = int(better.argmin())
            if better[found] < costs[now] - 1e-15:
                used += states[found].nbytes - states[now].nbytes
                choice[node] = found
                changed = True
        if not changed:
            break
    return choice


class _Eliminator:
    """Minimises sums over nodes and edges by eliminating one node after the other.

    A node goes with all tables that mention it: they are added up, and replaced by the minimum over its
    states as a table of its neighbours. The order is found once, by the size of the table that a node needs.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sizes = [len(states) for states in problem.states]
        self._edges: dict[tuple[int, int], Matrix] = {}
        self._fixed: dict[int, Matrix] = {}  # what edges to nodes with one state add to the others
        for u, v, matrix in problem.edges:
            if self._sizes[u] == 1 or self._sizes[v] == 1:
                node, costs = (v, matrix[0]) if self._sizes[u] == 1 else (u, matrix[:, 0])
                self._fixed[node] = self._fixed[node] + costs if node in self._fixed else costs
                continue
            pair, table = ((u, v), matrix) if u < v else ((v, u), matrix.T)
            self._edges[pair] = self._edges[pair] + table if pair in self._edges else table
        self._order = self._plan()

    def _plan(self) -> list[tuple[int, tuple[int, ...]]]:
        near: list[set[int]] = [set() for _ in self._sizes]
        for u, v in self._edges:
            near[u].add(v)
            near[v].add(u)

        def width(node: int) -> int:
            return math.prod(self._sizes[other] for other in near[node]) * self._sizes[node]

        widths = {node: width(node) for node, size in enumerate(self._sizes) if size > 1}
        order = []
        while widths:
            node = min(widths, key=lambda each: widths[each])
            if widths[node] > WIDEST_TABLE:
                raise TooWide(
                    f"the search would need a table of {widths[node]:,} entries at"
                    f" {self._problem.graph.nodes[node].name}"
                )
            del widths[node]
            scope = tuple(sorted(near[node]))
            order.append((node, scope))
            for other in scope:
                near[other] |= set(scope)
                near[other] -= {other, node}
            for other in scope:
                widths[other] = width(other)
        return order

    def best(self, price: float) -> list[int]:
        """The choice with the least seconds plus ``price`` times bytes."""
        tables: list[list[tuple[tuple[int, ...], Matrix]]] = [[] for _ in self._sizes]
        rank = {node: place for place, (node, _) in enumerate(self._order)}

        def put(scope: tuple[int, ...], table: Matrix) -> None:
            tables[min(scope, key=lambda node: rank[node])].append((scope, table))

        for pair, matrix in self._edges.items():
            put(pair, matrix)
        chosen: list[tuple[int, tuple[int, ...], Matrix]] = []
        for node, scope in self._order:
            axes = (node, *scope)
            states = self._problem.states[node]
            own = np.array([state.seconds + price * state.nbytes for state in states])
            own = own + self._fixed.get(node, 0.0)
            total = own.reshape(len(states), *(1,) * len(scope))
            for names, table in tables[node]:
                total = total + _aligned(names, table, axes)
            tables[node] = []
            total = np.broadcast_to(total, tuple(self._sizes[each] for each in axes))
            chosen.append((node, scope, total.argmin(0)))
            if scope:
                put(scope, total.min(0))
        choice = [0] * len(self._sizes)
        for node, scope, pick in reversed(chosen):
            choice[node] = int(pick[tuple(choice[other] for other in scope)])
        return choice


def _aligned(names: Sequence[int], table: Matrix, axes: Sequence[int]) -> Matrix:
    """A table with its dimensions in the order of ``axes``, those that it lacks of size 1."""
    places = sorted(range(len(names)), key=lambda i: axes.index(names[i]))
    shape = [1] * len(axes)
    for i in places:
        shape[axes.index(names[i])] = table.shape[i]
    aligned: Matrix = table.transpose(places).reshape(shape)
    return aligned
