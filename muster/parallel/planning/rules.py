"""The axes of each operator: what can be split, and what that means for inputs, outputs and gradients.

A rule describes an operator as a list of named axes. Splitting an axis along a mesh dimension splits the
inputs that have it; inputs without it stay whole, and their gradients become partial sums. Outputs that have
the axis are split; outputs without it become partial sums. The backward pass follows from that, so there are
only forward rules. An operator without a rule is computed whole on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from muster.parallel.planning import indexing_rules, loss_rules
from muster.parallel.planning.axes import RULES, WHOLE, Axis, Mode, OperatorCall, rule
from muster.parallel.planning.graph import FAN_OUT, Graph, Node, Ref, names
from muster.parallel.planning.layouts import PARTIAL, REPLICATE

MORE_RULES = (indexing_rules, loss_rules)
"""Modules that register further rules when they are imported."""

LINEAR_VIEWS = names(
    "view reshape flatten unflatten _unsafe_view squeeze unsqueeze transpose t permute numpy_T slice "
    "select chunk split split_with_sizes unbind contiguous clone alias expand narrow view_as movedim "
    "swapaxes view_as_complex view_as_real diagonal expand_as"
)
"""Operators whose output only has the input's elements, so that they can run on partial sums."""

_ELEMENTWISE = names(
    "add sub mul div relu relu_ gelu silu tanh sigmoid dropout pow to _to_copy neg exp log sqrt rsqrt "
    "abs sin cos erf hardtanh hardswish hardsigmoid leaky_relu elu softplus mish alias detach "
    "contiguous clone masked_fill where eq ne lt gt le ge logical_and logical_or logical_not "
    "bitwise_and bitwise_or bitwise_not clamp clamp_min clamp_max maximum minimum square reciprocal "
    "type_as ones_like zeros_like full_like log1p expm1 sign floor ceil round isnan isinf lerp "
    "addcmul addcdiv threshold relu6 log_sigmoid rsub true_divide atan tan acos acosh asin asinh atan2 atanh "
    "cosh sinh bitwise_xor logical_xor fmod remainder log10 log2 trunc fill copy expand_as selu celu "
    "softsign tanhshrink hardshrink softshrink erfc exp2 sinc xlogy nan_to_num hypot"
)
_SUMS = names("add sub")
_SCALED = names("mul div neg")


def axes_of(graph: Graph, node: Node) -> list[Axis] | None:
    """Returns the axes of an operator; None if there is no rule for it, or for these arguments."""
    call = OperatorCall(graph, node)
    if node.kind == FAN_OUT:
        return _each_dim(call)
    found = RULES.get(node.op)
    if found is not None:
        try:
            return found(call)
        except (IndexError, KeyError, TypeError, ValueError):
            return None  # arguments that the rule does not know
    return _elementwise(call) if node.op in _ELEMENTWISE and call.ins else None


def modes_of(graph: Graph, node: Node) -> tuple[list[Mode], bool]:
    """Returns the modes in which a mesh dimension can run an operator, and whether there is a rule for it."""
    ins, outs = len(node.inputs), len(node.outputs)
    whole = (REPLICATE,)
    modes = [Mode(WHOLE, 0, whole * ins, whole * ins, whole * outs, whole * outs)]
    axes = axes_of(graph, node)
    modes += [axis.mode() for axis in axes or () if axis.size > 1]
    if node.kind == FAN_OUT or node.of_parameters or node.op in LINEAR_VIEWS:
        # The backward pass is linear in the gradient, so it can run on partial sums.
        modes.append(Mode("grad", 0, whole * ins, (PARTIAL,) * ins, whole * outs, (PARTIAL,) * outs))
    if axes is not None and _passes_sums(graph, node):
        modes.append(Mode("sum", 0, (PARTIAL,) * ins, whole * ins, (PARTIAL,) * outs, whole * outs))
    return modes, axes is not None


def _passes_sums(graph: Graph, node: Node) -> bool:
    if node.kind != "call" or not all(graph.values[v].floating for v in node.inputs):
        return False
    if node.op in LINEAR_VIEWS:
        return len(node.inputs) == 1
    tensors = [isinstance(argument, Ref) for argument in node.args]
    if node.op in _SUMS:
        same = len({graph.values[v].shape for v in node.inputs}) == 1
        return len(node.inputs) == 2 and tensors[:2] == [True, True] and same
    return node.op in _SCALED and len(node.inputs) == 1 and tensors[:1] == [True] and not node.kwargs


