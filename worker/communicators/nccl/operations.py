"""NCCL's numbers of reducing operations, and those that it makes for factors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from muster.worker.communicators.base import ReduceOp
from muster.worker.communicators.nccl.arrays import TYPE_NAMES
from muster.worker.communicators.nccl.work import PreMultipliedSum, address_of, scalar_bytes
from muster.worker.communicators.validation import check_op, undefined_mean

_NUMBERS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.MEAN: 4}
_MEAN, _FIRST_FLOAT = ReduceOp.MEAN, 6
_IMMEDIATE = 1
"""NCCL reads the factor, in the host's memory, during the call (``ncclScalarHostImmediate``)."""
_KEPT_FACTORS = 16


class Operations:
    """Operations on one communicator.

    Args:
        nccl: the bindings.
        comm: NCCL's communicator.
        call: calls a function of the bindings.
    """

    def __init__(self, nccl: Any, comm: Any, call: Callable[[Callable[..., Any], tuple[Any, ...]], Any]):
        self._nccl, self._comm, self._call = nccl, comm, call
        self._factors: dict[tuple[float, int], int] = {}

    def number(self, op: ReduceOp | PreMultipliedSum, dtype: int, grouped: bool) -> int:
        """The number of an operation.

        Args:
            op: the operation.
            dtype: NCCL's number of the arrays' dtype.
            grouped: within a group of calls, at whose end NCCL still needs each operation.

        Raises:
            ArrayError: there is no such operation, or not for this dtype.
        """
        if not isinstance(op, PreMultipliedSum):
            if op == _MEAN and dtype < _FIRST_FLOAT:
                raise undefined_mean(TYPE_NAMES[dtype])
            return _NUMBERS[check_op(op)]
        number = self._factors.get((op.factor, dtype))
        if number is None:
            scalar = scalar_bytes(op.factor, dtype)
            while len(self._factors) >= _KEPT_FACTORS and not grouped:
                oldest = self._factors.pop(next(iter(self._factors)))
                self._call(self._nccl.red_op_destroy, (oldest, self._comm))
            number = self._call(
                self._nccl.red_op_create_pre_mul_sum, (address_of(scalar), dtype, _IMMEDIATE, self._comm)
            )
            self._factors[op.factor, dtype] = number
        return number

    def destroy(self) -> None:
        """Frees what was made for factors, while the communicator lives."""
        for number in self._factors.values():
            with contextlib.suppress(self._nccl.NCCLError):
                self._nccl.red_op_destroy(number, self._comm)
