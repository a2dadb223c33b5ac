"""Makes operators that read a tensor's memory by strides work for tensors in any memory layout."""

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
    """Returns a function like a recorded operator of ``BY_STRIDES``, but for tensors in any memory layout.

    The recorded sizes, strides and offset refer to the memory of the example. So a tensor that came from
    other ranks, or is a part of another, is first copied to the example's memory layout.

    Args:
        op: the operator's name.
        example: the tensor with which it was recorded.
        arguments: the arguments after the tensor: sizes, strides, and the offset if there is one.
        line: the line of the call, as ``model.py:12``.

    Raises:
        TraceError: the operator reads memory that does not belong to the tensor.
    """
    size, stride = tuple(arguments[0]), tuple(arguments[1])
    start = example.storage_offset()
    offset = arguments[2] if len(arguments) > 2 and arguments[2] is not None else start
    own = _span(example.shape, example.stride())
    last = offset + _span(size, stride)
    if own != example.numel() or offset < start or last > start + own:
        raise TraceError(
            f"{line or 'The forward pass'} reads memory outside its tensor's own elements by {op}.",
            line=line,
            remedy="Call .contiguous() before it, or index the tensor that holds all of them.",
        )
    layout, first = tuple(example.stride()), offset - start

    def function(x: Any, *_: Any, **__: Any) -> Any:
        x = in_layout(x, layout)
        return x.as_strided(size, stride, x.storage_offset() + first)

    return function


def as_recorded(function: Callable[..., Any], contiguous: Sequence[bool]) -> Callable[..., Any]:
    """Returns an operator that makes those tensors contiguous that were contiguous when it was recorded.

    Some operators of torch refuse tensors that are not contiguous, or copy them.

    Args:
        function: an operator.
        contiguous: whether each of its tensors was contiguous, in the order of the arguments.
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
    """Returns the number of elements of memory from the first to the last that a tensor reads."""
    if not math.prod(size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def in_layout(x: Any, strides: Sequence[int]) -> Any:
    """Returns the tensor, or a copy, with these strides; strides of dimensions of size 1 are not compared."""
    apart = zip(x.shape, x.stride(), strides, strict=True)
    if all(mine == wanted for size, mine, wanted in apart if size > 1):
        return x
    return torch.empty_strided(x.shape, tuple(strides), dtype=x.dtype, device=x.device).copy_(x)


def as_pairs(x: Any) -> Any:
    """Returns the tensor, or a copy, laid out so that its last dimension can be read as complex numbers."""
    even = all(step % 2 == 0 for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x if x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and even else dense(x)


def dense(x: Any) -> Any:
    """Returns the tensor, or a copy, laid out so that its memory can be read as another dtype."""
    aligned = x.is_contiguous() and x.storage_offset() % _LARGEST_ITEM == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
