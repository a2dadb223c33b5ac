"""Triton kernels of the cross entropy; imported only if Triton is installed and the tensors are on a GPU.

Each program reads a block of one row's scores once, and computes in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_WIDTH = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(scores, own, out, rows, classes, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    column = block * width + tl.arange(0, width)
    inside = column < classes
    x = tl.load(scores + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)  # a block that is all -inf adds 0
    total = tl.sum(tl.exp(x - shift), 0)
    wanted = tl.sum(tl.where(column == tl.load(own + row), x, 0.0), 0)
    place = out + block * 3 * rows + row
    tl.store(place, top)
    tl.store(place + rows, total)
    tl.store(place + 2 * rows, wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(scores, own, total, weight, out, classes, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * width + tl.arange(0, width)
    inside = column < classes
    x = tl.load(scores + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.exp(x - tl.load(total + row))
    share = tl.where(column == tl.load(own + row), share - 1.0, share) * tl.load(weight + row)
    tl.store(out + row * stride + column, share.to(out.dtype.element_ty), mask=inside)


def statistics(scores: Any, own: Any) -> Any:
    """Computes three numbers for each block of a row, from which the cross entropy follows.

    They are the block's maximum m, its sum of exp(score - m), and the target's score (0 if the target is in
    another block).

    Args:
        scores: shape [rows, classes], contiguous within a row, of float32 or a lower precision.
        own: the target's index in each row, int64; -1: the target is not among these classes.

    Returns:
        float32 of shape [blocks, 3, rows].
    """
    rows, classes = scores.shape
    blocks = triton.cdiv(classes, _WIDTH)
    out = torch.empty((blocks, 3, rows), dtype=torch.float32, device=scores.device)
    with torch.cuda.device(scores.device):
        _statistics[(rows, blocks)](
            scores, own, out, rows, classes, scores.stride(0), width=_WIDTH, num_warps=8
        )
    return out


def write_gradient(scores: Any, own: Any, total: Any, weight: Any, out: Any) -> None:
    """Writes the gradient: each row's probabilities, minus 1 at the target, times the row's weight.

    Args:
        scores: as in :func:`statistics`.
        own: as in :func:`statistics`.
        total: the logarithm of the sum of exponentials of each whole row, float32, of shape [rows].
        weight: the factor of each row, float32, of shape [rows].
        out: the result, with the strides of ``scores``; it may be ``scores`` itself.
    """
    rows, classes = scores.shape
    with torch.cuda.device(scores.device):
        _gradient[(rows, triton.cdiv(classes, _WIDTH))](
            scores, own, total, weight, out, classes, scores.stride(0), width=_WIDTH, num_warps=8
        )
