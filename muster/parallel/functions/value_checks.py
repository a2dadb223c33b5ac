"""``gaussian_nll_loss`` without torch's checks of values, which cannot be recorded in a graph."""

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
    """Context in which ``gaussian_nll_loss`` does not check the variances, in this thread only.

    Torch's function raises an error if a variance is negative, and increases variances below ``eps`` under
    ``no_grad``. An exported graph contains the increased values, but not that gradients ignore the increase.
    The exporter refuses programs that have imported torch's function under another name. Only one forward
    pass may be recorded at a time.
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
    """Returns the negative log density of a normal distribution; the constant is added with ``full``."""
    if not isinstance(variance, torch.Tensor):
        variance = torch.full_like(mean, variance)
    if variance.shape == mean.shape[:-1]:
        variance = variance.unsqueeze(-1)
    raised = torch.where(variance < eps, variance + (eps - variance).detach(), variance)
    losses = 0.5 * (raised.log() + (mean - target).square() / raised)
    return losses + 0.5 * math.log(2 * math.pi) if full else losses
