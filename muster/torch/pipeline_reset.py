"""Drops what a broken step has left in torch's pipeline schedules, so that the next step begins cleanly."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

_LEFT_BY_A_STEP = ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages")
"""Further attributes that multi-stage schedules keep, in the releases of torch that have them."""


def reset_pipelines() -> bool:
    """Drops this process's part of a broken step; returns False if this torch cannot do it.

    A schedule's ``step()`` clears its stages when it begins, but not the losses of a step that raised. The
    next step would run backward through these. No object of a program's state refers to a schedule, so all
    schedules of this process are reset.
    """
    for schedule in _schedules():
        if not hasattr(schedule, "_internal_losses"):
            return False
        schedule._internal_losses.clear()
        for name in _LEFT_BY_A_STEP:
            if hasattr(schedule, name):
                getattr(schedule, name).clear()
    return True


def _schedules() -> Iterator[Any]:
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    kind = getattr(module, "_PipelineSchedule", None)
    if kind is not None:
        yield from (each for each in gc.get_objects() if issubclass(type(each), kind))
