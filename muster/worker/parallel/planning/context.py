"""MindSpore's names for parallel modes: a context that :func:`muster.parallelize` takes its defaults from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.worker.errors import SettingsError


class ParallelMode:
    """The modes by MindSpore's names."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


MODES = {
    "stand_alone": "stand_alone",
    "data_parallel": "data_parallel",
    "hybrid": "hybrid",
    "hybrid_parallel": "hybrid",
    "semi_auto": "semi_auto",
    "semi_auto_parallel": "semi_auto",
    "auto": "auto",
    "auto_parallel": "auto",
}
"""All names of modes, and the one that plans use."""

_DEFAULTS: dict[str, Any] = {
    "parallel_mode": ParallelMode.STAND_ALONE,
    "search_mode": "recursive_programming",
    "gradients_mean": False,
    "parameter_broadcast": False,
    "dataset_strategy": "data_parallel",
    "strategy_ckpt_save_file": "",
    "strategy_ckpt_load_file": "",
}
_OLDER = {"auto_parallel_search_mode": "search_mode", "mirror_mean": "gradients_mean"}
_ELSEWHERE = {
    "device_num": "The job's size is that of muster.init().",
    "global_rank": "The rank is that of muster.init().",
    "all_reduce_fusion_config": "Gradients travel in buckets of one size.",
    "comm_fusion": "Gradients travel in buckets of one size.",
    "enable_parallel_optimizer": "The search divides updates (ZeRO-1) where that pays.",
    "pipeline_stages": "Pipelines are not offered.",
    "enable_alltoall": "all_to_all is used where it is cheapest.",
    "grad_accumulation_step": "Accumulate in model.no_sync().",
    "communi_parallel_mode": "Collectives of different groups overlap where the backend lets them.",
    "full_batch": 'Use dataset_strategy="full_batch".',
}

_current: dict[str, Any] = {}


def set_auto_parallel_context(**settings: Any) -> None:
    """Sets what :func:`muster.parallelize` does by default, by MindSpore's names.

    What has never been set has MindSpore's default once anything is set: parallel_mode "stand_alone",
    search_mode "recursive_programming", gradients_mean False (a sum), parameter_broadcast False,
    dataset_strategy "data_parallel".

    Args:
        **settings: parallel_mode, search_mode (older: auto_parallel_search_mode), gradients_mean (older:
            mirror_mean), parameter_broadcast, dataset_strategy, strategy_ckpt_save_file,
            strategy_ckpt_load_file.

    Raises:
        SettingsError: a setting is not known, has no counterpart here, or has a wrong value. Nothing is set
            then.
    """
    checked = {}
    for given, value in settings.items():
        name = _OLDER.get(given, given)
        if name in _ELSEWHERE:
            raise SettingsError(f"{given} has no counterpart here.", remedy=_ELSEWHERE[name])
        if name not in _DEFAULTS:
            raise SettingsError(f"there is no setting {given!r}; there are {', '.join(_DEFAULTS)}")
        if name in checked:
            raise SettingsError(f"{given} and {name} are two names of one setting: give one of them")
        _check(given, name, value)
        checked[name] = value
    _current.update(checked)


def _check(given: str, name: str, value: Any) -> None:
    if name == "parallel_mode" and value not in MODES:
        raise SettingsError(f"{given} is one of {', '.join(ParallelMode.MODE_LIST)}, not {value!r}")
    if name == "search_mode":
        from muster.worker.parallel.planning.planner import SEARCHES

        if value not in SEARCHES:
            raise SettingsError(f"{given} is one of {', '.join(SEARCHES)}, not {value!r}")
    if isinstance(_DEFAULTS[name], bool) and not isinstance(value, bool):
        raise SettingsError(f"{given} is True or False, not {value!r}")
    if name.startswith("strategy_ckpt") and not isinstance(value, str):
        raise SettingsError(f"{given} is a path, not {value!r}")
    if name == "dataset_strategy" and value not in ("data_parallel", "full_batch"):
        tuples = isinstance(value, Sequence) and not isinstance(value, str) and value
        if not tuples or not all(isinstance(each, Sequence) and not isinstance(each, str) for each in value):
            raise SettingsError(
                f'{given} is "data_parallel", "full_batch", or one tuple of slices for each input,'
                f" not {value!r}"
            )


def get_auto_parallel_context(name: str) -> Any:
    """A setting's present value.

    Raises:
        SettingsError: there is no such setting.
    """
    name = _OLDER.get(name, name)
    if name not in _DEFAULTS:
        raise SettingsError(f"there is no setting {name!r}; there are {', '.join(_DEFAULTS)}")
    return _current.get(name, _DEFAULTS[name])


def reset_auto_parallel_context() -> None:
    """Forgets all settings: :func:`muster.parallelize` has its own defaults again."""
    _current.clear()


def in_force() -> dict[str, Any] | None:
    """All settings if anything was set; otherwise None."""
    return {**_DEFAULTS, **_current} if _current else None
