"""Collectives that follow the array: one communicator for arrays on GPUs (NCCL) and on the CPU (tcp).

Both have the same ranks in the same generation. Arrays on a GPU go over NCCL; NumPy arrays, torch tensors on
the CPU and numbers go over the encrypted connections of ``tcp``, which are made at the first such call. Each
call over tcp carries the number of collectives over NCCL before it, so that ranks that mix both kinds in
different orders get an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from muster.communicators.arrays import HOST, Array, describe
from muster.communicators.base import Backend, Communicator, NetPlugin
from muster.communicators.membership import Membership
from muster.communicators.nccl.bootstrap_tls import KEY_BYTES
from muster.communicators.nccl.communicator import NcclBackend, NcclCommunicator
from muster.communicators.nccl.generation_secret import derive_secret
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.backend import UNIQUE_ID_BYTES, TcpBackend
from muster.communicators.tcp.communicator import TcpCommunicator
from muster.communicators.work import Work
from muster.errors import CommunicatorError, SecurityError

_log = logging.getLogger("muster.worker")

_ABSENT_AFTER_S = 1.0
"""How long a rank may take to answer whether it is building the communicator, in seconds."""


class FollowingCommunicator(Communicator):
    """Passes each call to the communicator for the memory in which its array is.

    Args:
        device: the communicator for arrays on GPUs, and for everything that takes no array.
        host: the communicator for arrays on the CPU; it connects at its first calls.
        first: called before each call on the CPU with its name and array.
    """

    on_device = takes_host = True

    def __init__(
        self,
        device: NcclCommunicator,
        host: TcpCommunicator,
        *,
        first: Callable[[str, Any], None],
    ) -> None:
        self.name = device.name
        self.capturable, self.pre_multiplies = device.capturable, device.pre_multiplies
        self.membership = device.membership
        self.device = device
        self.host = host
        self._first = first
        self._grouped = False
        self._children: list[FollowingCommunicator] = []

    @property
    def timeout_s(self) -> float:
        """Deadline of each collective on the CPU, and of each wait of the host for a GPU, in seconds."""
        return self.device.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.device.timeout_s = self.host.timeout_s = value

    def __getattr__(self, name: str) -> Any:
        """Attributes that only NCCL's communicator has."""
        return getattr(self.device, name)

    # ------------------------------------------------------------ collectives

    def _run(self, name: str, array: Array, *args: Any, async_op: bool) -> Work:
        """Runs a collective on the communicator for ``array``."""
        if describe(array).device != HOST:
            work: Work = getattr(self.device, name)(*args, async_op=async_op)
            self.host.elsewhere += 1  # only now: a refused call does not count
            return work
        return self._on_host(name, array, *args, async_op=async_op)

    def _on_host(self, name: str, array: Array, *args: Any, async_op: bool) -> Work:
        if self._grouped or self.device.capturing():
            where = "group()" if self._grouped else "a CUDA graph"
            raise CommunicatorError(
                f"{name} of an array on the CPU cannot be part of {where}, which holds collectives on GPUs.",
                remedy="Move the array to the GPU (cupy.asarray, tensor.cuda()), or call it outside.",
            )
        self._first(name, array)
        work: Work = getattr(self.host, name)(*args, async_op=async_op)
        return work

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        source = describe(send, "send")
        target = source if recv is send else recv
        if source.device != HOST:  # the hot path
            work = self.device.all_reduce(source, target, op, async_op=async_op)
            self.host.elsewhere += 1
            return work
        return self._on_host("all_reduce", source, source, target, op, async_op=async_op)

    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        """See :meth:`Communicator.reduce`."""
        return self._run("reduce", send, send, recv, op, root, async_op=async_op)

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.broadcast`."""
        return self._run("broadcast", buffer, buffer, root, async_op=async_op)

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_gather`."""
        return self._run("all_gather", send, send, recv, async_op=async_op)

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.reduce_scatter`."""
        return self._run("reduce_scatter", send, send, recv, op, async_op=async_op)

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.gather`."""
        return self._run("gather", send, send, recv, root, async_op=async_op)

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.scatter`."""
        return self._run("scatter", recv, send, recv, root, async_op=async_op)

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        return self._run("all_to_all", send, send, recv, async_op=async_op)

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.send`."""
        return self._transfer("send", buffer, peer, async_op)

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        """See :meth:`Communicator.recv`."""
        return self._transfer("recv", buffer, peer, async_op)

    def _transfer(self, name: str, buffer: Array, peer: int, async_op: bool) -> Work:
        """Runs a send or recv, which does not count as a collective."""
        if describe(buffer).device == HOST:
            return self._on_host(name, buffer, buffer, peer, async_op=async_op)
        work: Work = getattr(self.device, name)(buffer, peer, async_op=async_op)
        return work

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`; this one is for the GPUs."""
        self.device.barrier()
        self.host.elsewhere += 1

    def mark(self) -> Callable[[], None] | None:
        """See :meth:`Communicator.mark`."""
        return self.device.mark()

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """See :meth:`Communicator.group`; only for collectives on GPUs."""
        outer, self._grouped = self._grouped, True
        try:
            with self.device.group():
                yield
        finally:
            self._grouped = outer

    # ------------------------------------------------------------ groups, and the end

    def split(self, group: str, ranks: Sequence[int]) -> FollowingCommunicator | None:
        """See :meth:`Communicator.split`."""
        device = self.device.split(group, ranks)
        host = self.host.part(group, ranks)
        self.host.elsewhere += 1
        if device is None or host is None:
            return None
        child = FollowingCommunicator(device, host, first=self._first)
        self._children.append(child)
        return child

    def abort(self, error: Exception) -> None:
        """See :meth:`Communicator.abort`."""
        for child in self._children:
            child.host.abort(error)
        self.host.abort(error)
        self.device.abort(error)

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        for child in self._children:
            child.finished = self.finished
            child.close()
        self.host.finished = self.finished
        try:
            self.host.close()
        finally:
            self.device.close()


class FollowingBackend(Backend):
    """Makes :class:`FollowingCommunicator`; without an endpoint for tcp, plain communicators of the GPUs.

    Args:
        device: the communicator of NCCL.
        host: the communicator of tcp.
    """

    on_device = answers_probes = may_run_nccl = True

    def __init__(self, device: NcclBackend, host: TcpBackend) -> None:
        self.name = device.name
        self.facts = device.facts
        self._device = device
        self._host = host
        self._said = False
        self._plugin: NetPlugin | None = None

    def seal(self, plugin: NetPlugin) -> None:
        """See :meth:`Backend.seal`; the plug-in's secret is derived from tcp's: NCCL's ids are not secret."""
        self._plugin = plugin
        self._device.seal(plugin)
        self.facts = self._device.facts

    def open_endpoint(self, address: str) -> str:
        """See :meth:`Backend.open_endpoint`; returns "" if nothing may listen without TLS."""
        self._device.open_endpoint(address)
        try:
            return self._host.open_endpoint(address)
        except SecurityError:
            return ""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """See :meth:`Backend.mint_unique_ids`: NCCL's ids, each followed by a secret for tcp.

        NCCL's own ids are not secret: its ranks send them in the clear. If the NCCL of every rank has TLS,
        which is compared when workers join, a key for NCCL's bootstrap stands between id and secret.
        """
        tls = self._device.bootstrap_tls
        key = b"" if tls is None else tls.key()  # before NCCL listens
        pairs = zip(self._device.mint_unique_ids(count), self._host.mint_unique_ids(count), strict=True)
        return tuple(public + key + secret for public, secret in pairs)

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        """See :meth:`Backend.connect`; connects the GPUs, and listens for connections of tcp."""
        ids = membership.unique_ids
        own = tuple(each[:-UNIQUE_ID_BYTES] for each in ids)
        tls = self._device.bootstrap_tls
        if tls is not None:
            tls.take(own[0][-KEY_BYTES:])
            own = tuple(each[:-KEY_BYTES] for each in own)
        public = replace(membership, unique_ids=own)
        minted = tuple(each[-UNIQUE_ID_BYTES:] for each in ids)
        if self._plugin is not None:
            generation = membership.generation
            secret = derive_secret(minted, job_id=membership.job_id, generation=generation)
            self._plugin.forget_reason()
            self._plugin.use_secret(generation, secret)
        if not all(peer.data_address for peer in membership.peers):
            return self._device.connect(public, timeout_s=timeout_s, cancelled=cancelled)
        host = self._host.listen(replace(membership, unique_ids=minted), timeout_s=timeout_s)
        self._device.absent = lambda: host.absent(_ABSENT_AFTER_S)
        try:
            device = self._device.connect(public, timeout_s=timeout_s, cancelled=cancelled)
        except BaseException:
            host.close()
            raise
        finally:
            self._device.absent = None
        return FollowingCommunicator(device, host, first=self._say)

    def _say(self, name: str, array: Array) -> None:
        """Logs the first call on the CPU: a forgotten ``.cuda()`` is slow, and nothing else shows it."""
        if not self._said:
            self._said = True
            size = describe(array).nbytes
            _log.info("%s of %d bytes on the CPU uses tcp, not NCCL, as all arrays on the CPU do", name, size)

    def close(self) -> None:
        """See :meth:`Backend.close`."""
        self._device.close()
        self._host.close()
