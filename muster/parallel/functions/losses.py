"""The cross entropy in one pass over the scores; classes may be sharded over ranks."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from muster.parallel.planning.precision import FUSED_FROM

_CHUNK_ELEMENTS = 16 * 2**20
_LOW = (torch.bfloat16, torch.float16)


class CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The cross entropy of each row of scores. If classes are sharded, no rank ever has a whole row.

    The forward pass reads the scores once; the backward pass reads them once and writes the gradient. No
    other tensor of that size is kept. On a GPU with Triton each pass is one kernel; otherwise each works on a
    chunk of rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Any,
        target: Any,
        first: int,
        gather: Callable[[Any], Any] | None,
        ignored: int,
        overwrite: bool,
    ) -> Any:
        """Returns the losses, of shape [rows] and at least float32; 0 if the target is ignored.

        Args:
            ctx: autograd's context.
            scores: shape [rows, this rank's classes].
            target: the index among all classes, int64, of shape [rows].
            first: the index of this rank's first class.
            gather: stacks the tensors of all ranks to shape [ranks, ...]; None: classes are not sharded.
            ignored: the target whose loss is 0.
            overwrite: whether the gradient may overwrite the scores, as no other operator reads them.
        """
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        counted = target != ignored
        own = target - first
        own = torch.where((own >= 0) & (own < scores.shape[1]) & counted, own, -1)
        found = _statistics(scores, own)
        if gather is not None:
            found = _combined(gather(found))
        total = found[1].log() + found[0]
        ctx.save_for_backward(scores, own, total, counted)
        ctx.overwrite = overwrite
        return torch.where(counted, total - found[2], 0.0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient in the scores' dtype: probabilities, minus 1 at the target, times ``grad``."""
        scores, own, total, counted = ctx.saved_tensors
        scores = scores.detach()
        weight = torch.where(counted, grad, 0.0)
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # another backward pass may follow
        out = scores if ctx.overwrite and not again else torch.empty_like(scores)
        kernels = _kernels(scores)
        if kernels is not None and out.stride() == scores.stride():
            kernels.write_gradient(scores, own, total, weight.to(total.dtype), out)
        else:
            _write_gradient(scores, own, total, weight, out)
        return out, None, None, None, None, None


def _statistics(scores: Any, own: Any) -> Any:
    """Returns for each row its maximum m, its sum of exp(score - m), and the target's score or 0.

    The target's score is 0 if the target is not among this rank's classes. The result has shape [3, rows].
    """
    kernels = _kernels(scores)
    if kernels is not None:
        return _combined(kernels.statistics(scores, own))
    found = torch.empty((3, len(scores)), dtype=_exact(scores.dtype), device=scores.device)
    for rows in _chunks(scores):
        part = scores[rows].to(found.dtype)
        top = part.max(1).values
        found[0, rows] = top
        found[1, rows] = (part - top.masked_fill(top == -math.inf, 0)[:, None]).exp_().sum(1)
        found[2, rows] = part.gather(1, own[rows].clamp(min=0)[:, None])[:, 0]
    found[2] = torch.where(own < 0, 0.0, found[2])
    return found


def _combined(parts: Any) -> Any:
    """Combines the statistics of parts of rows, of shape [parts, 3, rows], to those of whole rows."""
    if len(parts) == 1:
        return parts[0]
    tops, sums, wanted = parts.unbind(1)
    top = tops.amax(0)
    return torch.stack([top, (sums * (tops - top).exp()).sum(0), wanted.sum(0)])


def _write_gradient(scores: Any, own: Any, total: Any, weight: Any, out: Any) -> None:
    for rows in _chunks(scores):
        part = (scores[rows].to(total.dtype) - total[rows, None]).exp_()
        part.scatter_add_(1, own[rows].clamp(min=0)[:, None], -(own[rows, None] >= 0).to(part.dtype))
        out[rows] = part.mul_(weight[rows, None]).to(out.dtype)


def _exact(dtype: Any) -> Any:
    return torch.promote_types(dtype, torch.float32)  # float16 overflows above 65,504


def _chunks(scores: Any) -> list[slice]:
    stride = max(1, _CHUNK_ELEMENTS // max(1, scores.shape[1]))
    return [slice(start, start + stride) for start in range(0, scores.shape[0], stride)]


@functools.cache
def _with_triton() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    from muster.parallel.functions import kernels

    return kernels


def _kernels(scores: Any) -> Any:
    """Returns the module with the kernels for these scores; None: there are none."""
    if not scores.is_cuda or scores.dtype not in (torch.float32, *_LOW) or not scores.numel():
        return None
    return _with_triton()


def pays(scores: Any) -> bool:
    """Whether unsharded scores are computed faster here than by torch."""
    return bool(scores.numel() >= FUSED_FROM) and _kernels(scores) is not None
