"""A loss of torch that looks at values before it computes, which no recorded pass could do."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """While a forward pass is recorded inside, this thread's ``gaussian_nll_loss`` looks at no variances.

    Torch's own raises where one is negative, and then raises those below ``eps`` under ``no_grad``: of that
    an exported graph shows the new values, but not that gradients pass as if nothing had been raised. A
    program that holds torch's function by another name is refused by the exporter. One recording at a time.
    """
    original, thread = functional.gaussian_nll_loss, threading.get_ident()

    def gaussian_nll_loss(
        input: Any, target: Any, var: Any, full: Any = False, eps: Any = 1e-6, reduction: Any = "mean"
    ) -> Any:
        if threading.get_ident() != thread or reduction not in _REDUCED:
            return original(input, target, var, full, eps, reduction)
        return _REDUCED[reduction](_losses(input, target, var, full, eps))

    functional.gaussian_nll_loss = gaussian_nll_loss
    try:
        yield
    finally:
        functional.gaussian_nll_loss = original


_REDUCED = {"none": lambda losses: losses, "mean": torch.mean, "sum": torch.sum}


def _losses(mean: Any, target: Any, variance: Any, full: bool, eps: float) -> Any:
    """The negative logarithm of a normal density at each target, without the constant unless ``full``."""
    if not isinstance(variance, torch.Tensor):
        variance = torch.full_like(mean, variance)
    if variance.shape == mean.shape[:-1]:
        variance = variance.unsqueeze(-1)
    raised = torch.where(variance < eps, variance + (eps - variance).detach(), variance)
    losses = 0.5 * (raised.log() + (mean - target).square() / raised)
    return losses + 0.5 * math.log(2 * math.pi) if full else losses
