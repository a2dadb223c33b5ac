"""Layouts: which part of a tensor each rank of a mesh holds, and how a tensor gets from one to another.

A mesh is a tuple of sizes; world ranks are numbered row by row, so the last mesh dimension has neighbouring
ranks. A layout has one placement per mesh dimension, as DTensor has them: ``REPLICATE`` (the same on all
ranks along it), ``PARTIAL`` (the sum of the ranks' tensors is meant) or a shard: the number of the tensor
dimension that is split along it. Where several mesh dimensions split one tensor dimension, the first one does
so first.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REPLICATE = "R"  # the letters of saved plans
PARTIAL = "P"
Placement = str | int
Placements = tuple[Placement, ...]
Mesh = tuple[int, ...]
Shape = tuple[int, ...]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One step of a move.

    Attributes:
        kind: one of ``COLLECTIVES``, or without communication: "slice" (a rank takes its part) or "share" (a
            replicated tensor becomes a sum of equal parts).
        dims: the mesh dimensions along which ranks take part.
        source: the tensor dimension that is gathered, or -1.
        target: the tensor dimension that is divided, or -1.
        divisor: the larger of the buffers that the communicator gets has the tensor's elements over this.
    """

    kind: str
    dims: tuple[int, ...]
    source: int
    target: int
    divisor: int


def replicated(mesh: Mesh) -> Placements:
    """The layout of a tensor that every rank has whole."""
    return (REPLICATE,) * len(mesh)


@functools.lru_cache(maxsize=100_000)
def parts(layout: Placements, mesh: Mesh) -> int:
    """Into how many parts a tensor is divided."""
    return math.prod(size for size, entry in zip(mesh, layout, strict=True) if isinstance(entry, int))


@functools.lru_cache(maxsize=100_000)
def slices(layout: Placements, mesh: Mesh, ndim: int) -> Shape:
    """The number of slices of each tensor dimension."""
    return tuple(
        math.prod(size for size, entry in zip(mesh, layout, strict=True) if entry == d) for d in range(ndim)
    )


@functools.lru_cache(maxsize=100_000)
def fits(layout: Placements, mesh: Mesh, shape: Shape) -> bool:
    """Whether all dimensions exist and divide evenly."""
    if any(isinstance(entry, int) and entry >= len(shape) for entry in layout):
        return False
    cuts = slices(layout, mesh, len(shape))
    return all(size % cut == 0 for size, cut in zip(shape, cuts, strict=True))


