"""Processes on the GPUs of one host, joined by an NCCL communicator without a scheduler.

For benchmarks and tests that need only a communicator: the unique id goes through a pipe. All else that a
session does (security, loss of workers, replacement) is absent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from muster.communicators.membership import Membership, Peer
from muster.launch.command import count_gpus
from muster.launch.plan import sharing_environment

SAFE_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Turns NVLink multicast off, so that figures of hosts with shared and unshared switches are comparable."""


class FleetError(RuntimeError):
    """A process of the fleet raised, died or did not answer in time."""


def require_gpus(needed: int) -> None:
    """Checks that this host has at least ``needed`` GPUs.

    Raises:
        FleetError: the host has fewer GPUs.
    """
    here = count_gpus()
    if here < needed:
        raise FleetError(f"{needed} GPUs are asked for and this host has {here}.")


class Fleet(contextlib.AbstractContextManager["Fleet"]):
    """``size`` processes, one per GPU, that call functions on demand. A context manager.

    Args:
        size: the number of processes.
        timeout_s: the time limit for forming, and the default of :meth:`run`, in seconds.
        communicate: whether to build an NCCL communicator; if not, functions get None.
        ranks_per_gpu: the number of ranks per GPU; see :func:`~muster.launch.plan.sharing_environment`.

    Raises:
        FleetError: there are too few GPUs, or the processes did not form a communicator.
    """

    def __init__(
        self, size: int, *, timeout_s: float = 120, communicate: bool = True, ranks_per_gpu: int = 1
    ) -> None:
        require_gpus(-(-size // ranks_per_gpu))
        self.size = size
        self.timeout_s = timeout_s
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, communicate, ranks_per_gpu)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
        try:
            if communicate:
                self._form()
        except BaseException:
            self.kill()
            raise

    def _form(self) -> None:
        self._pipes[0].send(("mint", None, {}))
        ids = self._receive(0, time.monotonic() + self.timeout_s)
        for pipe in self._pipes:
            pipe.send(("connect", ids, {"timeout_s": self.timeout_s}))
        self._collect(range(self.size), self.timeout_s)

    def run(
        self,
        function: Callable[..., Any],
        *,
        ranks: list[int] | None = None,
        timeout_s: float | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Calls ``function(communicator, **arguments)`` on ``ranks`` (None for all) at once.

        Returns:
            Each rank's result, in the order of ranks.

        Raises:
            FleetError: a rank raised, died or took too long; the fleet is unusable afterwards.
        """
        chosen = list(range(self.size)) if ranks is None else ranks
        for rank in chosen:
            self._pipes[rank].send(("call", function, arguments))
        return self._collect(chosen, self.timeout_s if timeout_s is None else timeout_s)

    def _collect(self, ranks: Any, timeout_s: float) -> list[Any]:
        """Returns every rank's answer; after all have answered, raises the first error."""
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = []
        errors: list[FleetError] = []
        for rank in ranks:
            try:
                answers.append(self._receive(rank, deadline))
            except FleetError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def _receive(self, rank: int, deadline: float) -> Any:
        if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            raise FleetError(f"rank {rank} did not answer in time")
        try:
            failed, value = self._pipes[rank].recv()
        except EOFError:
            raise FleetError(f"rank {rank} died") from None
        if failed:
            raise FleetError(f"rank {rank} raised:\n{value}")
        return value

    def kill(self) -> None:
        """Kills all processes."""
        for process in self.processes:
            process.kill()
            process.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the communicators and ends the processes; after an error, kills all at once."""
        if kind is None:
            with contextlib.suppress(OSError):  # killed already
                for pipe in self._pipes:
                    pipe.send(("close", None, {}))
            for process in self.processes:
                process.join(30)
        self.kill()


def hand_made_membership(rank: int, size: int, ids: tuple[bytes, ...]) -> Membership:
    """Returns the membership of generation 1 of ``size`` ranks on this host, rank r on GPU r."""
    peers = tuple(Peer(r, f"gpu{r}", r + 1, "here", "here", "", r) for r in range(size))
    return Membership("bench", 1, "world", rank, peers, ids)


def _serve(pipe: Connection, rank: int, size: int, communicate: bool, ranks_per_gpu: int) -> None:
    os.environ.update(SAFE_ENVIRONMENT)
    if ranks_per_gpu > 1:
        os.environ.update(sharing_environment(f"rank-{rank}"))
    import torch

    device = rank // ranks_per_gpu
    torch.cuda.set_device(device)
    communicator: Any = None
    backend: Any = None
    if communicate:
        from muster.communicators.nccl.communicator import NcclBackend

        backend = NcclBackend(device_index=device)
    while True:
        try:
            word, argument, arguments = pipe.recv()
        except EOFError:
            return
        try:
            value: Any = None
            if word == "mint":
                value = backend.mint_unique_ids(1)
            elif word == "connect":
                membership = hand_made_membership(rank, size, argument)
                communicator = backend.connect(membership, cancelled=_nothing, **arguments)
            elif word == "call":
                value = argument(communicator, **arguments)
            elif word == "close":
                if communicator is not None:
                    communicator.close()
                return
            pipe.send((False, value))
        except Exception:
            pipe.send((True, traceback.format_exc()))


def _nothing() -> None:
    return None
