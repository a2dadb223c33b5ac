"""Gloo through torch. Its sockets are neither authenticated nor encrypted.

The process groups are made by hand, without torch's global default group, so that generations can come
and go. Each process keeps a store; that of rank 0 is the meeting point of a generation.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from muster.rendezvous.settings import is_loopback, show_address
from muster.worker.communicators.base import Backend, Membership
from muster.worker.communicators.gloo.communicator import GlooCommunicator
from muster.worker.communicators.tcp.communicator import UNIQUE_ID_BYTES
from muster.worker.communicators.tcp.endpoint import host_and_port, peer_name
from muster.worker.errors import FormationTimeoutError, SecurityError

_POLL_S = 0.05


class GlooBackend(Backend):
    """Makes :class:`GlooCommunicator`.

    Args:
        allow_insecure: lets its unauthenticated sockets leave loopback.
    """

    name = "gloo"

    def __init__(self, *, allow_insecure: bool = False) -> None:
        self._allow_insecure = allow_insecure
        self._address = "127.0.0.1"
        self._store: Any = None

    def open_endpoint(self, address: str) -> str:
        """See :meth:`Backend.open_endpoint`.

        Raises:
            SecurityError: the address is not loopback, and insecure sockets are not allowed.
        """
        if not self._allow_insecure and not is_loopback(address):
            raise SecurityError(
                f"Gloo neither authenticates nor encrypts, so it does not listen on {address}.",
                remedy="Use the backend 'tcp', or set MS_ALLOW_INSECURE=1 in a network you trust.",
            )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        # torch's store would listen on every address; a listening socket of ours keeps it to this one.
        self._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._address = address
        return show_address(address, port)

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """See :meth:`Backend.mint_unique_ids`; here they only keep generations apart."""
        return tuple(os.urandom(UNIQUE_ID_BYTES) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> GlooCommunicator:
        """See :meth:`Backend.connect`."""
        digest = hashlib.sha256(b"".join(membership.unique_ids)).hexdigest()[:32]
        path = f"{membership.job_id}/{membership.generation}/{digest}/{membership.group}"
        deadline = time.monotonic() + timeout_s
        made = _in_thread(lambda: self.make_group(membership, path, timeout_s))
        while not made.finished.wait(_POLL_S):
            error = cancelled()
            if error is not None:
                raise error
            if time.monotonic() > deadline + 2 * _POLL_S:
                break
        if made.result is None:
            peers = ", ".join(peer_name(peer) for peer in membership.peers if peer.rank != membership.rank)
            raise FormationTimeoutError(
                f"Gloo did not connect in {timeout_s:g} s with all of {peers}: {made.error or 'no answer'}"
            )
        return GlooCommunicator(self.make_group, membership, made.result, path=path, timeout_s=timeout_s)

    def make_group(self, membership: Membership, path: str, timeout_s: float) -> Any:
        """Makes torch's process group; blocks until all ranks have come."""
        timeout = datetime.timedelta(seconds=timeout_s)
        if membership.world_size == 1 and self._store is None:
            store: Any = dist.HashStore()
        else:
            host, port = host_and_port(membership.peers[0].data_address)
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timeout
        prefixed = dist.PrefixStore(path, store)
        return dist.ProcessGroupGloo(prefixed, membership.rank, membership.world_size, options)

    def close(self) -> None:
        """See :meth:`Backend.close`."""
        self._store = None


class _Made:
    """The result of a thread that makes a process group."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None


def _in_thread(make: Callable[[], Any]) -> _Made:
    made = _Made()

    def run() -> None:
        try:
            made.result = make()
        except Exception as error:
            made.error = error
        made.finished.set()

    threading.Thread(target=run, name="muster-gloo-connect", daemon=True).start()
    return made