# ---------------------------------------------------------------- contractions


@rule("linear")
def _linear(call: OperatorCall) -> list[Axis]:
    last = len(call.ins[0]) - 1
    bias = (0,) if len(call.ins) > 2 else ()
    none = (None,) * len(bias)
    axes = [Axis(f"b{d}", call.outs[0][d], (d, None, *none), (d,)) for d in range(last)]
    axes.append(Axis("n", call.outs[0][-1], (None, 0, *bias), (last,)))
    axes.append(Axis("k", call.ins[0][-1], (last, 1, *none), (None,)))
    return axes


@rule("matmul", "mm", "bmm")
def _matmul(call: OperatorCall) -> list[Axis] | None:
    a, b = call.ins
    out = call.outs[0]
    if len(a) < 2 or len(b) < 2:
        return None
    axes = []
    for d in range(len(out) - 2):
        left, right = d - (len(out) - len(a)), d - (len(out) - len(b))
        axes.append(
            Axis(
                f"b{d}",
                out[d],
                (
                    left if left >= 0 and a[left] == out[d] else None,
                    right if right >= 0 and b[right] == out[d] else None,
                ),
                (d,),
            )
        )
    rows, columns = len(out) - 2, len(out) - 1
    axes.append(Axis("m", out[-2], (len(a) - 2, None), (rows,)))
    axes.append(Axis("k", a[-1], (len(a) - 1, len(b) - 2), (None,)))
    axes.append(Axis("n", out[-1], (None, len(b) - 1), (columns,)))
    return axes


@rule("addmm")
def _addmm(call: OperatorCall) -> list[Axis] | None:
    bias, a, b = call.ins
    if bias != (b[1],) or call.kwargs.get("beta", 1) != 1 or call.kwargs.get("alpha", 1) != 1:
        return None
    return [
        Axis("m", a[0], (None, 0, None), (0,)),
        Axis("k", a[1], (None, 1, 0), (None,)),
        Axis("n", b[1], (0, None, 1), (1,)),
    ]


@rule("einsum")
def _einsum(call: OperatorCall) -> list[Axis] | None:
    equation = str(call.args[0]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, out = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in (*terms, out)):
        return None
    sizes = {
        letter: size
        for term, shape in zip(terms, call.ins, strict=True)
        for letter, size in zip(term, shape, strict=True)
    }
    return [
        Axis(
            letter,
            size,
            tuple(term.index(letter) if letter in term else None for term in terms),
            (out.index(letter) if letter in out else None,),
        )
        for letter, size in sizes.items()
        # A letter of a single term that is not in the output is summed over: a partial sum per rank.
    ]


@rule("conv1d", "conv2d", "conv3d", "convolution")
@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(call: OperatorCall) -> list[Axis] | None:
    turned = call.args[6] if call.op == "convolution" else "transpose" in call.op
    groups = call.argument(8 if call.op == "convolution" else 6, "groups", 1)
    x, weight = call.ins[:2]
    if len(x) != len(weight):
        return None
    more = len(call.ins) - 2
    axes = [Axis("b", x[0], (0, None, *(None,) * more), (0,))]
    if groups > 1:
        return [*axes, Axis("g", groups, (1, 0, *(0,) * more), (1,))]
    before, after = (0, 1) if turned else (1, 0)  # the weight's dimensions of input and output channels
    axes.append(Axis("n", weight[after], (None, after, *(0,) * more), (1,)))
    axes.append(Axis("k", weight[before], (1, before, *(None,) * more), (None,)))
    return axes


