"""The embedded backend: one listening socket per process, mutual TLS, any number of generations."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable

from muster.worker.communicators.base import Backend, Membership
from muster.worker.communicators.tcp.communicator import TcpCommunicator
from muster.worker.communicators.tcp.endpoint import Endpoint
from muster.worker.communicators.tcp.handshake import TlsPolicy
from muster.worker.errors import SecurityError

UNIQUE_ID_BYTES = 128

__all__ = ["TcpBackend", "TcpCommunicator", "TlsPolicy"]


class TcpBackend(Backend):
    """Makes :class:`TcpCommunicator`.

    Args:
        tls: how peers are authenticated, asked for each connection; None for plaintext, which stays on
            loopback.
        allow_insecure: lets plaintext leave loopback.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        tls: Callable[[], TlsPolicy] | None,
        allow_insecure: bool = False,
    ) -> None:
        self._tls = tls
        self._allow_insecure = allow_insecure
        self._endpoint = Endpoint(tls)

    def open_endpoint(self, address: str) -> str:
        """See :meth:`Backend.open_endpoint`.

        Raises:
            SecurityError: plaintext would leave this host.
        """
        if self._tls is None and not self._allow_insecure and not is_loopback(address):
            raise SecurityError(
                f"Without TLS the CPU communicator listens on loopback only, not on {address}.",
                remedy="Give certificates (MS_CONFIG_FILE), or set MS_ALLOW_INSECURE=1.",
            )
        return self._endpoint.open(address)

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """See :meth:`Backend.mint_unique_ids`: random bytes that prove membership."""
        return tuple(os.urandom(UNIQUE_ID_BYTES) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> TcpCommunicator:
        """See :meth:`Backend.connect`."""
        if membership.world_size > 1 and not any(membership.unique_ids):
            raise SecurityError("A generation without a unique id cannot tell members from strangers.")

        def check() -> None:
            error = cancelled()
            if error is not None:
                raise error

        communicator = TcpCommunicator(membership, self._endpoint, path=membership.group, timeout_s=timeout_s)
        communicator.bring_up(timeout_s, check)
        return communicator

    def close(self) -> None:
        """See :meth:`Backend.close`."""
        self._endpoint.close()


def is_loopback(address: str) -> bool:
    """Whether an address reaches this host only."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
