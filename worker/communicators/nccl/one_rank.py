"""Scaling reductions on a communicator of one rank, which NCCL gets wrong.

There NCCL (2.28) copies the array in several thread blocks whose share it rounds down, so that a mean or a
pre-multiplied sum of, say, 120001 elements never writes the last one. Two things it does right: shares
that are whole, and arrays that one block can take. Every other reduction is a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.worker.communicators.nccl.arrays import ITEM_SIZES

_SUM, _MEAN = 0, 4
_BLOCK_BYTES = 16 << 10
"""What NCCL gives to one thread block before it takes another."""


def whole(reduction: Callable[..., Any]) -> Callable[..., None]:
    """``reduction`` (all_reduce, reduce or reduce_scatter), for one rank, over all elements."""

    def call(send: int, recv: int, count: int, dtype: int, op: int, *others: Any) -> None:
        if op <= _MEAN:
            reduction(send, recv, count, dtype, _SUM if op == _MEAN else op, *others)
            return
        rest = count % (_BLOCK_BYTES // ITEM_SIZES[dtype])
        head = count - rest
        if head or not rest:
            reduction(send, recv, head, dtype, op, *others)
        if rest:
            offset = head * ITEM_SIZES[dtype]
            reduction(send + offset, recv + offset, rest, dtype, op, *others)

    return call
