"""Searches the fastest choice of states by exact variable elimination, within a memory limit."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from muster.parallel.planning.problem import Matrix, Problem

WIDEST_TABLE = 40_000_000
_ROUNDS = 30
_CUTS = 25
_MOMENTS = (1.0, 0.5)
"""Weights of the memory at the forward pass's end, against that at the backward pass's, when it is priced."""


class TooWide(ValueError):  # noqa: N818 - says what is wrong with the problem
    """The graph is too connected for exact elimination on this mesh."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of states, with its predicted costs.

    Attributes:
        choice: the index of the chosen state of each node.
        seconds: the predicted time of a step.
        nbytes: the predicted memory of each rank, in bytes.
        bound_s: a lower bound: no choice within the memory limit is faster.
    """

    choice: list[int]
    seconds: float
    nbytes: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The largest share by which a better choice might be faster, 0 to 1."""
        return max(0.0, 1 - self.bound_s / self.seconds) if self.seconds else 0.0


Peak = Callable[[Sequence[int]], float]


def solve(problem: Problem, limit_bytes: float | None = None, peak: Peak | None = None) -> Solution | None:
    """Returns the fastest choice whose memory stays within the limit; None if no choice does.

    If the limit does not bind, this is the exact optimum. Otherwise it starts from exact optima with a price
    on memory, which also give the bound, and is then refined.

    Args:
        problem: the states and costs.
        limit_bytes: the memory limit of a rank in bytes; None for no limit.
        peak: returns a choice's peak memory in bytes, at least ``problem.nbytes``; None for
            ``problem.nbytes``.

    Raises:
        TooWide: a table of the elimination would not fit into memory.
    """
    eliminator = Eliminator(problem)
    free = eliminator.best()
    free_s = problem.seconds(free)
    within = _Within(problem, eliminator, free, math.inf if limit_bytes is None else limit_bytes, peak)
    free_bytes = within.peak(free)
    if free_bytes <= within.limit:
        return None if math.isinf(free_s) else Solution(free, free_s, free_bytes, free_s)
    return within.best()


def leanest(problem: Problem, peak: Peak) -> tuple[list[int], float]:
    """Returns the choice with the least memory that prices on memory find, and its peak in bytes."""
    eliminator = Eliminator(problem)
    within = _Within(problem, eliminator, [0] * len(problem.states), 0.0, peak)
    choices = [within.lean(share) for share in _MOMENTS]
    return min(((choice, peak(choice)) for choice in choices), key=operator.itemgetter(1))


@dataclass(slots=True)
class _Tried:
    """A choice with its seconds, the bytes on which a price was put, and its peak in bytes."""

    choice: list[int]
    seconds: float
    priced: float
    nbytes: float


