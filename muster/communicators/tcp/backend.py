"""The backend "tcp": this process's endpoint, and the communicator of each generation."""

from __future__ import annotations

import os
from collections.abc import Callable

from muster.communicators.base import Backend
from muster.communicators.membership import Membership
from muster.communicators.tcp.communicator import TcpCommunicator
from muster.communicators.tcp.endpoint import Endpoint
from muster.communicators.tcp.handshake import TlsPolicy
from muster.errors import SecurityError
from muster.wire.settings import is_loopback

UNIQUE_ID_BYTES = 128


class TcpBackend(Backend):
    """Makes :class:`TcpCommunicator`.

    Args:
        tls: returns how peers are authenticated, called for each connection; None for plaintext, which stays
            on loopback.
        allow_insecure: lets plaintext leave loopback.
    """

    name = "tcp"
    answers_probes = True

    def __init__(
        self,
        *,
        tls: Callable[[], TlsPolicy] | None,
        allow_insecure: bool = False,
    ) -> None:
        self.tls = tls
        self._allow_insecure = allow_insecure
        self.endpoint = Endpoint(tls)

    def open_endpoint(self, address: str) -> str:
        """See :meth:`Backend.open_endpoint`.

        Raises:
            SecurityError: plaintext would leave this host.
        """
        if self.tls is None and not self._allow_insecure and not is_loopback(address):
            raise SecurityError(
                f"Without TLS the CPU communicator listens on loopback only, not on {address}.",
                remedy="Give certificates (MS_CONFIG_FILE), or set MS_ALLOW_INSECURE=1.",
            )
        return self.endpoint.open(address)

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """See :meth:`Backend.mint_unique_ids`: random bytes that prove membership."""
        return tuple(os.urandom(UNIQUE_ID_BYTES) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> TcpCommunicator:
        """See :meth:`Backend.connect`."""
        if membership.world_size > 1 and not any(membership.unique_ids):
            raise SecurityError("A generation without a unique id cannot distinguish members from strangers.")

        def check() -> None:
            error = cancelled()
            if error is not None:
                raise error

        communicator = TcpCommunicator(membership, self.endpoint, path=membership.group, timeout_s=timeout_s)
        communicator.bring_up(timeout_s, check)
        return communicator

    def listen(self, membership: Membership, *, timeout_s: float) -> TcpCommunicator:
        """Like :meth:`connect`, but does not wait: the first calls connect the peers that they need."""
        made = TcpCommunicator(membership, self.endpoint, path=membership.group, timeout_s=timeout_s)
        made.listen()
        return made

    def close(self) -> None:
        """See :meth:`Backend.close`."""
        self.endpoint.close()