@rule("scaled_dot_product_attention")
def _attention(call: OperatorCall) -> list[Axis] | None:
    q, k = call.ins[:2]
    if len(q) != len(k) or not 3 <= len(q) <= 4:
        return None
    masks = call.ins[3:]

    def axis(name: str, d: int, size: int) -> Axis:
        of_masks = []
        for mask in masks:
            place = d - (len(q) - len(mask))
            of_masks.append(place if place >= 0 and mask[place] == q[d] else None)
        return Axis(name, size, (d, d, d, *of_masks), (d,))

    if len(q) == 3:
        return [axis("b", 0, q[0])]
    heads = math.gcd(q[1], k[1])
    if any(len(mask) >= 3 and mask[-3] not in (1, q[1]) for mask in masks):
        return [axis("b", 0, q[0])]
    return [axis("b", 0, q[0]), axis("h", 1, heads)]


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: OperatorCall) -> list[Axis] | None:
    """Only the batch can be split, because the states along a sequence depend on one another."""
    x = call.ins[0]
    states = 2 if call.op == "lstm" else 1
    if len(x) != 3 or not isinstance(call.args[-1], bool):  # packed sequences have other arguments
        return None
    # On a CPU torch 2.11 records the states with one dimension too many.
    if any(len(out) != 3 for out in call.outs):
        return None
    batch = 0 if call.args[-1] else 1
    ins = (batch, *(1,) * states, *(None,) * (len(call.ins) - 1 - states))
    return [Axis("b", x[batch], ins, (batch, *(1,) * states))]


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(call: OperatorCall) -> list[Axis] | None:
    states = 2 if call.op == "lstm_cell" else 1
    if len(call.ins[0]) != 2:
        return None
    ins = (0, *(0,) * states, *(None,) * (len(call.ins) - 1 - states))
    return [Axis("b", call.ins[0][0], ins, (0,) * len(call.outs))]


@rule("cdist", "_cdist_forward")
def _distances(call: OperatorCall) -> list[Axis] | None:
    a, b = call.ins
    if len(a) != len(b):
        return None
    last = len(a) - 1
    axes = [Axis(f"b{d}", a[d], (d, d), (d,)) for d in range(last - 1) if a[d] == b[d]]
    return [
        *axes,
        Axis("m", a[-2], (last - 1, None), (last - 1,)),
        Axis("n", b[-2], (None, last - 1), (last,)),
    ]


# ---------------------------------------------------------------- normalisation


@rule("batch_norm")
def _batch_norm(call: OperatorCall) -> list[Axis]:
    more = len(call.ins) - 1
    axes = [Axis("b", call.ins[0][0], (0, *(None,) * more), (0,))]
    return [*axes, Axis("c", call.ins[0][1], (1, *(0,) * more), (1,))]


@rule("layer_norm", "rms_norm")
def _layer_norm(call: OperatorCall) -> list[Axis]:
    kept = len(call.ins[0]) - len(call.args[1])
    return [Axis(f"b{d}", call.ins[0][d], call.one(0, d), (d,)) for d in range(kept)]


@rule("instance_norm")
def _instance_norm(call: OperatorCall) -> list[Axis] | None:
    if isinstance(call.args[3], Ref):  # statistics of all samples so far
        return None
    more = len(call.ins) - 1
    axes = [Axis("b", call.ins[0][0], (0, *(None,) * more), (0,))]
    return [*axes, Axis("c", call.ins[0][1], (1, *(0,) * more), (1,))]


@rule("native_layer_norm")
def _native_layer_norm(call: OperatorCall) -> list[Axis]:
    kept = len(call.ins[0]) - len(call.args[1])
    return [Axis(f"b{d}", call.ins[0][d], call.one(0, d), (d, d, d)) for d in range(kept)]


@rule("group_norm")
def _group_norm(call: OperatorCall) -> list[Axis]:
    return [Axis("b", call.ins[0][0], call.one(0, 0), (0,))]


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "glu")
def _along_one_dim(call: OperatorCall) -> list[Axis]:
    axis = call.dim(call.argument(1, "dim", -1))
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0]) if d != axis]


@rule("mean", "sum")
def _reduction(call: OperatorCall) -> list[Axis]:
    gone = call.dims(call.argument(1, "dim"))
    keeps = len(call.outs[0]) == len(call.ins[0])
    axes = []
    for d, size in enumerate(call.ins[0]):
        place = d if keeps else d - sum(g < d for g in gone)
        axes.append(Axis(f"d{d}", size, (d,), (None if d in gone else place,)))
    return axes


