"""Reductions on NCCL: the numbers of operations, scaled sums, and what a collective gives back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from muster.worker.communicators.base import ReduceOp
from muster.worker.communicators.nccl.arrays import ITEM_SIZES, TYPE_NAMES
from muster.worker.communicators.nccl.streams import CudaLibrary
from muster.worker.communicators.validation import check_op, undefined_mean
from muster.worker.errors import ArrayError

_FORMATS = {"float16": "<e", "float32": "<f", "float64": "<d", "bfloat16": "<f"}


class _Checked(Protocol):
    def check(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PreMultipliedSum:
    """An operation for the reducing collectives of NCCL: each rank's values times ``factor``, summed.

    ``muster.all_reduce(gradient, op=worker.PreMultipliedSum(0.5))``; for floating-point dtypes.

    Attributes:
        factor: rounded to the arrays' dtype before it is multiplied.
    """

    factor: float


class Issued:
    """A collective on the caller's stream: its result may be used from there at once."""

    __slots__ = ("_communicator", "library")

    def __init__(self, communicator: _Checked, library: CudaLibrary) -> None:
        self._communicator = communicator
        self.library = library

    def done(self) -> bool:
        """Whether it, and all else that is queued on the current stream, is over. Never blocks."""
        # One object serves all calls, so it cannot know which of them is meant; the last includes them.
        return self.library.idle()

    def wait(self) -> None:
        """Nothing to wait for on the same stream; raises what ended the communicator."""
        self._communicator.check()


class Queued:
    """A collective on the communicator's own stream. Holds its arrays until it is waited for."""

    __slots__ = ("_arrays", "_communicator", "_event", "_library")

    def __init__(self, communicator: _Checked, library: CudaLibrary, event: Any, arrays: Any) -> None:
        self._communicator = communicator
        self._library = library
        self._event = event
        self._arrays = arrays

    def done(self) -> bool:
        """Whether it has completed. Never blocks."""
        return self._library.happened(self._event)

    def wait(self) -> None:
        """Makes the current stream wait for it."""
        self._communicator.check()
        self._library.wait(self._event)
        self._arrays = None


def scalar_bytes(value: float, dtype: int) -> bytes:
    """``value`` as one element of NCCL's ``dtype``.

    Raises:
        ArrayError: the dtype is none of floating-point numbers, or cannot hold ``value``.
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


_SUM_NUMBER, _MEAN_NUMBER = 0, 4
_BLOCK_BYTES = 16 << 10
"""What NCCL gives to one thread block before it takes another."""


def whole(reduction: Callable[..., Any]) -> Callable[..., None]:
    """``reduction`` (all_reduce, reduce or reduce_scatter), for one rank, over all elements."""

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
