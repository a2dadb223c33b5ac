"""The axes of operators that read or write elements by indices."""

from __future__ import annotations

from typing import Any

from muster.parallel.planning.axes import EXCHANGED, Axis, OperatorCall, rule
from muster.parallel.planning.graph import Node, Ref


@rule("embedding")
def _embedding(call: OperatorCall) -> list[Axis] | None:
    # padding_idx changes gradients row by row only; scale_grad_by_freq and sparse mix the rows.
    if call.argument(3, "scale_grad_by_freq", False) or call.argument(4, "sparse", False):
        return None
    out = call.outs[0]
    padding = call.argument(2, "padding_idx", -1)
    axes = [Axis(f"b{d}", out[d], (None, d), (d,)) for d in range(len(out) - 1)]
    axes.append(Axis("n", out[-1], (1, None), (len(out) - 1,)))
    if padding is None or padding < 0:
        axes.append(Axis("v", call.ins[0][0], (0, None), (None,)))
    return axes


@rule("embedding_bag", "_embedding_bag")
def _embedding_bag(call: OperatorCall) -> list[Axis] | None:
    """Bags can be split if all have the same number of words, and columns unless the mode is the maximum."""
    bags, mode = call.outs[0][0], call.argument(4, "mode", 0)
    others = (EXCHANGED,) * (len(call.outs) - 1)
    more = len(call.ins) - 3
    if call.argument(5, "sparse", False):
        return None
    scaled = call.argument(3, "scale_grad_by_freq", False)  # gradients count a word in all bags
    axes = []
    if not scaled and words_per_bag(call.makers[2]) * bags == call.ins[1][0]:
        outs = tuple(0 if shape else None for shape in call.outs[1:])
        axes.append(Axis("b", bags, (None, 0, 0, *(0,) * more), (0, *outs)))
    if mode in (0, 1):  # sum and mean; the maximum returns indices into the table, too
        axes.append(Axis("n", call.outs[0][1], (1, None, None, *(None,) * more), (1, *others)))
    return axes


def words_per_bag(maker: Node) -> int:
    """Returns the number of words per bag, from the operator that makes the offsets; 0 if it may vary."""
    if maker.op != "arange":
        return 0
    begin, _, step = (0, *maker.args, 1)[-3:] if len(maker.args) == 1 else (*maker.args, 1)[:3]
    return int(step) if begin == 0 else 0


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _along(call: OperatorCall) -> list[Axis]:
    """Dimensions other than the indexed one can be split if they have the same size in all tensors."""
    dim = call.dim(call.argument(1, "dim"))
    return [
        Axis(f"d{d}", size, (d,) * len(call.ins), (d,))
        for d, size in enumerate(call.ins[0])
        if d != dim and all(shape[d] == size for shape in call.ins)
    ]


@rule("index_select")
def _index_select(call: OperatorCall) -> list[Axis]:
    dim = call.dim(call.argument(1, "dim"))
    axes = [Axis(f"d{d}", size, (d, None), (d,)) for d, size in enumerate(call.ins[0]) if d != dim]
    return [*axes, Axis("i", call.outs[0][dim], (None, 0), (dim,))]


@rule("index_add", "index_copy")
def _index_add(call: OperatorCall) -> list[Axis]:
    dim = call.dim(call.argument(1, "dim"))
    return [Axis(f"d{d}", size, (d, None, d), (d,)) for d, size in enumerate(call.ins[0]) if d != dim]


@rule("index")
def _index(call: OperatorCall) -> list[Axis] | None:
    """Dimensions without an index can be split, and so can those of the indices."""
    shape, out, indices = call.ins[0], call.outs[0], list(call.args[1])
    used = [d for d, each in enumerate(indices) if each is not None]
    if any("bool" in dtype or dtype == "uint8" for dtype in call.dtypes[1:]):
        return None
    first, last = used[0], used[-1]
    if used != list(range(first, last + 1)):
        return None  # torch puts the dimensions of such indices first
    shapes = call.ins[1:]
    deep = max(len(each) for each in shapes)
    none = (None,) * len(shapes)
    axes = [Axis(f"d{d}", size, (d, *none), (d,)) for d, size in enumerate(shape[:first])]
    axes += [
        Axis(f"d{d}", shape[d], (d, *none), (d - last - 1 + first + deep,))
        for d in range(last + 1, len(shape))
    ]
    for d in range(deep):
        size = out[first + d]
        places = [d - (deep - len(each)) for each in shapes]
        ins = tuple(
            place if place >= 0 and each[place] == size else None
            for place, each in zip(places, shapes, strict=True)
        )
        axes.append(Axis(f"i{d}", size, (None, *ins), (first + d,)))
    if takes_one_of_each(call.makers[1], shape[0], indices) and all(each == (shape[0],) for each in shapes):
        axes.append(Axis("each", shape[0], (0,) * len(call.ins), (0,)))
    return axes


def takes_one_of_each(maker: Node, rows: int, indices: list[Any]) -> bool:
    """Whether the first index enumerates the rows, as in ``scores[torch.arange(n), chosen]``."""
    counts = maker.op == "arange" and maker.args in ((rows,), (0, rows), (0, rows, 1))
    return counts and isinstance(indices[0], Ref)


@rule("slice_scatter", "select_scatter")
def _put(call: OperatorCall) -> list[Axis]:
    dim, drops = call.dim(call.argument(2, "dim", 0)), call.op == "select_scatter"
    return [
        Axis(f"d{d}", size, (d, d - (drops and d > dim)), (d,))
        for d, size in enumerate(call.ins[0])
        if d != dim
    ]


@rule("one_hot")
def _one_hot(call: OperatorCall) -> list[Axis]:
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0])]
