"""Creates and aborts NCCL communicators with a time limit.

The creation of a *nonblocking* communicator can be abandoned at a deadline, but each collective on it starts
a thread inside NCCL (tens of microseconds) and must be polled. A *blocking* one does not need that, but its
creation cannot be abandoned. NCCL performs a split in the mode of the parent, so we use both: a nonblocking
*root* that is only split, and blocking children, on which collectives run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from muster.communicators.base import NetPlugin
from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.ended_connection import why_ended
from muster.errors import CommunicatorError, FormationTimeoutError
from muster.version import how_to_install
from muster.wire.threads import start_thread

MOST_CTAS = 64
"""NCCL's own upper limit of CTAs (MAXCHANNELS), which must be given together with the lower one."""

_FEWEST_CTAS = {"NVIDIA H200": 32}
"""The fastest lower limit by GPU model, found by ``muster bench allreduce --backend nccl``."""


def fewest_ctas(model: str, *, hosts: int, env: Mapping[str, str]) -> int | None:
    """Returns the minimum number of CTAs to request from NCCL; None: NCCL decides.

    There is a number only for the case that was measured: one host, with NVLS off. NCCL_MIN_CTAS and
    NCCL_MAX_CTAS override it.

    Args:
        model: the GPU's name, as the driver reports it.
        hosts: the number of hosts of the ranks.
        env: an environment; NCCL_NVLS_ENABLE is read from it.
    """
    if hosts != 1 or env.get("NCCL_NVLS_ENABLE") != "0":
        return None
    return _FEWEST_CTAS.get(model)


IN_PROGRESS = 7
NO_COLOR = -1
POLL_INTERVAL_S = 0.0005

Cancelled = Callable[[], Exception | None]


def load_bindings() -> Any:
    """Imports and returns nccl4py's low-level bindings.

    Raises:
        CommunicatorError: nccl4py or libnccl is not installed.
    """
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, RuntimeError) as error:
        raise CommunicatorError(
            f"NCCL cannot be used: {error}",
            remedy=f"{how_to_install('cuda13')} ([cuda12] for CUDA 12), or take MS_BACKEND=tcp.",
        ) from None
    return nccl


def name_of(peer: Peer) -> str:
    """Returns a peer's name for messages: rank, node id and host."""
    return f"rank {peer.rank} ({peer.node_id} on {peer.host_name})"


class FormationWait:
    """The wait for a communicator that is being created: its time limit, and what ends it early."""

    def __init__(
        self,
        membership: Membership,
        *,
        timeout_s: float,
        cancelled: Cancelled,
        absent: Callable[[], str],
        plugin: NetPlugin | None = None,
    ) -> None:
        self._plugin = plugin
        self._membership = membership
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled
        self._absent = absent

    def check(self) -> None:
        """Raises the exception that ends the wait, if there is one."""
        error = self._cancelled()
        if error is not None:
            raise error
        if time.monotonic() < self._deadline:
            return
        own = self._membership
        raise FormationTimeoutError(
            f"the NCCL communicator of group {own.group!r}, generation {own.generation}, was not created"
            f" within {self._timeout_s:g} s on rank {own.rank} of {own.world_size}:"
            f" {self._absent()}{self.why()}",
            remedy="Look at those workers' logs; if they run, see that the hosts reach each other"
            " (NCCL_SOCKET_IFNAME, firewall), or raise the timeout.",
        )

    def why(self) -> str:
        """Returns why an encrypted connection ended during creation, as the end of an error; "": unknown."""
        return why_ended(self._plugin, self._membership)


def create_root(nccl: Any, membership: Membership, waiting: FormationWait) -> Any:
    """Creates the generation's nonblocking root communicator; returns when all ranks have joined it."""
    config = nccl.Config()
    config.blocking = 0
    size = membership.world_size
    try:
        if len(membership.unique_ids) == 1:
            unique_id = nccl.UniqueId.from_buffer(membership.unique_ids[0])
            comm = nccl.comm_init_rank_config(size, unique_id, membership.rank, config.ptr)
        else:
            count = len(membership.unique_ids)
            ids = bytearray().join(membership.unique_ids)  # the bindings take no memory that is read-only
            comm = nccl.comm_init_rank_scalable(size, membership.rank, count, ids, config.ptr)
    except nccl.NCCLError as error:
        raise CommunicatorError(
            f"NCCL refused to create the communicator of rank {membership.rank}: {error}{waiting.why()}",
            remedy="Run with NCCL_DEBUG=WARN to see why.",
        ) from None  # the arguments of the call hold the unique id
    try:
        settle(nccl, comm, waiting)
    except Exception:
        abort(nccl, comm)
        raise
    return comm


def split_child(
    nccl: Any, parent: Any, *, color: int, key: int, waiting: FormationWait, min_ctas: int | None = None
) -> Any | None:
    """Splits a blocking communicator off ``parent``; every rank of ``parent`` must take part.

    After an exception the caller must abort ``parent``.

    Args:
        nccl: the bindings.
        parent: a nonblocking communicator.
        color: ranks with the same color get a common communicator; NO_COLOR: this rank gets none.
        key: determines the order of the ranks.
        waiting: what ends the wait.
        min_ctas: the fewest CTAs that its kernels may use; None: NCCL's choice.

    Returns:
        The new communicator, or None with ``color`` NO_COLOR.
    """
    config = nccl.Config()
    config.blocking = 1
    if min_ctas is not None:
        config.min_ctas, config.max_ctas = min_ctas, MOST_CTAS
    try:
        child = nccl.comm_split(parent, color, key, config.ptr)
    except nccl.NCCLError as error:
        raise CommunicatorError(f"NCCL refused to split the communicator: {error}{waiting.why()}") from error
    settle(nccl, parent, waiting)
    return None if color == NO_COLOR else child


def settle(nccl: Any, comm: Any, waiting: FormationWait) -> None:
    """Waits until ``comm`` has completed its pending operation.

    Raises:
        CommunicatorError: NCCL failed. The caller must abort ``comm``, as after any other exception.
    """
    while True:
        state = int(nccl.comm_get_async_error(comm))
        if state == 0:
            return
        if state != IN_PROGRESS:
            raise CommunicatorError(
                f"NCCL could not create the communicator: {nccl.get_error_string(state)}{waiting.why()}",
                remedy="A peer ended while it was built, or run with NCCL_DEBUG=WARN to see why.",
            )
        waiting.check()
        time.sleep(POLL_INTERVAL_S)


def abort(nccl: Any, comm: Any) -> None:
    """Aborts a communicator; ignores errors of the abort."""
    try:
        nccl.comm_abort(comm)
    except nccl.NCCLError:
        return


def abort_in_background(nccl: Any, comms: Iterable[Any]) -> None:
    """Aborts communicators concurrently, each in a separate thread.

    Kernels are told at once; the rest of an abort is mostly the wait for NCCL's own threads.
    """
    for comm in comms:
        start_thread(partial(abort, nccl, comm), name="muster-nccl-abort")
