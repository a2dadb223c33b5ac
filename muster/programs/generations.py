"""For torch programs that build their process groups again in the same process when the members change."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from muster.errors import NotInitializedError
from muster.programs.sealed_nccl import take_new_secret
from muster.wire.threads import start_thread
from muster.worker.adopted import line_to_agent
from muster.worker.program_environment import GENERATION_VARIABLE

log = logging.getLogger("muster.worker")

T = TypeVar("T")

_MOST_HEARD_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Generation:
    """What a program is in one generation: number, rank, world size, rank and size on its host."""

    number: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def on_new_generation(train: Callable[[Generation], T]) -> T:
    """Calls ``train`` in this generation and in each that follows, until it returns.

    ``train`` makes its process groups (``init_process_group()``), takes its state from a checkpoint or from
    rank 0, and trains. When the members change, the process groups are aborted, whatever ``train`` raises
    then is dropped, the groups are destroyed, and it is called again with the next generation's ranks, which
    also stand in the environment. Objects that hold a process group (DDP, FSDP2) must be made within it.

    Args:
        train: one generation's training.

    Returns:
        What ``train`` returns.

    Raises:
        NotInitializedError: no agent of ``muster run`` has started this program.
        Exception: what ``train`` raises by itself.
    """
    agent = _Agent()
    while True:
        try:
            return train(_generation())
        except Exception as error:
            if agent.failed_first():
                raise
            log.info("what the end of the generation brought about is dropped: %s", error)
        finally:
            _destroy_groups()
        agent.enter_next()


class _Agent:
    """The line to this program's agent."""

    def __init__(self) -> None:
        line = line_to_agent(os.environ)
        if line is None:
            raise NotInitializedError(
                "No agent has started this program.",
                remedy="Start it by muster run, if need be with --program torch.",
            )
        self._line = line
        self._changed = threading.Condition()
        self._over = False
        self._first = False
        self._gone = False
        self._next: dict[str, str] | None = None
        start_thread(self._listen, name="muster-agent")
        self._line.sendall(b"rebuilds\n")

    def failed_first(self) -> bool:
        """Whether this program's failure is its own; False: the generation is over."""
        with self._changed:
            if not self._over:
                self._line.sendall(b"failed\n")
            self._changed.wait_for(lambda: self._over or self._first or self._gone)
            return not self._over

    def enter_next(self) -> None:
        """Waits for the next generation and puts its ranks into the environment."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._gone)
            if self._next is None:
                raise SystemExit("The agent of this program has gone.")
            os.environ.update(self._next)
            self._next, self._over, self._first = None, False, False

    def _listen(self) -> None:
        rest = b""
        while True:
            heard, secrets, _, _ = socket.recv_fds(self._line, _MOST_HEARD_BYTES, 1)
            for secret in secrets:  # before the news of its generation
                take_new_secret(secret, os.environ)
            if not heard:
                break
            *lines, rest = (rest + heard).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _take(self, said: dict[str, Any]) -> None:
        with self._changed:
            self._over = self._over or "over" in said
            self._first = self._first or "first" in said
            self._next = said.get("variables", self._next)
            self._changed.notify_all()
        if "over" in said:
            log.info("%s", said["over"])
            _abort_groups()


def _generation() -> Generation:
    names = (GENERATION_VARIABLE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Generation(*(int(os.environ[name]) for name in names))


def _abort_groups() -> None:
    """Ends collectives that wait for members that are gone, where the backend can."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    try:
        distributed.distributed_c10d._abort_process_group()
    except Exception as error:  # Gloo, say: its collectives fail when the other end goes
        log.debug("aborting the process groups: %s", error)


def _destroy_groups() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    try:
        distributed.destroy_process_group()
    except Exception as error:
        log.debug("destroying the process groups: %s", error)
