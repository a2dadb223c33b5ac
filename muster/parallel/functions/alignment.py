"""The loss of connectionist temporal classification, recorded as one operator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_LENGTHS_AT = (2, 3)


torch.library.define(  # it is only recorded, never run, so it has neither an implementation nor a gradient
    "muster::ctc_loss",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths,"
    " int blank, int reduction, bool zero_infinity) -> Tensor",
)
_recorded = torch.ops.muster.ctc_loss.default


@torch.library.register_fake("muster::ctc_loss")  # type: ignore[untyped-decorator]
def _result(log_probs: Any, *arguments: Any) -> Any:
    each = log_probs.shape[1:2] if log_probs.dim() == 3 else ()
    return log_probs.new_empty(() if arguments[4] else each)


RUN = {_recorded: torch.ctc_loss}
"""The operator that is recorded, and the function of torch that runs in its place."""


@contextlib.contextmanager
def recorded_as_one() -> Iterator[None]:
    """Context in which ``torch.ctc_loss`` is recorded as one operator, in this thread only.

    Torch would record it as two operators. The shape of the tensor between them depends on the lengths of the
    targets, so that a graph cannot contain it.
    """
    original, thread = torch.ctc_loss, threading.get_ident()

    def ctc_loss(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != thread or named:
            return original(*arguments, **named)
        given = [*arguments, *(0, 1, False)[len(arguments) - 4 :]]
        for at in _LENGTHS_AT:
            if not isinstance(given[at], torch.Tensor):
                given[at] = torch.tensor(given[at], dtype=torch.long)
        return _recorded(*given)

    torch.ctc_loss = ctc_loss
    try:
        yield
    finally:
        torch.ctc_loss = original
