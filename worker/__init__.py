"""Muster's worker: joins a job over mutual TLS, gets a rank, and computes with the others.

::

    import worker

    session = worker.init()           # reads MS_*; "nccl" on GPUs, "tcp" on CPUs
    total = worker.all_reduce(array)
    worker.release()

``import worker`` itself loads nothing: what is used is loaded when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from worker import errors as errors
    from worker.collectives import all_gather as all_gather
    from worker.collectives import all_reduce as all_reduce
    from worker.collectives import all_to_all as all_to_all
    from worker.collectives import barrier as barrier
    from worker.collectives import broadcast as broadcast
    from worker.collectives import create_group as create_group
    from worker.collectives import destroy_group as destroy_group
    from worker.collectives import gather as gather
    from worker.collectives import get_group_rank_from_world_rank as get_group_rank_from_world_rank
    from worker.collectives import get_group_size as get_group_size
    from worker.collectives import get_local_rank as get_local_rank
    from worker.collectives import get_local_rank_size as get_local_rank_size
    from worker.collectives import get_rank as get_rank
    from worker.collectives import get_world_rank_from_group_rank as get_world_rank_from_group_rank
    from worker.collectives import group as group
    from worker.collectives import recv as recv
    from worker.collectives import reduce as reduce
    from worker.collectives import reduce_scatter as reduce_scatter
    from worker.collectives import scatter as scatter
    from worker.collectives import send as send
    from worker.communicators.nccl_work import PreMultipliedSum as PreMultipliedSum
    from worker.errors import ArrayError as ArrayError
    from worker.errors import CollectiveMismatchError as CollectiveMismatchError
    from worker.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from worker.errors import CommunicatorAbortedError as CommunicatorAbortedError
    from worker.errors import CommunicatorError as CommunicatorError
    from worker.errors import FormationTimeoutError as FormationTimeoutError
    from worker.errors import GroupError as GroupError
    from worker.errors import JobEndedError as JobEndedError
    from worker.errors import LeaveGranted as LeaveGranted
    from worker.errors import MembershipChanged as MembershipChanged
    from worker.errors import NotInitializedError as NotInitializedError
    from worker.errors import PeerFinishedError as PeerFinishedError
    from worker.errors import PeerLostError as PeerLostError
    from worker.errors import RanksDifferError as RanksDifferError
    from worker.errors import RefusedError as RefusedError
    from worker.errors import SchedulerUnreachableError as SchedulerUnreachableError
    from worker.errors import SecurityError as SecurityError
    from worker.errors import SettingsError as SettingsError
    from worker.errors import WorkerError as WorkerError
    from worker.parallel.context import ParallelMode as ParallelMode
    from worker.parallel.context import get_auto_parallel_context as get_auto_parallel_context
    from worker.parallel.context import reset_auto_parallel_context as reset_auto_parallel_context
    from worker.parallel.context import set_auto_parallel_context as set_auto_parallel_context
    from worker.process import init as init
    from worker.process import release as release
    from worker.process import set_ps_context as set_ps_context
    from worker.session import Session as Session

_NAMES = {
    "worker.capture": "CaptureError TrainingStep capture_step",
    "worker.collectives": (
        "all_gather all_reduce all_to_all barrier broadcast create_group destroy_group gather"
        " get_group_rank_from_world_rank get_group_size get_local_rank get_local_rank_size get_rank"
        " get_world_rank_from_group_rank group recv reduce reduce_scatter scatter send"
    ),
    "worker.communicators.nccl_work": "PreMultipliedSum",
    "worker.errors": (
        "ArrayError CollectiveMismatchError CollectiveTimeoutError CommunicatorAbortedError"
        " CommunicatorError FormationTimeoutError GroupError JobEndedError LeaveGranted MembershipChanged"
        " NotInitializedError PeerFinishedError PeerLostError RanksDifferError RefusedError"
        " SchedulerUnreachableError SecurityError SettingsError WorkerError"
    ),
    "worker.parallel.api": "layerwise parallelize",
    "worker.parallel.context": (
        "ParallelMode get_auto_parallel_context reset_auto_parallel_context set_auto_parallel_context"
    ),
    "worker.process": "init release set_ps_context",
    "worker.session": "Session",
    "worker.sharded_optimizer": "ShardedOptimizer",
    "worker.torch_data_parallel": "DataParallel",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    module_name = _MODULE_OF.get(name)
    if module_name is None and name == "errors":
        module_name = "worker.errors"
    if module_name is None:
        raise AttributeError(f"module 'worker' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(module_name)
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *_MODULE_OF})
