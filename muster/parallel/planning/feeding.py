"""How the batch is fed: which part of each input a rank gives, and what of the graph follows the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from muster.errors import SettingsError
from muster.parallel.planning.graph import FAN_OUT, Graph
from muster.parallel.planning.layouts import (
    REPLICATE,
    Mesh,
    Placement,
    Placements,
    Shape,
    fits,
    replicated,
)
from muster.parallel.planning.rules import axes_of
from muster.parallel.planning.strategies import Slices


def feeding(
    mesh: Mesh, dataset: str | Sequence[Slices], shapes: Sequence[Shape]
) -> tuple[Placements, ...] | None:
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
            layout: Placements | None = replicated(mesh)
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


def _dealt(mesh: Mesh, grid: Slices) -> Placements | None:
    """The tensor dimension that each mesh dimension splits, so that ranks in order get the grid row by row.

    A search tries several meshes, and which rank feeds what must not depend on the one that it takes.
    """
    found: list[Placement] = []
    left = [(d, n) for d, n in enumerate(grid) if n > 1]
    for size in mesh:
        if not left or size == 1:
            found.append(REPLICATE)
            continue
        d, n = left.pop(0)
        if n % size:
            return None
        found.append(d)
        if n > size:
            left.insert(0, (d, n // size))
    return None if left else tuple(found)


def _layout_of(mesh: Mesh, cuts: Slices, grid: Slices) -> Placements | None:
    """The layout of an input that is cut into these slices, where the inputs' grid is this one."""
    left = list(cuts)
    found: list[Placement] = []
    for size, entry in zip(mesh, _dealt(mesh, grid) or (), strict=False):
        if not isinstance(entry, int) or entry >= len(cuts) or left[entry] == 1:
            found.append(REPLICATE)
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


def batch_led(graph: Graph) -> set[int]:
    """The values whose first dimension is the batch's, as inputs that are fed in parts have it."""
    where: dict[int, int] = {}  # by value, the dimension of the batch
    sizes = {graph.values[node.outputs[0]].shape[:1] for node in graph.nodes if node.kind == "input"} - {()}
    for node in graph.nodes:
        if node.kind == "input":
            where |= dict.fromkeys((v for v in node.outputs if graph.values[v].shape), 0)
        elif node.kind in ("call", FAN_OUT) and any(v in where for v in node.inputs):
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