def local_shape(layout: Placements, mesh: Mesh, shape: Shape) -> Shape:
    """The shape of one rank's part."""
    cuts = slices(layout, mesh, len(shape))
    return tuple(size // cut for size, cut in zip(shape, cuts, strict=True))


def coordinates(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """A rank's place in the mesh."""
    place = []
    for size in reversed(mesh):
        place.append(rank % size)
        rank //= size
    return tuple(reversed(place))


def group_ranks(dims: Sequence[int], mesh: Mesh) -> list[tuple[int, ...]]:
    """The groups of world ranks that differ along ``dims`` only, in order of their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(mesh)):
        place = coordinates(rank, mesh)
        rest = tuple(c for d, c in enumerate(place) if d not in dims)
        groups.setdefault(rest, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


@functools.lru_cache(maxsize=10_000)
def hosts_of(dims: tuple[int, ...], mesh: Mesh, host_ranks: int) -> int:
    """On how many hosts the ranks are that differ along ``dims`` only, where neighbours share hosts."""
    if math.prod(mesh) <= host_ranks:
        return 1
    return max(len({rank // host_ranks for rank in ranks}) for ranks in group_ranks(dims, mesh))


def factorisations(world: int, dimensions: int = 2) -> list[Mesh]:
    """The meshes of ``world`` ranks with at most this many dimensions, those with fewer first."""
    found: list[Mesh] = [(world,)]
    for count in range(2, dimensions + 1):
        for sizes in itertools.product([n for n in range(2, world) if world % n == 0], repeat=count):
            if math.prod(sizes) == world:
                found.append(sizes)
    return found


def layout_text(layout: Placements) -> str:
    """A layout in few characters, such as ``S0,R``."""
    return ",".join(f"S{entry}" if isinstance(entry, int) else entry for entry in layout)


# ---------------------------------------------------------------- moves


def plan_move(
    source: Placements, target: Placements, mesh: Mesh, shape: Shape
) -> tuple[RedistributionStep, ...] | None:
    """The steps that bring a tensor from one layout to another; None: there are none.

    Both layouts must fit the shape. Nothing becomes partial but by sharing out what is replicated.
    """
    if source == target:
        return ()
    world = math.prod(mesh)
    return _plan_move(source, target, mesh, tuple(math.gcd(size, world * world) for size in shape))


@functools.lru_cache(maxsize=200_000)
def _plan_move(
    source: Placements, target: Placements, mesh: Mesh, shape: Shape
) -> tuple[RedistributionStep, ...] | None:
    """The cheapest path, by volume and then by the number of collectives, among the legal steps."""
    best: dict[Placements, float] = {source: 0.0}
    queue: list[tuple[float, int, Placements, tuple[RedistributionStep, ...]]] = [(0.0, 0, source, ())]
    order = itertools.count(1)
    while queue:
        cost, _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if cost > best[layout]:
            continue
        for step, after in _steps(layout, target, mesh, shape):
            total = cost + _volume(step, mesh)
            if total < best.get(after, math.inf):
                best[after] = total
                heapq.heappush(queue, (total, next(order), after, (*path, step)))
    return None


def _volume(step: RedistributionStep, mesh: Mesh) -> float:
    if step.kind not in COLLECTIVES:
        return 1e-9
    ranks = math.prod(mesh[d] for d in step.dims)
    share = (ranks - 1) / ranks / step.divisor
    factor = {"all_reduce": 2.0, "all_to_all": 1.3}.get(step.kind, 1.0)
    return factor * share + 1e-3


def _steps(
    layout: Placements, target: Placements, mesh: Mesh, shape: Shape
) -> Iterator[tuple[RedistributionStep, Placements]]:
    """What can be done to a tensor in ``layout`` on its way to ``target``."""
    whole = parts(layout, mesh)
    cuts = slices(layout, mesh, len(shape))
    partial = tuple(m for m, entry in enumerate(layout) if entry == PARTIAL and target[m] != PARTIAL)
    for count in range(1, len(partial) + 1):
        for dims in itertools.combinations(partial, count):
            after = tuple(REPLICATE if m in dims else entry for m, entry in enumerate(layout))
            yield RedistributionStep("all_reduce", dims, -1, -1, whole), after
    for m, (entry, wanted) in enumerate(zip(layout, target, strict=True)):
        size = mesh[m]

        def become(value: Placement, m: int = m) -> Placements:
            return (*layout[:m], value, *layout[m + 1 :])

        def innermost(dim: Placement, m: int = m) -> bool:
            return all(layout[k] != dim for k in range(m + 1, len(mesh)))

        divisible = (
            isinstance(wanted, int)
            and entry != wanted
            and shape[wanted] % (cuts[wanted] * size) == 0
            and innermost(wanted)
        )
        if entry == REPLICATE and wanted == PARTIAL:
            yield RedistributionStep("share", (m,), -1, -1, 1), become(PARTIAL)
        if entry == REPLICATE and isinstance(wanted, int) and divisible:
            yield RedistributionStep("slice", (m,), -1, wanted, 1), become(wanted)
        if entry == PARTIAL and isinstance(wanted, int) and divisible:
            yield RedistributionStep("reduce_scatter", (m,), -1, wanted, whole), become(wanted)
        if isinstance(entry, int) and innermost(entry):
            yield RedistributionStep("all_gather", (m,), entry, -1, whole // size), become(REPLICATE)
            if isinstance(wanted, int) and divisible:
                yield RedistributionStep("all_to_all", (m,), entry, wanted, whole), become(wanted)
