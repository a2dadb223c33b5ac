"""Lays out the batch: which part of each input a rank feeds, and which values have the batch's dimension."""

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
    """Returns the layout of each input; None if the inputs cannot be split like that on this mesh.

    Args:
        mesh: the mesh's sizes.
        dataset: "data_parallel" (each rank feeds its part of the batch), "full_batch" (each feeds all of it),
            or the number of slices of each dimension of each input. Ranks take the slices row by row; if
            there are more ranks than slices, neighbouring ranks take the same one.
        shapes: the shapes of the whole inputs.

    Raises:
        SettingsError: the slices do not fit the number or the dimensions of the inputs.
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
    """Returns the tensor dimension that each mesh dimension splits; None if the mesh does not fit the grid.

    Ranks in order get the grid's slices row by row on every mesh: a search tries several meshes, and which
    rank feeds which slice must not depend on the mesh that it chooses.
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
    """Returns the layout of an input that is cut into ``cuts``, within the ``grid`` of all inputs."""
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
    """Returns the shape of the whole input number ``number`` if each rank feeds ``shape``.

    Raises:
        SettingsError: the slices in ``dataset`` do not fit the input.
    """
    if dataset == "full_batch" or not shape:
        return shape
    if dataset == "data_parallel":
        return (shape[0] * world, *shape[1:])
    return tuple(size * cut for size, cut in zip(shape, _cuts(dataset, number, len(shape)), strict=True))


def batch_led(graph: Graph) -> set[int]:
    """Returns the indices of the values whose first dimension is the batch."""
    where: dict[int, int] = {}  # by value, the dimension of the batch
    sizes = {graph.values[node.outputs[0]].shape[:1] for node in graph.nodes if node.kind == "input"} - {()}
    for node in graph.nodes:
        if node.kind == "input":
            where |= dict.fromkeys((v for v in node.outputs if graph.values[v].shape), 0)
        elif node.kind in ("call", FAN_OUT) and any(v in where for v in node.inputs):
            axes = axes_of(graph, node)
            for value in node.outputs if axes is None else ():  # no rule: judged by the shape alone
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
