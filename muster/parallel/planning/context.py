"""MindSpore's names for parallel modes: a context that :func:`muster.parallelize` takes its defaults from."""

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
"""All names of modes, and the one that plans use."""

SEARCH_NAMES = {
    "exact": "exact",
    "propagation": "propagation",
    "sharding_propagation": "propagation",
    "recursive_programming": "exact",
    "dynamic_programming": "exact",
}
"""All names of searches, and the one that the planner knows."""

_KEYWORDS = {
    "parallel_mode": "mode",
    "search_mode": "search",
    "gradients_mean": "gradients_mean",
    "parameter_broadcast": "parameter_broadcast",
    "dataset_strategy": "dataset_strategy",
    "strategy_ckpt_load_file": "load",
    "strategy_ckpt_save_file": "save",
}
"""MindSpore's settings, and what they are in Muster's own."""

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
"""MindSpore's settings without a counterpart, each with what serves instead."""

_current: dict[str, Any] = {}


def set_auto_parallel_context(**settings: Any) -> None:
    """Sets what :func:`muster.parallelize` does by default, by MindSpore's names.

    What has never been set has MindSpore's default once anything is set: parallel_mode "stand_alone",
    search_mode "recursive_programming", gradients_mean False (a sum), parameter_broadcast False,
    dataset_strategy "data_parallel".

    Args:
        **settings: parallel_mode, search_mode (older: auto_parallel_search_mode), gradients_mean (older:
            mirror_mean), parameter_broadcast, dataset_strategy (full_batch=True: "full_batch"),
            enable_parallel_optimizer (True: all updates are divided among ranks; False: where that pays),
            strategy_ckpt_save_file, strategy_ckpt_load_file. device_num and global_rank change nothing, and
            must be true: of the session if there is one, and when a model is parallelized.

    Raises:
        SettingsError: a setting is not known, has no counterpart here, or has a wrong value. Nothing is set
            then.
    """
    checked = _checked(settings)
    with contextlib.suppress(NotInitializedError):
        check_place(checked, *_place())
    _current.update(checked)


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their present names, each with a legal value."""
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
    """Makes sure that device_num and global_rank, where they were set, are the job's.

    Raises:
        SettingsError: one is not.
    """
    for name, value in zip(_PLACE, (world_size, rank), strict=True):
        if settings.get(name, value) != value:
            what = "the job has this many ranks" if name == "device_num" else "this is the worker's rank"
            raise SettingsError(
                f"{name} is {settings[name]}, and must be {value}: {what}.",
                remedy="Leave it out, or take muster.get_group_size() and muster.get_rank().",
            )


def _place() -> tuple[int, int]:
    """Size of the job, and rank of this worker; NotInitializedError without a session."""
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
    """A setting's present value; of device_num and global_rank the session's.

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
    """What :func:`muster.parallelize` takes from here where it is not told otherwise.

    Attributes:
        keywords: Muster's own settings, by name; none where nothing was set.
    """

    keywords: dict[str, Any]
    _settings: dict[str, Any]

    def check_place(self, world_size: int, rank: int) -> None:
        """Makes sure that device_num and global_rank, where they were set, are the job's.

        Raises:
            SettingsError: one is not.
        """
        check_place(self._settings, world_size, rank)


def inherited_by(net: Any) -> tuple[Any, Inherited]:
    """The network, and its own settings if it is an :class:`AutoParallel`, otherwise the context's."""
    if isinstance(net, AutoParallel):
        return net.network, Inherited(_keywords(net.settings), net.settings)
    settings = {**_DEFAULTS, **_current} if _current else {}
    return net, Inherited(_keywords(settings), settings)


def _keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """MindSpore's settings as Muster's own."""
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
    """The settings of one network, as MindSpore's later releases give them: for :func:`muster.parallelize`.

    ::

        net = muster.AutoParallel(net, parallel_mode="sharding_propagation")
        net.dataset_strategy("full_batch")
        model = muster.parallelize(net, example)

    They replace those of ``set_auto_parallel_context``, with the same defaults; what is not here is refused,
    with what serves instead.

    Args:
        network: a torch module.
        parallel_mode: "semi_auto"; "sharding_propagation" or "recursive_programming": mode "auto" with that
            search.

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
        """How the batch is fed: "data_parallel", "full_batch", or one tuple of slices for each input."""
        self.settings.update(_checked({"dataset_strategy": config}))

    def enable_gradients_mean(self) -> None:
        """Gradients are averaged, not summed."""
        self.settings["gradients_mean"] = True

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """All updates are divided among the ranks; the arguments must be the defaults."""
        if (shard_size, threshold, optimizer_level) != (-1, 64, "level1"):
            raise SettingsError("the arguments of hsdp have no counterpart here.", remedy=_ALL_UPDATES)
        self.settings["enable_parallel_optimizer"] = True

    def save_operator_strategy_file(self, file_path: str) -> None:
        """The plan is saved in this file."""
        self.settings.update(_checked({"strategy_ckpt_save_file": file_path}))

    def load_operator_strategy_file(self, file_path: str) -> None:
        """The plan is loaded from this file, not searched for."""
        self.settings.update(_checked({"strategy_ckpt_load_file": file_path}))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses MindSpore's other methods, with what serves instead."""
        if name in _METHODS_ELSEWHERE:
            remedy = _ELSEWHERE[_METHODS_ELSEWHERE[name]]
            raise SettingsError(f"{name} has no counterpart here.", remedy=remedy)
        raise AttributeError(f"AutoParallel has no attribute {name!r}")

    def __call__(self, *_: Any) -> NoReturn:
        """Refused: settings alone compute nothing."""
        raise SettingsError(
            "AutoParallel is not a model yet.", remedy="Call muster.parallelize(net, example)."
        )
