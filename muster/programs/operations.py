"""Translates torch's reductions into the communicator's, or into NumPy's if the communicator lacks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import ArrayError
from muster.programs import BACKEND

Tensor = Any

_BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
_OPERATIONS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PROD,
}
_LOGICAL = {
    "SUM": ReduceOp.MAX,
    "MAX": ReduceOp.MAX,
    "BOR": ReduceOp.MAX,
    "PRODUCT": ReduceOp.MIN,
    "MIN": ReduceOp.MIN,
    "BAND": ReduceOp.MIN,
}
"""Reductions of torch.bool, where a sum means "any" and a product "all", as in torch."""

Combine = ReduceOp | Callable[..., Any]


def operation_name(op: Any) -> str:
    """Returns the name of a reduction of torch's, such as "SUM"."""
    return next((name for name in (*_OPERATIONS, *_BITWISE) if op == getattr(dist.ReduceOp, name)), str(op))


def operation(op: Any, tensor: Tensor) -> Combine:
    """Returns what reduces values of this tensor's dtype: one of the communicator's operations, or NumPy's.

    Raises:
        ArrayError: the operation is not defined for the dtype.
    """
    name = operation_name(op)
    if tensor.dtype is torch.bool and name in _LOGICAL:
        return _LOGICAL[name]
    if name in _OPERATIONS:
        return _OPERATIONS[name]
    if name in _BITWISE and not tensor.is_floating_point():
        return _BITWISE[name]
    raise ArrayError(f"{name} is not defined for {tensor.dtype} in the backend {BACKEND!r}.")
