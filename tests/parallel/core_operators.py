"""Calls of every operator of torch's core ATen set, on random shapes, and what plans make of each.

``python -m tests.parallel.core_operators`` writes the table of docs/parallel.md.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from muster.parallel.planning.graph import Graph, Node
from muster.parallel.planning.rules import modes_of
from muster.parallel.trace import trace
from muster.parallel.untraced import TraceError

Arguments = tuple[list[Any], dict[str, Any]]


@functools.cache
def core_operators() -> dict[str, Any]:
    """The overloads that the installed torch tags as core, by names such as ``add.Tensor``."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():  # dir() only shows what somebody has asked for
        space, _, name = schema.name.partition("::")
        overload = schema.overload_name or "default"
        function = getattr(getattr(torch.ops.aten, name, None), overload, None) if space == "aten" else None
        if function is not None and torch.Tag.core in function.tags:
            found[name if overload == "default" else f"{name}.{overload}"] = function
    return found


class Draw:
    """Random sizes and tensors."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def sizes(self, count: int) -> list[int]:
        """Different even sizes, so that dimensions cannot be taken for one another."""
        return self.random.sample([2, 4, 6, 8, 10], count)

    def normal(self, *shape: int) -> Any:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Any:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64) + 1.1

    def unit(self, *shape: int) -> Any:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64) * 1.6 - 0.8

    def index(self, below: int, *shape: int) -> Any:
        return torch.randint(below, shape, generator=self._generator)

    def flags(self, *shape: int) -> Any:
        return self.normal(*shape) > 0

    def fixed(self, tensor: Any) -> Any:
        """A tensor that is not trained."""
        tensor.fixed = True
        return tensor

    def any(self, domain: str) -> Any:
        return getattr(self, domain)(*self.sizes(self.random.choice([1, 2, 3])))

    def pair(self, domain: str = "normal") -> list[Any]:
        """Two tensors of one shape, or of which one is repeated."""
        shape = self.sizes(3)
        other = self.random.choice([shape, shape[1:], [shape[0], 1, shape[2]]])
        return [getattr(self, domain)(*shape), getattr(self, domain)(*other)]


_UNARY = {
    "normal": "abs asinh atan ceil clone alias cos cosh elu erf exp expm1 floor gelu hardtanh isinf isnan"
    " leaky_relu neg relu round sigmoid sign sin sinh tan tanh trunc _to_copy mean prod any",
    "positive": "acosh log log10 log1p log2 reciprocal rsqrt sqrt",
    "unit": "acos asin atanh",
    "flags": "bitwise_not logical_not",
}
_BINARY = {
    "normal": "add.Tensor sub.Tensor mul.Tensor eq.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor ne.Tensor"
    " maximum minimum atan2 copy",
    "positive": "div.Tensor fmod.Tensor remainder.Tensor pow.Tensor_Tensor",
    "flags": "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor logical_and logical_or logical_xor",
}
_SCALAR = (
    "add.Scalar sub.Scalar mul.Scalar div.Scalar fmod.Scalar remainder.Scalar pow.Tensor_Scalar eq.Scalar"
    " ge.Scalar gt.Scalar le.Scalar lt.Scalar ne.Scalar fill.Scalar full_like"
)
_ALONG_ONE = "_softmax _log_softmax cumsum amax amin argmax argmin any.dim max.dim min.dim prod.dim_int sort"
_ALONG_SOME = "any.dims mean.dim sum.dim_IntList var.dim var.correction amax amin flip"


def _along(draw: Draw, *more: Any) -> Arguments:
    return [draw.normal(*draw.sizes(3)), draw.random.randrange(-3, 3), *more], {}


def _along_some(draw: Draw) -> Arguments:
    return [draw.normal(*draw.sizes(3)), draw.random.sample(range(3), 2)], {}


def _unary(domain: str) -> Callable[[Draw], Arguments]:
    return lambda draw: ([draw.any(domain)], {})


def _binary(domain: str) -> Callable[[Draw], Arguments]:
    return lambda draw: (draw.pair(domain), {})


def _pooled(draw: Draw, spatial: int, *more: Any) -> Arguments:
    return [draw.normal(2, 4, *[4] * spatial), *more], {}


def _padded(draw: Draw, spatial: int) -> Arguments:
    return [draw.normal(2, 4, *[4] * spatial), [1, 2] * spatial], {}


def _indexed(draw: Draw, *more: Any) -> Arguments:
    """A tensor, a dimension, an index as large as it elsewhere, and a tensor of the index's shape."""
    shape, dim = draw.sizes(3), draw.random.randrange(3)
    taken = [*shape[:dim], 2, *shape[dim + 1 :]]
    index = torch.stack(
        [draw.index(shape[dim] // 2, *taken[:dim], *taken[dim + 1 :]) + k for k in (0, shape[dim] // 2)], dim
    )
    return [draw.normal(*shape), dim, index, *more, draw.normal(*taken)], {}


def _convolved(draw: Draw) -> Arguments:
    turned, groups = draw.random.random() < 0.5, draw.random.choice([1, 2])
    weight = draw.normal(4, 6, 3, 3) if turned else draw.normal(6, 4 // groups, 3, 3)
    if turned and groups == 2:
        weight = weight[:, :3]
    bias = draw.normal(6)
    return [draw.normal(2, 4, 6, 6), weight, bias, [2, 2], [1, 1], [1, 1], turned, [0, 0], groups], {}


def _made() -> dict[str, Any]:
    return {"dtype": torch.float64}


SAMPLES: dict[str, Callable[[Draw], Arguments]] = {
    **{name: _unary(domain) for domain, names in _UNARY.items() for name in names.split()},
    **{name: _binary(domain) for domain, names in _BINARY.items() for name in names.split()},
    **{name: lambda d: ([d.any("positive"), 1.5], {}) for name in _SCALAR.split()},
    **dict.fromkeys(_ALONG_ONE.split(), _along),
    **dict.fromkeys(_ALONG_SOME.split(), _along_some),
    "_softmax": lambda d: _along(d, False),
    "_log_softmax": lambda d: _along(d, False),
    "amax": lambda d: ([d.normal(*d.sizes(3)), d.random.choice([[0], [1, 2]])], {}),
    "amin": lambda d: ([d.normal(*d.sizes(3)), d.random.choice([[0], [-1], [0, 2]]), True], {}),
    "_adaptive_avg_pool2d": lambda d: _pooled(d, 2, [2, 2]),
    "_adaptive_avg_pool2d_backward": lambda d: ([d.normal(2, 4, 2, 2), d.normal(2, 4, 4, 4)], {}),
    "_adaptive_avg_pool3d": lambda d: _pooled(d, 3, [2, 2, 1]),
    "_cdist_forward": lambda d: ([d.normal(2, 4, 8).detach(), d.normal(2, 6, 8), 2.0, None], {}),
    "_embedding_bag": lambda d: ([d.normal(8, 6), d.index(8, 10), torch.tensor([0, 2, 2, 7])], {}),
    "_fft_c2r": lambda d: ([torch.complex(d.normal(4, 6, 5), d.normal(4, 6, 5)), [2], 2, 8], {}),
    "_fft_r2c": lambda d: ([d.normal(4, 6, 8), [d.random.randrange(3)], 0, True], {}),
    "_local_scalar_dense": lambda d: ([d.normal(1)], {}),
    "_native_batch_norm_legit": lambda d: (
        [d.normal(4, 6, 2), d.normal(6), d.normal(6), d.normal(6), d.positive(6), True, 0.1, 1e-5],
        {}),
    "_native_batch_norm_legit.no_stats": lambda d: (
        [d.normal(4, 6, 2), d.normal(6), d.normal(6), True, 0.1, 1e-5], {}),
    "_native_batch_norm_legit_no_training": lambda d: (
        [d.normal(4, 6, 2), d.normal(6), d.normal(6), d.normal(6), d.positive(6), 0.1, 1e-5], {}),
    "_pdist_forward": lambda d: ([d.normal(4, 6)], {}),
    "add.Tensor": lambda d: (d.pair(), {"alpha": d.random.choice([1, -2])}),
    "addmm": lambda d: ([d.normal(6), d.normal(4, 8), d.normal(8, 6)], d.random.choice([{}, {"beta": 2.0}])),
    "arange.start_step": lambda d: ([1, 9, 2], _made()),
    "as_strided": lambda d: (
        [d.normal(6, 8), [3, 4], [d.random.choice([1, 9]), 2], d.random.choice([None, 5])], {}),
    "adaptive_avg_pool1d": lambda d: _pooled(d, 1, [2]),
    "avg_pool1d": lambda d: _pooled(d, 1, [2]),
    "avg_pool2d": lambda d: _pooled(d, 2, [2, 2]),
    "avg_pool2d_backward": lambda d: (
        [d.normal(2, 4, 2, 2), d.normal(2, 4, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None], {}),
    "avg_pool3d": lambda d: _pooled(d, 3, [2, 2, 2]),
    "bitwise_and.Scalar": lambda d: ([d.index(16, 4, 6), 5], {}),
    "bitwise_or.Scalar": lambda d: ([d.index(16, 4, 6), 5], {}),
    "bitwise_xor.Scalar": lambda d: ([d.index(16, 4, 6), 5], {}),
    "bmm": lambda d: ([d.normal(2, 4, 6), d.normal(2, 6, 8)], {}),
    "cat": lambda d: ([[d.normal(4, 6, 2), d.normal(4, 2, 2)], d.random.choice([1, -2])], {}),
    "clamp": lambda d: ([d.normal(4, 6), -0.5, d.random.choice([None, 0.5])], {}),
    "clamp.Tensor": lambda d: ([d.normal(4, 6), d.normal(6) - 1, d.normal(4, 1) + 1], {}),
    "col2im": lambda d: ([d.normal(2, 12, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]], {}),
    "constant_pad_nd": lambda d: ([d.normal(*d.sizes(3)), [1, 2], 0.5], {}),
    "convolution": _convolved,
    "convolution_backward": lambda d: (
        [d.normal(2, 6, 4, 4), d.normal(2, 4, 6, 6), d.normal(6, 4, 3, 3), [6], [1, 1], [0, 0], [1, 1],
        False, [0, 0], 1, [True] * 3], {}),
    "diagonal": lambda d: (
        [d.normal(*d.sizes(3)), d.random.choice([-1, 0, 1]), *d.random.choice([(0, 1), (2, 0)])], {}),
    "div.Tensor_mode": lambda d: (
        d.pair("positive"), {"rounding_mode": d.random.choice([None, "floor", "trunc"])}),
    "div.Scalar_mode": lambda d: ([d.normal(4, 6), 0.7], {"rounding_mode": "floor"}),
    "embedding": lambda d: ([d.normal(8, 6), d.index(8, 4, 2), d.random.choice([-1, 3])], {}),
    "embedding_dense_backward": lambda d: ([d.normal(4, 6), d.index(8, 4), 8, -1, False], {}),
    "empty.memory_format": lambda d: ([[4, 6]], _made()),
    "empty_strided": lambda d: ([[4, 6], [1, 4]], _made()),
    "expand": lambda d: ([d.normal(4, 1, 6), [2, -1, 8, 6]], {}),
    "full": lambda d: ([[4, 6], 1.5], _made()),
    "gather": lambda d: (_indexed(d)[0][:3], {}),
    "grid_sampler_2d": lambda d: ([d.normal(2, 4, 6, 6), d.unit(2, 4, 8, 2), 0, 0, False], {}),
    "index.Tensor": lambda d: (
        [d.normal(4, 6, 8), d.random.choice([[d.index(4, 6)], [None, d.index(6, 4)], [None, None,
        d.index(8, 4, 2)]])], {}),
    "index_put": lambda d: ([d.normal(6, 4), [d.index(6, 8)], d.normal(8, 4), True], {}),
    "index_select": lambda d: ([d.normal(4, 6, 8), d.random.randrange(3), d.index(4, 6)], {}),
    "masked_scatter": lambda d: ([d.normal(4, 6), d.flags(4, 6), d.normal(30)], {}),
    "max_pool2d_with_indices": lambda d: _pooled(d, 2, [2, 2]),
    "max_pool2d_with_indices_backward": lambda d: (
        [d.normal(2, 4, 2, 2), d.normal(2, 4, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, d.index(2,
        2, 4, 2, 2)], {}),
    "max_pool3d_with_indices": lambda d: _pooled(d, 3, [2, 2, 2]),
    "mm": lambda d: ([d.normal(4, 6), d.normal(6, 8)], {}),
    "native_dropout": lambda d: ([d.normal(4, 6), 0.5, True], {}),
    "native_group_norm": lambda d: ([d.normal(4, 6, 8), d.normal(6), d.normal(6), 4, 6, 8, 2, 1e-5], {}),
    "native_group_norm_backward": lambda d: (
        [d.normal(4, 6, 8), d.normal(4, 6, 8), d.normal(4, 2), d.positive(4, 2), d.normal(6), 4, 6, 8,
        2, [True] * 3], {}),
    "native_layer_norm": lambda d: ([d.normal(4, 2, 6), [6], d.normal(6), d.normal(6), 1e-5], {}),
    "native_layer_norm_backward": lambda d: (
        [d.normal(4, 6), d.normal(4, 6), [6], d.normal(4, 1), d.positive(4, 1), d.normal(6),
        d.normal(6), [True] * 3], {}),
    "nonzero": lambda d: ([d.flags(4, 6)], {}),
    "permute": lambda d: ([d.normal(*d.sizes(3)), d.random.sample([0, 1, -1], 3)], {}),
    "pow.Scalar": lambda d: ([1.5, d.any("normal")], {}),
    "rand": lambda d: ([[4, 6]], _made()),
    "randn": lambda d: ([[4, 6]], _made()),
    "randperm": lambda d: ([8], _made()),
    **{f"reflection_pad{n}d": functools.partial(_padded, spatial=n) for n in (1, 2, 3)},
    **{f"replication_pad{n}d": functools.partial(_padded, spatial=n) for n in (2, 3)},
    "repeat": lambda d: ([d.normal(4, 6), d.random.choice([[2, 1], [1, 3], [2, 1, 1]])], {}),
    "resize_": lambda d: ([d.normal(4, 6), [2, 3]], {}),
    "scalar_tensor": lambda d: ([1.5], _made()),
    "scatter.value": lambda d: ([*_indexed(d)[0][:3], 0.5], {}),
    "scatter.src": _indexed,
    "scatter_add": _indexed,
    "scatter_reduce.two": lambda d: ([*_indexed(d)[0], d.random.choice(["sum", "amax", "mean"])], {}),
    "select.int": lambda d: ([d.normal(*d.sizes(3)), d.random.randrange(-3, 3), -1], {}),
    "select_scatter": lambda d: ([d.normal(4, 6, 2), d.normal(4, 2), 1, 3], {}),
    "slice.Tensor": lambda d: ([d.normal(*d.sizes(3)), d.random.randrange(-3, 3), 0, -1], {}),
    "slice_scatter": lambda d: ([d.normal(4, 6, 2), d.normal(4, 3, 2), 1, 1, 4], {}),
    "split_with_sizes": lambda d: ([d.normal(4, 6, 2), [2, 4], 1], {}),
    "squeeze.dim": lambda d: ([d.normal(4, 1, 6), d.random.choice([1, -1])], {}),
    "squeeze.dims": lambda d: ([d.normal(1, 4, 1, 6), [0, 2]], {}),
    "sub.Tensor": lambda d: (d.pair(), {"alpha": d.random.choice([1, 3])}),
    "sym_is_contiguous": lambda d: ([d.normal(4, 6)], {}),
    "sym_numel": lambda d: ([d.normal(4, 6)], {}),
    "sym_size.int": lambda d: ([d.normal(4, 6), 1], {}),
    "sym_storage_offset": lambda d: ([d.normal(4, 6)], {}),
    "sym_stride.int": lambda d: ([d.normal(4, 6), 0], {}),
    "topk": lambda d: ([d.normal(4, 6, 8), 2, d.random.randrange(3)], {}),
    "unsqueeze": lambda d: ([d.normal(4, 6), d.random.randrange(-3, 3)], {}),
    "upsample_bilinear2d.vec": lambda d: _pooled(d, 2, [8, 6], d.random.random() < 0.5, None),
    "upsample_nearest2d.vec": lambda d: _pooled(d, 2, None, [2.0, 1.5]),
    "var.correction": lambda d: (
        [d.normal(*d.sizes(3)), [1]], {"correction": d.random.choice([0, 1]), "keepdim": True}),
    "view": lambda d: (
        [d.normal(4, 6, 8), d.random.choice([[24, 8], [4, 48], [2, 2, 6, 8], [4, 6, 2, 4]])], {}),
    "where.self": lambda d: ([d.flags(4, 6), d.normal(4, 6), d.normal(6)], {}),
}  # fmt: skip

MORE: dict[str, Callable[[Draw], Arguments]] = {
    **{name: _unary("normal") for name in ["log_sigmoid", "erfc", "exp2", "sinc", "nan_to_num", "celu"]},
    "max.other": _binary("normal"),
    "expand_as": lambda d: ([d.normal(4, 1, 6), d.normal(8, 4, 2, 6)], {}),
    "binary_cross_entropy": lambda d: ([d.unit(4, 6) ** 2, d.unit(4, 6) ** 2, d.fixed(d.positive(6))], {}),
    "binary_cross_entropy_with_logits": lambda d: (
        [d.normal(4, 6), d.unit(4, 6), None, d.fixed(d.positive(*d.random.choice([(), (6,), (1,)])))],
        {},
    ),
    "cdist": lambda d: ([d.normal(2, d.random.choice([4, 32]), 8), d.normal(2, 6, 8)], {}),
    "conv_transpose1d": lambda d: ([d.normal(2, 4, 6), d.normal(4, 6, 2), d.normal(6), [2]], {}),
    "conv_transpose2d.input": lambda d: (
        [d.normal(2, 4, 3, 3), d.normal(4, 3, 2, 2), d.normal(6), [2, 2], [0, 0], [0, 0], 2],
        {},
    ),
    "conv_transpose3d.input": lambda d: ([d.normal(2, 4, 3, 3, 3), d.normal(4, 6, 2, 2, 2), d.normal(6)], {}),
    "cosine_embedding_loss": lambda d: (
        [d.normal(4, 6), d.normal(4, 6), d.flags(4).double() * 2 - 1, 0.1, d.random.choice([0, 1, 2])],
        {},
    ),
    "cosine_similarity": lambda d: ([d.normal(4, 6, 8), d.normal(4, 6, 8), d.random.randrange(3)], {}),
    "cross_entropy_loss": lambda d: (
        [
            d.normal(8, 6),
            d.index(6, 8),
            d.fixed(d.positive(6)),
            d.random.choice([1, 2]),
            2,
            d.random.choice([0.0, 0.1]),
        ],
        {},
    ),
    "cumprod": _along,
    "embedding_bag.padding_idx": lambda d: (
        [
            *(d.normal(8, 6), d.index(8, 12), torch.arange(0, 12, 3), False, d.random.choice([0, 1])),
            *(False, None, False, d.random.choice([None, 2])),
        ],
        {},
    ),
    "gru_cell": lambda d: (
        [d.normal(4, 6), d.normal(4, 2), d.normal(6, 6), d.normal(6, 2), d.normal(6), d.normal(6)],
        {},
    ),
    "im2col": lambda d: ([d.normal(2, 4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]], {}),
    "index_add": lambda d: ([d.normal(4, 6, 2), 1, d.index(6, 8), d.normal(4, 8, 2)], {}),
    "instance_norm": lambda d: (
        [d.normal(2, 4, 6), d.normal(4), d.normal(4), None, None, True, 0.1, 1e-5, False],
        {},
    ),
    "kl_div": lambda d: ([d.normal(4, 6), d.unit(4, 6) ** 2, d.random.choice([0, 1, 2])], {}),
    "linalg_vector_norm": lambda d: (
        [d.normal(4, 6, 8), d.random.choice([1, 2, 3]), [d.random.randrange(3)]],
        {"keepdim": d.random.random() < 0.5},
    ),
    "lstm_cell": lambda d: (
        [d.normal(4, 6), [d.normal(4, 2), d.normal(4, 2)], d.normal(8, 6), d.normal(8, 2), d.normal(8)],
        {},
    ),
    "nll_loss_nd": lambda d: ([d.normal(4, 6, 2), d.index(6, 4, 2), d.fixed(d.positive(6))], {}),
    "one_hot": lambda d: ([d.index(6, 4, 2), 6], {}),
    "pairwise_distance": lambda d: ([d.normal(4, 6), d.normal(4, 6)], {"keepdim": d.random.random() < 0.5}),
    "repeat_interleave.self_int": lambda d: ([d.normal(4, 6, 8), 3, d.random.randrange(3)], {}),
    "scaled_dot_product_attention": lambda d: (
        [d.normal(4, 6, 8), d.normal(4, 2, 8), d.normal(4, 2, 8), d.random.choice([None, d.normal(6, 2)])],
        {},
    ),
    "soft_margin_loss": lambda d: ([d.normal(4, 6), d.fixed(d.flags(4, 6).double() * 2 - 1)], {}),
    "tril": lambda d: ([d.normal(*d.sizes(3)), d.random.choice([-1, 0])], {}),
    "triplet_margin_loss": lambda d: ([d.normal(4, 6), d.normal(4, 6), d.normal(4, 6)], {}),
    "upsample_trilinear3d.vec": lambda d: _pooled(d, 3, None, False, [2.0] * 3),
    "upsample_bicubic2d.vec": lambda d: _pooled(d, 2, [6, 6], True, None),
    "view_as_complex": lambda d: ([d.normal(4, 6, 2)], {}),
    "view_as_real": lambda d: ([torch.complex(d.normal(4, 6), d.normal(4, 6))], {}),
}
"""Of other operators with a rule, which forward passes hold whole."""


REFUSED = frozenset({"_local_scalar_dense", "_native_batch_norm_legit", "nonzero", "atan2.out", "resize_"})
"""What no recorded graph can hold: numbers, shapes that depend on values, results that are written."""
UNDERIVED = frozenset(
    {"_cdist_forward", "_pdist_forward", "_embedding_bag", "atan2.out", "copy", "resize_"}
    | {"_native_batch_norm_legit", "_native_batch_norm_legit_no_training"}
    | {"native_group_norm_backward", "native_layer_norm_backward"}
)
"""What torch does not differentiate: halves of operators, passes of gradients, statistics."""
LAID_OUT = frozenset({"_pdist_forward", "max_pool2d_with_indices_backward", "view", "view_as_complex"})
"""What torch itself refuses of tensors that are not contiguous."""
DRAWN = frozenset({"rand", "randn", "randperm", "native_dropout"})
"""Random numbers: the same on all ranks, and others than one process draws."""
UNSET = frozenset({"empty.memory_format", "empty_strided"})
"""Nobody can say what is in their results."""


class Call(nn.Module):
    """One operator on parameters and buffers that lie in memory in other orders than they are read.

    Returns a number to which each element of its results adds its own share.
    """

    def __init__(self, name: str, draw: Draw) -> None:
        super().__init__()
        out = name == "atan2.out"
        arguments = (
            ([draw.normal(4), draw.normal(4)], {"out": draw.normal(4)})
            if out
            else {**SAMPLES, **MORE}[name](draw)
        )
        self.leaves, self.structure = pytree.tree_flatten(arguments)
        self.orders: dict[int, list[int]] = {}
        self.function = _function(name)
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                self._hold(number, leaf, name, draw)
        self.refused = name in REFUSED
        if self.refused:
            return
        with torch.no_grad():
            parts = [part for part in self.results() if part.numel()]
        for number, part in enumerate(parts):
            shares = torch.arange(1, part.numel() + 1, dtype=torch.float64).cos()
            self.register_buffer(f"shares{number}", shares.view(part.shape))

    def _hold(self, number: int, leaf: Any, name: str, draw: Draw) -> None:
        order = list(range(leaf.dim()))
        if name not in LAID_OUT:
            draw.random.shuffle(order)
        held = leaf.permute(order).contiguous()
        self.orders[number] = [order.index(d) for d in range(leaf.dim())]
        if leaf.is_floating_point() and name not in UNDERIVED and not hasattr(leaf, "fixed"):
            self.register_parameter(f"p{number}", nn.Parameter(held))
        else:
            self.register_buffer(f"p{number}", held)
        self.leaves[number] = None

    def results(self) -> list[Any]:
        leaves = list(self.leaves)
        for number, order in self.orders.items():
            leaves[number] = getattr(self, f"p{number}").permute(order)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.function(*args, **kwargs)
        found = result if isinstance(result, (tuple, list)) else [result]
        tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in found if x is not None]
        return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]

    def forward(self) -> Any:
        if self.refused:
            return self.results()[0].sum()
        parts = [part for part in self.results() if part.numel()]
        totals = [(part * getattr(self, f"shares{number}")).sum() for number, part in enumerate(parts)]
        return sum(totals[1:], totals[0])


def _function(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: function(*args, **kwargs)


class Calls(nn.Module):
    """Many operators at once; returns a number of each."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        super().__init__()
        self.names = list(names)
        self.calls = nn.ModuleDict()
        for number, name in enumerate(names):
            self.calls[f"{number}"] = Call(name, Draw(seed * 1000 + number))

    def forward(self, x: Any) -> Any:
        return torch.stack([call() for call in self.calls.values()]) + 0 * x.sum()


def swept() -> list[str]:
    """The operators that a graph can hold, in order."""
    return [name for name in sorted(core_operators()) if name not in REFUSED | UNSET] + sorted(MORE)


def operator_nodes(graph: Graph, names: Sequence[str]) -> Iterator[tuple[str, list[Node]]]:
    """By operator, its nodes in the graph of :class:`Calls`."""
    by_module: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "call":
            by_module.setdefault(node.module, []).append(node)
    for number, name in enumerate(names):
        own = by_module.get(f"calls.{number}", [])
        yield name, [node for node in own if node.op == name.split(".")[0]][-1:]


def refusal(name: str) -> str:
    """The sentence with which an operator is refused; "": it is not."""
    try:
        trace(Calls([name], 0), (torch.ones(2).double(),))
    except TraceError as error:
        return str(error)
    return ""


def classes(graph: Graph, names: Sequence[str]) -> dict[str, str]:
    """What plans make of each operator: "ruled", "whole", "number" (it leaves no operator) or "refused"."""
    found = dict.fromkeys(REFUSED, "refused") | dict.fromkeys(UNSET, "whole")
    for name, nodes in operator_nodes(graph, names):
        if name in MORE:
            continue
        ruled = any(mode.size for node in nodes for mode in modes_of(graph, node)[0])
        found[name] = "ruled" if ruled else "whole" if nodes else "number"
    return found


_WORDS = {
    "ruled": "divided along the dimensions that it does not mix",
    "whole": "kept whole on every rank, its cost counted",
    "number": "a number when it is recorded",
    "refused": "refused, with the line and a remedy",
}


def table(graph: Graph, names: Sequence[str]) -> str:
    """The rows of docs/parallel.md."""
    found = classes(graph, names)
    rows = ["| what plans make of an operator | number | which |", "|---|---|---|"]
    for kind, words in _WORDS.items():
        own = sorted(name for name, each in found.items() if each == kind)
        rows.append(f"| {words} | {len(own)} | {', '.join(f'`{name}`' for name in own)} |")
    return "\n".join(rows)


BEGIN, END = "<!-- made by python -m tests.parallel.core_operators -->\n", "\n<!-- end -->"
PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def main() -> None:
    """Writes the table into the page."""
    names = swept()
    graph = trace(Calls(names, 0), (torch.ones(2).double(),)).graph
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(graph, names) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
