"""Lets a torch program build its process groups again in the same process when the members change."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from muster.programs.agent_line import AgentLine
from muster.worker.old_meshes import forget_meshes
from muster.worker.program_environment import GENERATION_VARIABLE

log = logging.getLogger("muster.worker")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """A process's place in a generation: the generation's number, global and local rank and world size."""

    number: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def on_new_generation(train: Callable[[Generation], T]) -> T:
    """Calls ``train`` in this generation and in each that follows, until it returns.

    ``train`` makes its process groups (``init_process_group()``), loads its state from a checkpoint or gets
    it from rank 0, and trains. When the members change, the process groups are aborted, and the exception
    that ``train`` raises because of this is dropped. Then the groups are destroyed, and ``train`` is called
    again with the next generation's ranks, which the environment variables also hold. Objects that hold a
    process group (DDP, FSDP2) must be created in ``train``.

    Args:
        train: trains in one generation.

    Returns:
        What ``train`` returns.

    Raises:
        NotInitializedError: no agent of ``muster run`` has started this program.
        Exception: ``train`` raised it while its generation was not over.
    """
    agent = AgentLine(_end_groups)
    while True:
        try:
            return train(_generation())
        except Exception as error:
            if agent.failed_first():
                raise
            log.info("ignoring an error caused by the end of the generation: %s", error)
        finally:
            _destroy_groups()
        forget_meshes()
        agent.enter_next()


def _generation() -> Generation:
    names = (GENERATION_VARIABLE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Generation(*(int(os.environ[name]) for name in names))


def _end_groups(_reason: str) -> None:
    """Aborts collectives that wait for lost members, if the backend can."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    try:
        distributed.distributed_c10d._abort_process_group()
    except Exception as error:  # for example of Gloo, whose collectives fail when the other end goes
        log.debug("aborting the process groups: %s", error)


def _destroy_groups() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    try:
        distributed.destroy_process_group()
    except Exception as error:
        log.debug("destroying the process groups: %s", error)