class _Within:
    """The search within a memory limit.

    The memory at the end of the forward pass and that at the end of the backward pass are sums over nodes, so
    a price can be put on them. Neither exceeds the peak, so the optima with a price are lower bounds of the
    choices that fit. Whether a choice fits is decided by its peak.
    """

    def __init__(
        self, problem: Problem, eliminator: Eliminator, free: list[int], limit: float, peak: Peak | None
    ) -> None:
        self.problem, self.limit = problem, limit
        self._eliminator, self._free = eliminator, free
        self._peak = peak or problem.nbytes
        self._peaks: dict[tuple[int, ...], float] = {}
        self._fast = free

    def peak(self, choice: Sequence[int]) -> float:
        """The most bytes at any moment; if these are more than the limit, some that are."""
        key = tuple(choice)
        if key not in self._peaks:
            least = self.problem.nbytes(choice)  # so a step need not be played to see that it does not fit
            self._peaks[key] = least if least > self.limit else self._peak(choice)
        return self._peaks[key]

    def best(self) -> Solution | None:
        """Returns the best choice that fits; None if there is none."""
        best: _Tried | None = None
        bound = self.problem.seconds(self._free)
        for share in _MOMENTS:
            best, bound = self._along(share, best, bound)
            if best is not None and not self._backward_counts(best):
                break
        if best is None:
            return None
        choice = self._refined(best.choice)
        return Solution(choice, self.problem.seconds(choice), self.peak(choice), bound)

    def _backward_counts(self, found: _Tried) -> bool:
        first, last = self.problem.nbytes_at_ends(found.choice)
        return last > first

    def _along(self, share: float, best: _Tried | None, bound: float) -> tuple[_Tried | None, float]:
        """Searches with a price on a mean of the memory at both ends.

        Args:
            share: the weight of the forward pass's end.
            best: the best choice that was found so far.
            bound: the lower bound so far, in seconds.

        Returns:
            The best choice and the bound after this search.
        """
        weights = self._weights(share)

        def found_at(price: float) -> _Tried:
            choice = self._eliminator.best(price, weights)
            priced = float(sum(w[c] for w, c in zip(weights, choice, strict=True)))
            return _Tried(choice, self.problem.seconds(choice), priced, self.peak(choice))

        lean, fast = found_at(self._dear(weights)), _Tried(self._free, bound, 0.0, math.inf)
        fast.seconds = self.problem.seconds(self._free)
        fast.priced = float(sum(w[c] for w, c in zip(weights, self._free, strict=True)))
        if math.isinf(lean.seconds) or lean.nbytes > self.limit:
            return best, bound
        best = lean if best is None or lean.seconds < best.seconds else best
        for _ in range(_ROUNDS):
            excess = fast.priced - lean.priced
            price = (lean.seconds - fast.seconds) / excess if excess > 0 else 0.0
            if price <= 0:
                break
            found = found_at(price)
            bound = max(bound, found.seconds + price * (found.priced - self.limit))
            line = fast.seconds + price * fast.priced
            if found.nbytes <= self.limit:
                lean = found
                best = found if found.seconds < best.seconds else best
            else:
                fast = found
            if found.seconds + price * found.priced >= line - 1e-12 * abs(line):
                break  # the price at which both are best: the bound cannot rise
        self._fast = fast.choice
        return best, bound

    def lean(self, share: float) -> list[int]:
        """Returns the choice with the least mean of the memory at both ends; ``share`` weighs the first."""
        weights = self._weights(share)
        return self._eliminator.best(self._dear(weights), weights)

    def _weights(self, share: float) -> list[Matrix]:
        return [
            np.array([share * s.nbytes + (1 - share) * (s.nbytes + s.grad_nbytes) * held for s in states])
            for states, held in zip(self.problem.states, self._held(), strict=True)
        ]

    def _held(self) -> list[bool]:
        return [node.kind in ("parameter", "buffer") for node in self.problem.graph.nodes]

    def _dear(self, weights: Sequence[Matrix]) -> float:
        """Returns a price at which memory outweighs all time, except for choices that cannot be run."""
        problem = self.problem
        seconds = sum(max((s.seconds for s in each), default=0.0) for each in problem.states)
        seconds += sum(float(m[np.isfinite(m)].max(initial=0.0)) for _, _, m in problem.edges)
        smallest = min((float(w[w > 0].min()) for w in weights if (w > 0).any()), default=1.0)
        return 1e3 * (seconds + 1e-9) / smallest

    # ------------------------------------------------------------ refining

    def _refined(self, lean: list[int]) -> list[int]:
        """Replaces states by those of the fast choice where memory allows, first by layers, then by nodes."""
        best, fast = lean, self._fast
        seconds = self.problem.seconds(best)
        count = len(lean)
        for cut in range(0, count + 1, max(1, count // _CUTS)):
            for mixed in (fast[:cut] + lean[cut:], lean[:cut] + fast[cut:]):
                mixed_s = self.problem.seconds(mixed)
                if mixed_s < seconds and self.peak(mixed) <= self.limit:
                    best, seconds = mixed, mixed_s
        refined = self._node_by_node(best)
        return refined if self.peak(refined) <= self.limit else best

    def _node_by_node(self, best: Sequence[int]) -> list[int]:
        problem, held = self.problem, self._held()
        around: list[list[tuple[int, Matrix]]] = [[] for _ in best]
        for u, v, matrix in problem.edges:
            around[u].append((v, matrix))
            around[v].append((u, matrix.T))
        choice = list(best)
        first, last = problem.nbytes_at_ends(choice)
        more = self.peak(choice) - max(first, last)  # the peak between both ends, assumed not to change
        for _ in range(4):
            changed = False
            for node, states in enumerate(problem.states):
                if len(states) == 1:
                    continue
                costs = np.array([state.seconds for state in states])
                for other, matrix in around[node]:
                    costs = costs + matrix[:, choice[other]]
                memory = np.array([state.nbytes for state in states])
                later = np.array([(state.nbytes + state.grad_nbytes) * held[node] for state in states])
                now = choice[node]
                legal = (first - memory[now] + memory + more <= self.limit) & (
                    last - later[now] + later + more <= self.limit
                )
                better = np.where(legal, costs, np.inf)
                found = int(better.argmin())
                if better[found] < costs[now] - 1e-15:
                    first += memory[found] - memory[now]
                    last += later[found] - later[now]
                    choice[node] = found
                    changed = True
            if not changed:
                break
        return choice


class Eliminator:
    """Minimises a sum over nodes and edges by eliminating one node after the other.

    A node goes with all tables that mention it: they are added up, and replaced by the minimum over its
    states as a table of its neighbours. The order is found once, by the size of the table that a node needs.
    Layers that come again have the same tables, from which the same comes: that is worked out once.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.sizes = [len(states) for states in problem.states]
        self._seconds = [np.array([state.seconds for state in states]) for states in problem.states]
        self._edges: dict[tuple[int, int], Matrix] = {}
        self._fixed: dict[int, Matrix] = {}  # what edges to nodes with one state add to the others
        for u, v, matrix in problem.edges:
            if self.sizes[u] == 1 or self.sizes[v] == 1:
                node, costs = (v, matrix[0]) if self.sizes[u] == 1 else (u, matrix[:, 0])
                self._fixed[node] = self._fixed[node] + costs if node in self._fixed else costs
                continue
            pair, table = ((u, v), matrix) if u < v else ((v, u), matrix.T)
            self._edges[pair] = self._edges[pair] + table if pair in self._edges else table
        self.order = self._plan()
        alike = _Alike()
        self._alike = {pair: alike.number(table) for pair, table in self._edges.items()}

    def _plan(self) -> list[tuple[int, tuple[int, ...]]]:
        near: list[set[int]] = [set() for _ in self.sizes]
        for u, v in self._edges:
            near[u].add(v)
            near[v].add(u)

        def width(node: int) -> int:
            return math.prod(self.sizes[other] for other in near[node]) * self.sizes[node]

        widths = {node: width(node) for node, size in enumerate(self.sizes) if size > 1}
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

    def best(self, price: float = 0.0, weights: Sequence[Matrix] | None = None) -> list[int]:
        """The choice with the least seconds plus ``price`` times the weights of states."""
        tables: list[list[tuple[tuple[int, ...], Matrix, object]]] = [[] for _ in self.sizes]
        rank = {node: place for place, (node, _) in enumerate(self.order)}
        alike, known = _Alike(), dict[object, tuple[Matrix, Matrix]]()

        def put(scope: tuple[int, ...], table: Matrix, key: object) -> None:
            tables[min(scope, key=lambda node: rank[node])].append((scope, table, key))

        for pair, matrix in self._edges.items():
            put(pair, matrix, self._alike[pair])
        chosen: list[tuple[int, tuple[int, ...], Matrix]] = []
        for node, scope in self.order:
            axes = (node, *scope)
            own = self._seconds[node] + self._fixed.get(node, 0.0)
            if weights is not None:
                own = own + price * weights[node]
            sizes = tuple(self.sizes[each] for each in axes)
            parts = tuple((key, tuple(map(axes.index, names))) for names, _, key in tables[node])
            key = alike.number_of((alike.number(own), sizes, parts))
            if key not in known:
                total = own.reshape(len(own), *(1,) * len(scope))
                for names, table, _ in tables[node]:
                    total = total + _aligned(names, table, axes)
                total = np.broadcast_to(total, sizes)
                known[key] = total.argmin(0), total.min(0)
            tables[node] = []
            pick, least = known[key]
            chosen.append((node, scope, pick))
            if scope:
                put(scope, least, ("made", key))
        choice = [0] * len(self.sizes)
        for node, scope, pick in reversed(chosen):
            choice[node] = int(pick[tuple(choice[other] for other in scope)])
        return choice


class _Alike:
    """Numbers what is equal alike."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._of: dict[int, tuple[Matrix, int]] = {}  # by address; held, so that no other takes it

    def number_of(self, key: object) -> int:
        """The number of something that can be a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def number(self, table: Matrix) -> int:
        """The number of a table, by its contents."""
        if id(table) not in self._of:
            self._of[id(table)] = table, self.number_of((table.shape, table.tobytes()))
        return self._of[id(table)][1]


def _aligned(names: Sequence[int], table: Matrix, axes: Sequence[int]) -> Matrix:
    """Returns a table with its dimensions in the order of ``axes``; those that it lacks have size 1."""
    places = sorted(range(len(names)), key=lambda i: axes.index(names[i]))
    shape = [1] * len(axes)
    for i in places:
        shape[axes.index(names[i])] = table.shape[i]
    aligned: Matrix = table.transpose(places).reshape(shape)
    return aligned
