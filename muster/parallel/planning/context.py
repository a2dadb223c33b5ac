"""MindSpore's names for parallel modes: a context with the defaults of :func:`muster.parallelize`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from muster.errors import NotInitializedError, SettingsError


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
"""Each name of a mode, and the name that plans use for it."""

SEARCH_NAMES = {
    "exact": "exact",
    "propagation": "propagation",
    "sharding_propagation": "propagation",
    "recursive_programming": "exact",
    "dynamic_programming": "exact",
}
"""Each name of a search, and the name that the planner uses for it."""

_KEYWORDS = {
    "parallel_mode": "mode",
    "search_mode": "search",
    "gradients_mean": "gradients_mean",
    "parameter_broadcast": "parameter_broadcast",
    "dataset_strategy": "dataset_strategy",
    "strategy_ckpt_load_file": "load",
    "strategy_ckpt_save_file": "save",
}
"""MindSpore's settings, and the arguments of Muster's that they set."""

_DEFAULTS: dict[str, Any] = {
    "parallel_mode": ParallelMode.STAND_ALONE,
    "search_mode": "recursive_programming",
    "gradients_mean": False,
    "parameter_broadcast": False,
    "dataset_strategy": "data_parallel",
    "enable_parallel_optimizer": False,
    "strategy_ckpt_save_file": "",
    "strategy_ckpt_load_file": "",
}
_OLDER = {
    "auto_parallel_search_mode": "search_mode",
    "mirror_mean": "gradients_mean",
    "full_batch": "dataset_strategy",
}
_PLACE = ("device_num", "global_rank")
_OWN_DTYPE = (
    "Gradients are summed in their own dtype: keep parameters in float32, and compute under autocast."
)
_NO_PIPELINES = "Pipelines are not offered."
_ALL_UPDATES = "enable_parallel_optimizer=True divides every update among all ranks that hold the parameter."
_ELSEWHERE = {
    "all_reduce_fusion_config": "Gradients travel in buckets of one size.",
    "auto_pipeline": _NO_PIPELINES,
    "comm_fusion": "Gradients travel in buckets of one size.",
    "communi_parallel_mode": "Collectives of different groups overlap where the backend lets them.",
    "dump_local_norm": "model.clip_grad_norm_() returns the norm of all gradients.",
    "enable_alltoall": "all_to_all is used where it is cheapest.",
    "force_fp32_communication": _OWN_DTYPE,
    "grad_accumulation_step": "Accumulate in model.no_sync().",
    "gradient_fp32_sync": _OWN_DTYPE,
    "group_ckpt_save_file": "muster.save_divided writes checkpoints that any number of ranks loads.",
    "loss_repeated_mean": "A loss that several ranks compute counts once.",
    "optimizer_weight_shard_size": _ALL_UPDATES,
    "parallel_optimizer_config": _ALL_UPDATES,
    "pipeline_config": _NO_PIPELINES,
    "pipeline_stages": _NO_PIPELINES,
    "strategy_ckpt_config": "Set strategy_ckpt_save_file or strategy_ckpt_load_file, of all parameters.",
}
"""MindSpore's settings without a counterpart, each with the remedy to name."""

_current: dict[str, Any] = {}