@rule(
    "amax", "amin", "argmax", "argmin", "max", "min", "std", "var", "logsumexp", "any", "all", "topk", "sort"
)
@rule("argsort", "prod", "norm", "linalg_vector_norm")
def _kept_dims(call: OperatorCall) -> list[Axis] | None:
    """Reductions other than sums: the dimensions that stay can be split."""
    index = 2 if call.op in ("topk", "norm", "linalg_vector_norm") else 1
    dim = call.argument(index, "dim", -1 if call.op in ("topk", "sort", "argsort") else None)
    if len(call.ins) == 2 and call.op in ("max", "min"):
        return _elementwise(call)
    if len(call.ins) != 1 or dim is None:
        return []
    gone = call.dims(dim)
    keeps = len(call.outs[0]) == len(call.ins[0])
    return [
        Axis(f"d{d}", size, (d,), (d if keeps else d - sum(g < d for g in gone),) * len(call.outs))
        for d, size in enumerate(call.ins[0])
        if d not in gone
    ]


@rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d")
@rule("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
@rule("adaptive_max_pool1d", "adaptive_max_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d")
@rule("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "pixel_shuffle")
def _pooling(call: OperatorCall) -> list[Axis] | None:
    spatial = 1 if "1d" in call.op else 3 if "3d" in call.op else 2
    if len(call.ins[0]) != spatial + 2:
        return None
    axes = [Axis("b", call.ins[0][0], (0,), (0,) * len(call.outs))]
    if call.op != "pixel_shuffle":
        axes.append(Axis("c", call.ins[0][1], (1,), (1,) * len(call.outs)))
    return axes


# ---------------------------------------------------------------- elementwise and views


def _each_dim(call: OperatorCall) -> list[Axis]:
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0])]


def _elementwise(call: OperatorCall) -> list[Axis]:
    out = call.outs[0]
    axes = []
    for d, size in enumerate(out):
        places = []
        for shape in call.ins:
            place = d - (len(out) - len(shape))
            places.append(place if place >= 0 and shape[place] == size else None)
        axes.append(Axis(f"d{d}", size, tuple(places), (d,) * len(call.outs)))
    return axes


@rule("prelu")
def _prelu(call: OperatorCall) -> list[Axis]:
    shared = math.prod(call.ins[1]) == 1
    return [
        Axis(f"d{d}", size, (d, 0 if d == 1 and not shared else None), (d,))
        for d, size in enumerate(call.ins[0])
    ]


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "squeeze", "unsqueeze", "view_as")
def _view(call: OperatorCall) -> list[Axis] | None:
    if call.op == "view" and not isinstance(call.argument(1, "size"), (list, tuple)):
        return None  # a view of the bytes in another dtype
    more = (None,) * (len(call.ins) - 1)
    return [Axis(f"d{a}", size, (a, *more), (b,)) for a, b, size in view_groups(call.ins[0], call.outs[0])]


