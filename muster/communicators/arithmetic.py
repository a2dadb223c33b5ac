"""Reduces values of different ranks on the host, for each dtype.

NumPy has no bfloat16. On the host such an array is a uint16 array over the same memory. Float16 and bfloat16
are reduced in float32: the values of all ranks are combined there, and rounded once at the end, to the
nearest value (ties to even), as torch rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import ArrayError

NumpyArray = npt.NDArray[Any]


def undefined_mean(dtype: str) -> ArrayError:
    """Returns the error for a mean of integers, which would have to be rounded."""
    return ArrayError(f"The mean of {dtype} is not defined.", remedy="Use sum, or a float dtype.")


_COMBINE: dict[ReduceOp, Callable[..., NumpyArray]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


class Arithmetic:
    """The reductions of one dtype on the host.

    Args:
        storage: NumPy's dtype for its elements.
        wide: the dtype in which they are combined.
    """

    def __init__(self, storage: str, wide: str) -> None:
        self.storage, self.wide = np.dtype(storage), np.dtype(wide)
        self.is_short = storage != wide

    def widen(self, values: NumpyArray) -> NumpyArray:
        """Returns the values in the dtype in which they are combined: a copy, or the values themselves."""
        if values.dtype == self.wide:
            return values
        if self.storage.kind == "f":
            return values.astype(self.wide)
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(self.wide)

    def narrow(self, wide: NumpyArray, out: NumpyArray) -> None:
        """Rounds combined values to their dtype, into ``out``."""
        if self.storage.kind == "u" and self.is_short:
            bits = wide.view(np.uint32)
            rounded = bits >> 16
            rounded &= 1
            rounded += 0x7FFF
            rounded += bits  # wraps for some NaNs, which are set below
            rounded >>= 16
            out[...] = rounded
            out[np.isnan(wide)] = 0x7FC0
        elif out is not wide:
            with np.errstate(over="ignore"):  # infinity, as the sum of float32 would be
                out[...] = wide

    def combine(self, op: ReduceOp, left: NumpyArray, right: NumpyArray, out: NumpyArray) -> None:
        """Combines two wide arrays; for a mean, adds them. ``out`` may be either of them."""
        _COMBINE[op](left, right, out=out)

    def finish(self, op: ReduceOp, wide: NumpyArray, ranks: int, out: NumpyArray) -> None:
        """Writes the combined ``wide`` of ``ranks`` arrays into ``out``; ``wide`` may be overwritten."""
        if op is ReduceOp.MEAN:
            np.divide(wide, self.wide.type(ranks), out=wide)
        self.narrow(wide, out)

    def reduce_all(self, op: ReduceOp, parts: Sequence[NumpyArray], out: NumpyArray) -> None:
        """Combines arrays of all ranks in order of rank; ``out`` may share no memory with them."""
        total = np.empty(out.shape, self.wide) if self.is_short else out
        if len(parts) == 1:
            total[...] = self.widen(parts[0])
        else:
            self.combine(op, self.widen(parts[0]), self.widen(parts[1]), total)
        for part in parts[2:]:
            self.combine(op, total, self.widen(part), total)
        self.finish(op, total, len(parts), out)

    def check(self, dtype: str, op: ReduceOp) -> None:
        """Checks that the operation is defined for this dtype.

        The mean of integers is refused (it would have to be rounded), and so are sum and mean of booleans.

        Raises:
            ArrayError: the operation is a mean of integers or booleans, or a sum of booleans.
        """
        if op is ReduceOp.MEAN and self.wide.kind != "f":
            raise undefined_mean(dtype)
        if op is ReduceOp.SUM and self.wide.kind == "b":
            raise ArrayError(
                "The sum of bool is not defined.", remedy="Use max for any, or an integer dtype."
            )


ARITHMETIC = {
    name: Arithmetic(name, name)
    for name in (
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float32", "float64", "bool"),
    )
} | {"float16": Arithmetic("float16", "float32"), "bfloat16": Arithmetic("uint16", "float32")}
"""The dtypes that communicators take on the host, by name."""