def set_auto_parallel_context(**settings: Any) -> None:
    """Sets defaults of :func:`muster.parallelize` by MindSpore's names.

    Once any setting is set, the others have MindSpore's defaults: parallel_mode "stand_alone", search_mode
    "recursive_programming", gradients_mean False (gradients are summed), parameter_broadcast False,
    dataset_strategy "data_parallel".

    Args:
        **settings: parallel_mode, search_mode (older: auto_parallel_search_mode), gradients_mean (older:
            mirror_mean), parameter_broadcast, dataset_strategy (full_batch=True means "full_batch"),
            enable_parallel_optimizer (True: all updates are sharded; False: those for which it pays),
            strategy_ckpt_save_file, strategy_ckpt_load_file. device_num and global_rank change nothing; they
            are checked against the session, if there is one, and again when a model is parallelized.

    Raises:
        SettingsError: a setting is not known, has no counterpart, or has a wrong value; nothing is set then.
    """
    checked = _checked(settings)
    with contextlib.suppress(NotInitializedError):
        check_place(checked, *_place())
    _current.update(checked)


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Checks settings; returns them by their current names.

    Raises:
        SettingsError: see :func:`set_auto_parallel_context`.
    """
    checked: dict[str, Any] = {}
    for given, value in settings.items():
        name = _OLDER.get(given, given)
        if name in _ELSEWHERE:
            raise SettingsError(f"{given} has no counterpart here.", remedy=_ELSEWHERE[name])
        if name not in _DEFAULTS and name not in _PLACE:
            raise SettingsError(f"there is no setting {given!r}; there are {', '.join(_DEFAULTS)}")
        if name in checked:
            raise SettingsError(f"{given} and {name} are two names of one setting: give one of them")
        if name in _PLACE:
            _check_number(given, value)
        elif given == "full_batch":
            _check_flag(given, value)
            value = "full_batch" if value else "data_parallel"
        else:
            _check(given, name, value)
        checked[name] = value
    return checked


def check_place(settings: Mapping[str, Any], world_size: int, rank: int) -> None:
    """Checks that device_num and global_rank, if they were set, match the job.

    Raises:
        SettingsError: device_num is not the world size, or global_rank is not this worker's rank.
    """
    for name, value in zip(_PLACE, (world_size, rank), strict=True):
        if settings.get(name, value) != value:
            what = "the job has this many ranks" if name == "device_num" else "this is the worker's rank"
            raise SettingsError(
                f"{name} is {settings[name]}, and must be {value}: {what}.",
                remedy="Leave it out, or take muster.get_group_size() and muster.get_rank().",
            )


def _place() -> tuple[int, int]:
    """Returns the world size and this worker's rank.

    Raises:
        NotInitializedError: there is no session.
    """
    from muster.worker.collectives import get_group_size, get_rank

    return get_group_size(), get_rank()


def _check_number(given: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingsError(f"{given} is a whole number, not {value!r}")


def _check_flag(given: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{given} is True or False, not {value!r}")


def _check(given: str, name: str, value: Any) -> None:
    if name == "parallel_mode" and value not in MODES:
        raise SettingsError(f"{given} is one of {', '.join(ParallelMode.MODE_LIST)}, not {value!r}")
    if name == "search_mode" and value not in SEARCH_NAMES:
        raise SettingsError(f"{given} is one of {', '.join(SEARCH_NAMES)}, not {value!r}")
    if isinstance(_DEFAULTS[name], bool):
        _check_flag(given, value)
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
    """Returns a setting's current value; for device_num and global_rank, the session's world size and rank.

    Raises:
        SettingsError: there is no such setting.
        NotInitializedError: device_num or global_rank is asked for, and there is no session.
    """
    if name in _PLACE:
        return _place()[_PLACE.index(name)]
    if name == "full_batch":
        return _current.get("dataset_strategy") == "full_batch"
    name = _OLDER.get(name, name)
    if name not in _DEFAULTS:
        raise SettingsError(f"there is no setting {name!r}; there are {', '.join(_DEFAULTS)}")
    return _current.get(name, _DEFAULTS[name])


def reset_auto_parallel_context() -> None:
    """Forgets all settings: :func:`muster.parallelize` has its own defaults again."""
    _current.clear()


@dataclass(frozen=True, slots=True)
class Inherited:
    """The defaults of :func:`muster.parallelize` that were set by MindSpore's names.

    Attributes:
        keywords: Muster's arguments by name; empty if nothing was set.
    """

    keywords: dict[str, Any]
    _settings: dict[str, Any]

    def check_place(self, world_size: int, rank: int) -> None:
        """Checks that device_num and global_rank, if they were set, match the job.

        Raises:
            SettingsError: device_num is not the world size, or global_rank is not this worker's rank.
        """
        check_place(self._settings, world_size, rank)


def inherited_by(net: Any) -> tuple[Any, Inherited]:
    """Returns the network, and the settings of its :class:`AutoParallel`, or else those of the context."""
    if isinstance(net, AutoParallel):
        return net.network, Inherited(_keywords(net.settings), net.settings)
    settings = {**_DEFAULTS, **_current} if _current else {}
    return net, Inherited(_keywords(settings), settings)


def _keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translates MindSpore's settings into Muster's arguments."""
    found = {_KEYWORDS[name]: value for name, value in settings.items() if name in _KEYWORDS}
    if settings.get("enable_parallel_optimizer"):
        found["shard_updates"] = "always"
    return found


