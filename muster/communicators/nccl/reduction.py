"""Reductions on NCCL: the numbers of dtypes and operations, and scaled sums."""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any

from muster.communicators.arithmetic import undefined_mean
from muster.communicators.reduce_ops import PreMultipliedSum, ReduceOp
from muster.errors import ArrayError

NCCL_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""NCCL's numbers of the dtypes, by NumPy's names (``ncclDataType_t``)."""

TYPE_NAMES = {number: name for name, number in NCCL_TYPES.items()}
ITEM_SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""Bytes per element, by NCCL's number."""

MOVED_AS = {1: 1, 2: 6, 4: 2, 8: 4}
"""By bytes per element: the number under which an element that NCCL does not know is moved, bit for bit."""

_FORMATS = {"float16": "<e", "float32": "<f", "float64": "<d", "bfloat16": "<f"}


def scalar_bytes(value: float, dtype: int) -> bytes:
    """``value`` as one element of NCCL's ``dtype``.

    Raises:
        ArrayError: the dtype is not a floating-point one, or cannot hold ``value``.
    """
    name = TYPE_NAMES[dtype]
    if name not in _FORMATS:
        raise ArrayError(f"a pre-multiplied sum needs a floating-point dtype, not {name}")
    try:
        data = struct.pack(_FORMATS[name], value)
        if name == "bfloat16":
            (bits,) = struct.unpack("<I", data)
            data = struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
            if data[1] & 0x7F == 0x7F and data[0] == 0x80 and not math.isinf(value):
                raise OverflowError
    except (OverflowError, struct.error) as error:
        raise ArrayError(
            f"the factor {value!r} of a pre-multiplied sum cannot be a {name}",
            remedy="Give a number within the dtype's range, or convert the array to a wider one.",
        ) from error
    return data


def address_of(data: bytes) -> int:
    """Address of ``data``, which the caller must keep alive over the call."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


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
        """Returns NCCL's number of an operation.

        Args:
            op: the operation.
            dtype: NCCL's number of the arrays' dtype.
            grouped: whether the call is within a group of calls; NCCL needs the operation until its end.

        Raises:
            ArrayError: the operation does not exist, or not for this dtype.
        """
        if not isinstance(op, PreMultipliedSum):
            if op == _MEAN and dtype < _FIRST_FLOAT:
                raise undefined_mean(TYPE_NAMES[dtype])
            return _NUMBERS[ReduceOp.of(op)]
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
        """Frees the operations made for factors; the communicator must still exist."""
        for number in self._factors.values():
            with contextlib.suppress(self._nccl.NCCLError):
                self._nccl.red_op_destroy(number, self._comm)


_SUM_NUMBER, _MEAN_NUMBER = 0, 4
_BLOCK_BYTES = 16 << 10
"""Bytes that NCCL gives to one thread block before it uses another."""


def whole(reduction: Callable[..., Any]) -> Callable[..., None]:
    """Returns the reduction (all_reduce, reduce or reduce_scatter) of a single rank, over all elements."""

    def call(send: int, recv: int, count: int, dtype: int, op: int, *others: Any) -> None:
        if op <= _MEAN_NUMBER:
            reduction(send, recv, count, dtype, _SUM_NUMBER if op == _MEAN_NUMBER else op, *others)
            return
        rest = count % (_BLOCK_BYTES // ITEM_SIZES[dtype])
        head = count - rest
        if head or not rest:
            reduction(send, recv, head, dtype, op, *others)
        if rest:
            offset = head * ITEM_SIZES[dtype]
            reduction(send + offset, recv + offset, rest, dtype, op, *others)

    return call
