"""The settings of a sharded model, named as the keywords of :func:`muster.parallelize`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muster.errors import SettingsError
from muster.parallel.planning.context import MODES, SEARCH_NAMES
from muster.parallel.planning.problem import ALWAYS
from muster.parallel.planning.strategies import Slices

NO_FLOAT16 = (
    "autocast to float16 needs scaled losses, and a GradScaler sees the gradients of one rank's parts: use"
    " torch.bfloat16"
)


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """The settings of :func:`muster.parallelize`; see there.

    Attributes:
        load: the file from which the plan is loaded; "": a plan is searched.
        save: the file to which the plan is saved; "": it is not saved.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
        synchronised: whether the user explicitly asked for the statistics of the whole batch.
    """

    mode: str = "auto"
    search: str = "exact"
    dataset_strategy: str | Sequence[Slices] = "data_parallel"
    gradients_mean: bool = True
    parameter_broadcast: bool = True
    load: str = ""
    save: str = ""
    shard_updates: bool | str = True
    shard_parameters: bool | str = True
    checkpoint_activations: bool | str = True
    rest: str = "search"
    autocast: Any = None
    local_norm: bool = False
    synchronised: bool = False

    @property
    def plain(self) -> bool:
        """Whether only the batch is split."""
        return self.mode in ("data_parallel", "hybrid")

    @property
    def simple(self) -> bool:
        """Whether :class:`muster.DataParallel` does all that the settings ask for."""
        return (
            self.dataset_strategy == "data_parallel"
            and not self.synchronised
            and self.autocast is None
            and ALWAYS not in (self.shard_updates, self.shard_parameters, self.checkpoint_activations)
        )


def settings_of(
    defaults: Mapping[str, Any],
    *,
    plan: str | Path | None,
    batch_norm: str | None,
    **given: Any,
) -> ParallelSettings:
    """Checks and returns the settings.

    Args:
        defaults: by keyword, the value for a keyword that is None in ``given``.
        plan: the file from which the plan is loaded if it exists, and to which it is saved otherwise; None:
            as in ``defaults``.
        batch_norm: "local" or "synchronised"; None: the mode decides.
        **given: the keywords of :func:`muster.parallelize`.

    Raises:
        SettingsError: a value is not allowed.
    """
    found = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    mode, search = found.get("mode", "auto"), found.get("search", "exact")
    if mode not in MODES:
        raise SettingsError(
            f'mode is "auto", "semi_auto", "data_parallel", "hybrid" or "stand_alone", not {mode!r}'
        )
    if search not in SEARCH_NAMES:
        raise SettingsError(f"search is one of {', '.join(SEARCH_NAMES)}, not {search!r}")
    found |= {"mode": MODES[mode], "search": SEARCH_NAMES[search]}
    for name in ("gradients_mean", "parameter_broadcast"):
        found[name] = bool(found.get(name, True))
    if plan is not None:
        exists = Path(plan).exists()
        found |= {"load": str(plan) if exists else "", "save": "" if exists else str(plan)}
    for name in ("shard_updates", "shard_parameters", "checkpoint_activations"):
        if found.get(name) not in (None, True, False, ALWAYS):
            raise SettingsError(f'{name} is True, False or "{ALWAYS}", not {found[name]!r}')
    if batch_norm not in (None, "local", "synchronised"):
        raise SettingsError(f'batch_norm is "local" or "synchronised", not {batch_norm!r}')
    autocast = found.get("autocast")
    if autocast == torch.float16:
        raise SettingsError(NO_FLOAT16)
    if autocast is not None and found["mode"] == "stand_alone":
        raise SettingsError('mode "stand_alone" runs the module as it is: use torch.autocast around it')
    local = batch_norm == "local" or (batch_norm is None and found["mode"] in ("data_parallel", "hybrid"))
    return ParallelSettings(**found, local_norm=local, synchronised=batch_norm == "synchronised")
