"""The operations of reducing collectives."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from muster.errors import ArrayError


class ReduceOp(str, enum.Enum):
    """The operation of a reducing collective. ``MEAN`` divides the sum by the size of the group."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"

    @classmethod
    def of(cls, name: Any) -> ReduceOp:
        """The operation of this name.

        Raises:
            ArrayError: ``name`` is not an operation.
        """
        try:
            return cls(name)
        except ValueError:
            legal = ", ".join(each.value for each in cls)
            raise ArrayError(f"op must be one of {legal}; it is {name!r}.") from None


@dataclass(frozen=True, slots=True)
class PreMultipliedSum:
    """An operation for the reducing collectives of NCCL: each rank's values times ``factor``, summed.

    ``muster.all_reduce(gradient, op=muster.PreMultipliedSum(0.5))``; for floating-point dtypes.

    Attributes:
        factor: rounded to the arrays' dtype before it is multiplied.
    """

    factor: float
