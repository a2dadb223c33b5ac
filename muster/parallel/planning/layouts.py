"""Layouts: which part of a tensor each rank of a mesh holds, and how a tensor is redistributed between two.

A mesh is a tuple of sizes; world ranks are numbered row by row, so ranks along the last mesh dimension are
neighbours. A layout has one placement per mesh dimension, like DTensor's: ``REPLICATE`` (the same tensor on
all ranks along it), ``PARTIAL`` (the tensor is the sum of the ranks' tensors) or a shard, given as the number
of the tensor dimension that is split along it. If several mesh dimensions split one tensor dimension, the
first mesh dimension splits it first.
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
    """One step of a redistribution.

    Attributes:
        kind: one of ``COLLECTIVES``, or a step without communication: "slice" (each rank takes its shard) or
            "share" (a replicated tensor becomes a sum of equal parts).
        dims: the mesh dimensions along which ranks take part.
        source: the tensor dimension that is gathered, or -1.
        target: the tensor dimension that is split, or -1.
        divisor: the number of elements of the whole tensor over that of the communicator's larger buffer.
    """

    kind: str
    dims: tuple[int, ...]
    source: int
    target: int
    divisor: int


def replicated(mesh: Mesh) -> Placements:
    """Returns the layout of a tensor that every rank holds whole."""
    return (REPLICATE,) * len(mesh)


@functools.lru_cache(maxsize=100_000)
def parts(layout: Placements, mesh: Mesh) -> int:
    """Returns the number of shards of a tensor."""
    return math.prod(size for size, entry in zip(mesh, layout, strict=True) if isinstance(entry, int))


@functools.lru_cache(maxsize=100_000)
def slices(layout: Placements, mesh: Mesh, ndim: int) -> Shape:
    """Returns the number of slices of each tensor dimension."""
    return tuple(
        math.prod(size for size, entry in zip(mesh, layout, strict=True) if entry == d) for d in range(ndim)
    )


@functools.lru_cache(maxsize=100_000)
def fits(layout: Placements, mesh: Mesh, shape: Shape) -> bool:
    """Whether all dimensions that the layout splits exist and divide evenly."""
    if any(isinstance(entry, int) and entry >= len(shape) for entry in layout):
        return False
    cuts = slices(layout, mesh, len(shape))
    return all(size % cut == 0 for size, cut in zip(shape, cuts, strict=True))


def local_shape(layout: Placements, mesh: Mesh, shape: Shape) -> Shape:
    """Returns the shape of one rank's shard."""
    cuts = slices(layout, mesh, len(shape))
    return tuple(size // cut for size, cut in zip(shape, cuts, strict=True))


def coordinates(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Returns a rank's coordinates in the mesh."""
    place = []
    for size in reversed(mesh):
        place.append(rank % size)
        rank //= size
    return tuple(reversed(place))


def group_ranks(dims: Sequence[int], mesh: Mesh) -> list[tuple[int, ...]]:
    """Returns the groups of world ranks that differ only along ``dims``, ordered by their first ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(mesh)):
        place = coordinates(rank, mesh)
        rest = tuple(c for d, c in enumerate(place) if d not in dims)
        groups.setdefault(rest, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


@functools.lru_cache(maxsize=10_000)
def hosts_of(dims: tuple[int, ...], mesh: Mesh, host_ranks: int) -> int:
    """Returns the number of hosts of a group of ranks that differ only along ``dims``.

    Args:
        dims: the mesh dimensions.
        mesh: the mesh's sizes.
        host_ranks: the number of neighbouring ranks that share a host.
    """
    if math.prod(mesh) <= host_ranks:
        return 1
    return max(len({rank // host_ranks for rank in ranks}) for ranks in group_ranks(dims, mesh))


def factorisations(world: int, dimensions: int = 2) -> list[Mesh]:
    """Returns the meshes of ``world`` ranks with up to ``dimensions`` dimensions, those with fewer first."""
    found: list[Mesh] = [(world,)]
    for count in range(2, dimensions + 1):
        for sizes in itertools.product([n for n in range(2, world) if world % n == 0], repeat=count):
            if math.prod(sizes) == world:
                found.append(sizes)
    return found


def layout_text(layout: Placements) -> str:
    """Returns a layout as a short text, such as ``S0,R``."""
    return ",".join(f"S{entry}" if isinstance(entry, int) else entry for entry in layout)


# ---------------------------------------------------------------- moves


def plan_move(
    source: Placements, target: Placements, mesh: Mesh, shape: Shape
) -> tuple[RedistributionStep, ...] | None:
    """Returns the cheapest steps that redistribute a tensor between two layouts; None if there are none.

    Both layouts must fit the shape. Only a replicated tensor can become partial.
    """
    if source == target:
        return ()
    world = math.prod(mesh)
    return _plan_move(source, target, mesh, tuple(math.gcd(size, world * world) for size in shape))


@functools.lru_cache(maxsize=200_000)
def _plan_move(
    source: Placements, target: Placements, mesh: Mesh, shape: Shape
) -> tuple[RedistributionStep, ...] | None:
    """Searches the path of legal steps with the least volume, and then with the fewest collectives."""
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
    """Yields the legal steps from ``layout`` on the way to ``target``, each with the layout after it."""
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