def view_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns the dimensions that correspond across a reshape.

    Elements keep their order, so only the leading dimension of each group of dimensions can be split.

    Returns:
        For each group: the leading dimension before, that after, and a number that the number of slices must
        divide.
    """
    a = [d for d, size in enumerate(before) if size != 1]
    b = [d for d, size in enumerate(after) if size != 1]
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        found.append((a[i], b[j], math.gcd(before[a[i]], after[b[j]])))
        x, y = before[a[i]], after[b[j]]
        while x != y:
            if x < y:
                i += 1
                x *= before[a[i]]
            else:
                j += 1
                y *= after[b[j]]
        i, j = i + 1, j + 1
    return found


@rule("expand")
def _expand(call: OperatorCall) -> list[Axis]:
    shape, out = call.ins[0], call.outs[0]
    axes = []
    for d, size in enumerate(out):
        place = d - (len(out) - len(shape))
        axes.append(Axis(f"d{d}", size, (place if place >= 0 and shape[place] == size else None,), (d,)))
    return axes


@rule("transpose", "t", "permute", "numpy_T", "swapaxes", "movedim")
def _permutation(call: OperatorCall) -> list[Axis] | None:
    order = list(range(len(call.ins[0])))
    if call.op == "permute":
        order = [call.dim(d) for d in call.args[1]]
    elif call.op in ("transpose", "swapaxes"):
        a, b = call.dim(call.args[1]), call.dim(call.args[2])
        order[a], order[b] = b, a
    elif call.op == "movedim":
        if not isinstance(call.args[1], int):
            return None
        moved = order.pop(call.dim(call.args[1]))
        order.insert(call.dim(call.args[2]), moved)
    else:
        order.reverse()
    return [Axis(f"d{d}", size, (d,), (order.index(d),)) for d, size in enumerate(call.ins[0])]


@rule("slice", "narrow", "chunk", "split", "split_with_sizes", "flip", "roll")
def _cut(call: OperatorCall) -> list[Axis] | None:
    place = 1 if call.op in ("slice", "narrow", "flip") else 2
    name = "dims" if call.op in ("flip", "roll") else "dim"
    given = call.argument(place, name, [] if call.op == "roll" else 0)
    if given == []:
        return None
    gone = call.dims(given)
    return [
        Axis(f"d{d}", size, (d,), (d,) * len(call.outs))
        for d, size in enumerate(call.ins[0])
        if d not in gone
    ]


@rule("select", "unbind")
def _drop(call: OperatorCall) -> list[Axis]:
    gone = call.dim(call.argument(1, "dim", 0))
    return [
        Axis(f"d{d}", size, (d,), (d - (d > gone),) * len(call.outs))
        for d, size in enumerate(call.ins[0])
        if d != gone
    ]


@rule("cat", "stack")
def _join(call: OperatorCall) -> list[Axis] | None:
    dim = call.argument(1, "dim", 0)
    if any(len(shape) != len(call.ins[0]) for shape in call.ins):
        return None
    if call.op == "stack":
        dim = call.dim(dim, call.outs[0])
        return [
            Axis(f"d{d}", size, (d,) * len(call.ins), (d + (d >= dim),)) for d, size in enumerate(call.ins[0])
        ]
    dim = call.dim(dim)
    return [
        Axis(f"d{d}", size, (d,) * len(call.ins), (d,)) for d, size in enumerate(call.outs[0]) if d != dim
    ]


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _pad(call: OperatorCall) -> list[Axis]:
    padded = len(call.args[1]) // 2
    kept = len(call.ins[0]) - padded
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0][:kept])]


@rule("view_as_complex", "view_as_real")
def _pairs(call: OperatorCall) -> list[Axis]:
    """All dimensions can be split but the real side's last one, which holds the real and imaginary parts."""
    count = min(len(call.ins[0]), len(call.outs[0]))
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0][:count])]


@rule("diagonal")
def _diagonal(call: OperatorCall) -> list[Axis]:
    gone = {call.dim(call.argument(2, "dim1", 0)), call.dim(call.argument(3, "dim2", 1))}
    kept = [d for d in range(len(call.ins[0])) if d not in gone]
    return [Axis(f"d{d}", call.ins[0][d], (d,), (place,)) for place, d in enumerate(kept)]


@rule("tril", "triu")
def _triangle(call: OperatorCall) -> list[Axis]:
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0][:-2])]


@rule("repeat")
def _repeat(call: OperatorCall) -> list[Axis]:
    repeats = list(call.args[1])
    more = len(repeats) - len(call.ins[0])
    return [
        Axis(f"d{d}", size, (d,), (d + more,)) for d, size in enumerate(call.ins[0]) if repeats[d + more] == 1
    ]


@rule("repeat_interleave")
def _repeat_interleave(call: OperatorCall) -> list[Axis] | None:
    """All dimensions can be split, the repeated one too, because its parts stay in order."""
    if len(call.ins) != 1 or not isinstance(call.argument(1, "repeats"), int):
        return None
    if call.argument(2, "dim") is None:
        return None
    return _each_dim(call)


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fourier(call: OperatorCall) -> list[Axis]:
    gone = call.dims(call.args[1])
    return [Axis(f"d{d}", size, (d,), (d,)) for d, size in enumerate(call.ins[0]) if d not in gone]


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid(call: OperatorCall) -> list[Axis]:
    return [Axis("b", call.ins[0][0], (0, 0), (0,)), Axis("c", call.ins[0][1], (1, None), (1,))]


@rule("im2col", "col2im")
def _patches(call: OperatorCall) -> list[Axis] | None:
    batched = {"im2col": 4, "col2im": 3}[call.op]
    return [Axis("b", call.ins[0][0], (0,), (0,))] if len(call.ins[0]) == batched else None
