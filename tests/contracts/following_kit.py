"""Arrays on the CPU in a session on GPUs, in the contract suite; connections of tcp stand in for NCCL's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from muster.certs.runtime.store import load_credentials
from muster.communicators import tls_policies
from muster.communicators.base import Backend, Communicator
from muster.communicators.following import FollowingBackend
from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.backend import TcpBackend
from muster.communicators.tcp.communicator import TcpCommunicator
from tests.contracts.kits import JOB, PASSWORD, Kit


class Gpus(TcpCommunicator):
    """A communicator of the GPUs, which no CUDA graph holds."""

    def capturing(self) -> bool:
        return False

    def split(self, group: str, ranks: Sequence[int]) -> TcpCommunicator | None:
        part: Any = super().split(group, ranks)
        if part is not None:
            part.capturing = self.capturing
        return cast("TcpCommunicator | None", part)


class StandIn(Backend):
    """Barriers and splits among the ranks, as NCCL makes them."""

    name = "nccl"
    bootstrap_tls = None

    def __init__(self, host: TcpBackend) -> None:
        self._host = host
        self.absent: Callable[[], list[Peer]] | None = None

    def open_endpoint(self, address: str) -> str:
        return ""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        return tuple(os.urandom(16) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        made = Gpus(membership, self._host.endpoint, path="gpus", timeout_s=timeout_s)
        made.bring_up(timeout_s, lambda: None)
        return made

    def close(self) -> None:
        return


class FollowingKit(Kit):
    """A rank in a barrier is one on its GPU: the others are not told."""

    def __init__(self) -> None:
        super().__init__("following", "nccl", tells_mismatch=False)

    def create(self, certificates: Path, rank: int) -> Backend:
        credentials = load_credentials(certificates / "client.p12", PASSWORD, certificates / "ca.crt")
        host = TcpBackend(tls=tls_policies(credentials, JOB))
        return FollowingBackend(cast("Any", StandIn(host)), host)