_AUTO_PARALLEL_MODES = {
    "semi_auto": {"parallel_mode": "semi_auto"},
    "sharding_propagation": {"parallel_mode": "auto", "search_mode": "sharding_propagation"},
    "recursive_programming": {"parallel_mode": "auto", "search_mode": "recursive_programming"},
}
_METHODS_ELSEWHERE = {
    "comm_fusion": "comm_fusion",
    "disable_gradient_fp32_sync": "gradient_fp32_sync",
    "disable_loss_repeated_mean": "loss_repeated_mean",
    "disable_strategy_file_only_for_trainable_params": "strategy_ckpt_config",
    "dump_local_norm": "dump_local_norm",
    "enable_device_local_norm": "dump_local_norm",
    "enable_fp32_communication": "force_fp32_communication",
    "pipeline": "pipeline_config",
    "print_local_norm": "dump_local_norm",
    "set_group_ckpt_save_file": "group_ckpt_save_file",
}


class AutoParallel:
    """The settings of one network for :func:`muster.parallelize`, as in MindSpore's later releases.

    ::

        net = muster.AutoParallel(net, parallel_mode="sharding_propagation")
        net.dataset_strategy("full_batch")
        model = muster.parallelize(net, example)

    They replace the settings of ``set_auto_parallel_context``, with the same defaults. MindSpore's other
    methods raise a SettingsError that names the remedy.

    Args:
        network: a torch module.
        parallel_mode: "semi_auto", or "sharding_propagation" or "recursive_programming" for mode "auto" with
            that search.

    Raises:
        SettingsError: there is no such mode.
    """

    def __init__(self, network: Any, parallel_mode: str = "semi_auto") -> None:
        if parallel_mode not in _AUTO_PARALLEL_MODES:
            known = ", ".join(_AUTO_PARALLEL_MODES)
            raise SettingsError(f"parallel_mode is one of {known}, not {parallel_mode!r}")
        self.network = network
        self.settings = {**_DEFAULTS, **_AUTO_PARALLEL_MODES[parallel_mode]}

    def dataset_strategy(self, config: Any) -> None:
        """Sets how the batch is fed: "data_parallel", "full_batch", or one tuple of slices per input."""
        self.settings.update(_checked({"dataset_strategy": config}))

    def enable_gradients_mean(self) -> None:
        """Averages gradients instead of summing them."""
        self.settings["gradients_mean"] = True

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Shards all updates over the ranks.

        Raises:
            SettingsError: an argument is not the default.
        """
        if (shard_size, threshold, optimizer_level) != (-1, 64, "level1"):
            raise SettingsError("the arguments of hsdp have no counterpart here.", remedy=_ALL_UPDATES)
        self.settings["enable_parallel_optimizer"] = True

    def save_operator_strategy_file(self, file_path: str) -> None:
        """Saves the plan in this file."""
        self.settings.update(_checked({"strategy_ckpt_save_file": file_path}))

    def load_operator_strategy_file(self, file_path: str) -> None:
        """Loads the plan from this file instead of searching for one."""
        self.settings.update(_checked({"strategy_ckpt_load_file": file_path}))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses MindSpore's other methods.

        Raises:
            SettingsError: the method has no counterpart; the error names the remedy.
            AttributeError: there is no such method in MindSpore.
        """
        if name in _METHODS_ELSEWHERE:
            remedy = _ELSEWHERE[_METHODS_ELSEWHERE[name]]
            raise SettingsError(f"{name} has no counterpart here.", remedy=remedy)
        raise AttributeError(f"AutoParallel has no attribute {name!r}")

    def __call__(self, *_: Any) -> NoReturn:
        """Refuses to compute: settings are not a model.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            "AutoParallel is not a model yet.", remedy="Call muster.parallelize(net, example)."
        )
