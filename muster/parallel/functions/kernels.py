"""Triton kernels of the cross entropy; only imported where there is Triton, for tensors on a GPU.

Each program has a block of one row's scores, which it reads once; arithmetic is in float32.
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
    shift = tl.where(top == float("-inf"), 0.0, top)  # a block of nothing but -inf adds 0
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
    """Of each block of a row the maximum, the sum of exponentials less it, and the target's score.

    Args:
        scores: [rows, classes], each row in one piece, of at most float32.
        own: the target's place in each row, int64; -1: it is not there.

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
    """Writes ``weight`` times each row's probabilities, less one at the target.

    Args:
        scores: as in :func:`statistics`.
        own: likewise.
        total: the logarithm of each whole row's sum of exponentials, float32.
        weight: of each row, float32.
        out: laid out like ``scores``, which it may be.
    """
    rows, classes = scores.shape
    with torch.cuda.device(scores.device):
        _gradient[(rows, triton.cdiv(classes, _WIDTH))](
            scores, own, total, weight, out, classes, scores.stride(0), width=_WIDTH, num_warps=8
        )
