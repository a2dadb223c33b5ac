"""Detects frameworks that divide the data themselves, but know of fewer processes than there are ranks."""

from __future__ import annotations

import contextlib
import sys
import warnings
from types import FrameType
from typing import Any

from muster.errors import DataNotDividedWarning


def warn_if_data_is_not_divided(world_size: int) -> None:
    """Warns if a framework runs the training loop and counts fewer processes than there are ranks.

    Accelerate (and with it the Trainer of Transformers) and Lightning divide the data among the processes
    that they know. They do not know of the other ranks of ``muster.DataParallel``. Call this within a forward
    pass, because it looks for the training loop among its callers.

    Args:
        world_size: number of ranks.
    """
    for name, processes in (("Accelerate", _accelerate()), ("Lightning", _lightning())):
        if processes is not None and processes < world_size:
            known = "this process alone" if processes == 1 else f"{processes} processes"
            warnings.warn(
                f"{name} knows of {known}, and there are {world_size} ranks: its loaders give every rank all"
                " the data. Leave muster.DataParallel and muster.init() out: then the framework distributes"
                " model and data under `muster run`. Or divide the data by muster.ShardedSampler, and ignore"
                " this DataNotDividedWarning.",
                DataNotDividedWarning,
                stacklevel=3,
            )
            return


def _accelerate() -> int | None:
    """Returns Accelerate's number of processes; None: it is not in use."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return _number(getattr(state, "_shared_state", {}).get("num_processes"))


def _lightning() -> int | None:
    """Returns the number of processes of a Lightning Trainer that is calling; None: there is none."""
    if not {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(("lightning.pytorch.", "pytorch_lightning.")):
            with contextlib.suppress(Exception):  # the property raises if there is none
                return _number(frame.f_locals["self"].trainer.world_size)
        frame = frame.f_back
    return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
