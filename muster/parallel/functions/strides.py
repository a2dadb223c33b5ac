"""Operators that read a tensor's memory by strides: what was recorded holds for tensors in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from muster.parallel.untraced import TraceError

BY_STRIDES = frozenset({"as_strided", "as_strided_copy", "_reshape_alias"})
"""Operators whose arguments are the strides of their result."""

_LARGEST_ITEM = 16  # bytes, of a complex128


def strided_function(op: str, example: Any, arguments: Sequence[Any], line: str) -> Callable[..., Any]:
    """The function of a recorded operator of ``BY_STRIDES`` that does the same with a tensor in any layout.

    Its sizes, strides and offset are those of the example's memory. So a tensor that came from other ranks,
    or was divided, is laid out like the example first.

    Args:
        op: the operator's name.
        example: the tensor that it was recorded with, whose layout counts.
        arguments: those behind the tensor: sizes, strides, and the offset if there is one.
        line: where it is called, as ``model.py:12``.

    Raises:
        TraceError: it reads memory that is not the tensor's own.
    """
    size, stride = tuple(arguments[0]), tuple(arguments[1])
    start = example.storage_offset()
    offset = arguments[2] if len(arguments) > 2 and arguments[2] is not None else start
    own = _span(example.shape, example.stride())
    last = offset + _span(size, stride)
    if own != example.numel() or offset < start or last > start + own:
        raise TraceError(
            f"{line or 'The forward pass'} reads memory beside its tensor's own elements by {op}.",
            line=line,
            remedy="Call .contiguous() before it, or index the tensor that holds all of them.",
        )
    layout, first = tuple(example.stride()), offset - start

    def function(x: Any, *_: Any, **__: Any) -> Any:
        x = in_layout(x, layout)
        return x.as_strided(size, stride, x.storage_offset() + first)

    return function


def as_recorded(function: Callable[..., Any], contiguous: Sequence[bool]) -> Callable[..., Any]:
    """The function of tensors that are contiguous where those were that it was recorded with.

    Some of torch's operators refuse others, or copy them themselves.

    Args:
        function: an operator.
        contiguous: of each of its tensors, in the order of the arguments.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        were = iter(contiguous)
        leaves = [
            each.contiguous() if isinstance(each, torch.Tensor) and next(were) else each for each in leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return function(*args, **kwargs)

    return call if any(contiguous) else function


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last that a tensor reads."""
    if not math.prod(size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def in_layout(x: Any, strides: Sequence[int]) -> Any:
    """The tensor, or a copy of it, with these strides; those of dimensions of size 1 do not count."""
    apart = zip(x.shape, x.stride(), strides, strict=True)
    if all(mine == wanted for size, mine, wanted in apart if size > 1):
        return x
    return torch.empty_strided(x.shape, tuple(strides), dtype=x.dtype, device=x.device).copy_(x)


def as_pairs(x: Any) -> Any:
    """The tensor, or a copy of it, whose last dimension can be read as complex numbers."""
    even = all(step % 2 == 0 for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x if x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and even else dense(x)


def dense(x: Any) -> Any:
    """The tensor, or a copy of it, whose memory can be read as another dtype."""
    aligned = x.is_contiguous() and x.storage_offset() % _LARGEST_ITEM == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
