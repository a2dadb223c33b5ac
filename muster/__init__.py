"""Muster: joins a training job over mutual TLS, gets a rank, and computes with the others.

::

    import muster

    session = muster.init()           # reads MS_*; "nccl" on GPUs, "tcp" on CPUs
    total = muster.all_reduce(array)
    muster.release()

``import muster`` itself loads nothing; each public name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.version import __version__ as __version__

if TYPE_CHECKING:
    from muster import errors as errors
    from muster.communicators.reduce_ops import PreMultipliedSum as PreMultipliedSum
    from muster.errors import ArrayError as ArrayError
    from muster.errors import CollectiveMismatchError as CollectiveMismatchError
    from muster.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from muster.errors import CommunicatorAbortedError as CommunicatorAbortedError
    from muster.errors import CommunicatorError as CommunicatorError
    from muster.errors import FormationTimeoutError as FormationTimeoutError
    from muster.errors import GpuFailedError as GpuFailedError
    from muster.errors import GroupError as GroupError
    from muster.errors import JobEndedError as JobEndedError
    from muster.errors import LeaveGranted as LeaveGranted
    from muster.errors import MembershipChanged as MembershipChanged
    from muster.errors import NotInitializedError as NotInitializedError
    from muster.errors import PeerFinishedError as PeerFinishedError
    from muster.errors import PeerLostError as PeerLostError
    from muster.errors import RanksDifferError as RanksDifferError
    from muster.errors import RefusedError as RefusedError
    from muster.errors import SchedulerUnreachableError as SchedulerUnreachableError
    from muster.errors import SecurityError as SecurityError
    from muster.errors import SettingsError as SettingsError
    from muster.errors import WorkerError as WorkerError
    from muster.parallel.api import layerwise as layerwise
    from muster.parallel.api import parallelize as parallelize
    from muster.parallel.checkpoint import load_divided as load_divided
    from muster.parallel.checkpoint import save_divided as save_divided
    from muster.parallel.elastic import ParallelTrainingState as ParallelTrainingState
    from muster.parallel.module import ParallelModule as ParallelModule
    from muster.parallel.planning.context import AutoParallel as AutoParallel
    from muster.parallel.planning.context import ParallelMode as ParallelMode
    from muster.parallel.planning.context import get_auto_parallel_context as get_auto_parallel_context
    from muster.parallel.planning.context import (
        reset_auto_parallel_context as reset_auto_parallel_context,
    )
    from muster.parallel.planning.context import set_auto_parallel_context as set_auto_parallel_context
    from muster.roles import init as init
    from muster.torch.capture import CaptureError as CaptureError
    from muster.torch.capture import TrainingStep as TrainingStep
    from muster.torch.capture import capture_step as capture_step
    from muster.torch.data_parallel import DataParallel as DataParallel
    from muster.torch.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from muster.training.checkpoint import CheckpointError as CheckpointError
    from muster.training.checkpoint import DamagedCheckpointError as DamagedCheckpointError
    from muster.training.loop import ElasticLoop as ElasticLoop
    from muster.training.loop import Step as Step
    from muster.training.sampler import ShardedSampler as ShardedSampler
    from muster.training.state import StateLostError as StateLostError
    from muster.training.state import StateMismatchError as StateMismatchError
    from muster.training.state import TrainingState as TrainingState
    from muster.worker.collectives import Pending as Pending
    from muster.worker.collectives import all_gather as all_gather
    from muster.worker.collectives import all_reduce as all_reduce
    from muster.worker.collectives import all_to_all as all_to_all
    from muster.worker.collectives import barrier as barrier
    from muster.worker.collectives import broadcast as broadcast
    from muster.worker.collectives import create_group as create_group
    from muster.worker.collectives import destroy_group as destroy_group
    from muster.worker.collectives import gather as gather
    from muster.worker.collectives import get_group_rank_from_world_rank as get_group_rank_from_world_rank
    from muster.worker.collectives import get_group_size as get_group_size
    from muster.worker.collectives import get_local_rank as get_local_rank
    from muster.worker.collectives import get_local_rank_size as get_local_rank_size
    from muster.worker.collectives import get_local_size as get_local_size
    from muster.worker.collectives import get_rank as get_rank
    from muster.worker.collectives import get_world_rank_from_group_rank as get_world_rank_from_group_rank
    from muster.worker.collectives import group as group
    from muster.worker.collectives import neighbor_exchange as neighbor_exchange
    from muster.worker.collectives import recv as recv
    from muster.worker.collectives import reduce as reduce
    from muster.worker.collectives import reduce_scatter as reduce_scatter
    from muster.worker.collectives import scatter as scatter
    from muster.worker.collectives import send as send
    from muster.worker.runtime import release as release
    from muster.worker.runtime import set_ps_context as set_ps_context
    from muster.worker.session.session import Session as Session

_NAMES = {
    "muster.torch.capture": "CaptureError TrainingStep capture_step",
    "muster.worker.collectives": (
        "Pending all_gather all_reduce all_to_all barrier broadcast create_group destroy_group gather"
        " get_group_rank_from_world_rank get_group_size get_local_rank get_local_rank_size get_local_size"
        " get_rank get_world_rank_from_group_rank group neighbor_exchange recv reduce reduce_scatter scatter"
        " send"
    ),
    "muster.communicators.reduce_ops": "PreMultipliedSum",
    "muster.errors": (
        "ArrayError CollectiveMismatchError CollectiveTimeoutError CommunicatorAbortedError"
        " CommunicatorError FormationTimeoutError GpuFailedError GroupError JobEndedError LeaveGranted"
        " MembershipChanged NotInitializedError PeerFinishedError PeerLostError RanksDifferError RefusedError"
        " SchedulerUnreachableError SecurityError SettingsError WorkerError"
    ),
    "muster.parallel.api": "layerwise parallelize",
    "muster.parallel.checkpoint": "load_divided save_divided",
    "muster.parallel.elastic": "ParallelTrainingState",
    "muster.parallel.module": "ParallelModule",
    "muster.parallel.planning.context": (
        "AutoParallel ParallelMode get_auto_parallel_context reset_auto_parallel_context"
        " set_auto_parallel_context"
    ),
    "muster.roles": "init",
    "muster.worker.runtime": "release set_ps_context",
    "muster.worker.session.session": "Session",
    "muster.training.checkpoint": "CheckpointError DamagedCheckpointError",
    "muster.training.loop": "ElasticLoop Step",
    "muster.training.sampler": "ShardedSampler",
    "muster.training.state": "StateLostError StateMismatchError TrainingState",
    "muster.torch.sharded_optimizer": "ShardedOptimizer",
    "muster.torch.data_parallel": "DataParallel",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    module_name = _MODULE_OF.get(name)
    if module_name is None and name == "errors":
        module_name = "muster.errors"
    if module_name is None:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(module_name)
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names, whether they are loaded or not."""
    return sorted({*globals(), *_MODULE_OF})
