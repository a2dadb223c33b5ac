"""The NCCL backend: unique ids, and the communicator of each generation."""

from __future__ import annotations

import os
from collections.abc import Callable

from muster.worker.communicators.base import Backend, Membership
from muster.worker.communicators.nccl import bootstrap as handles
from muster.worker.communicators.nccl.bootstrap import fewest_ctas
from muster.worker.communicators.nccl.communicator import NcclCommunicator
from muster.worker.communicators.nccl.presence import Presence, absent_peers, presence_key
from muster.worker.communicators.nccl.reduction import PreMultipliedSum
from muster.worker.communicators.nccl.streams import Preparation, device_model, use_device

_PREPARATION_S = 10.0
"""How long a process that ends waits for a preparation under way."""

__all__ = ["NcclBackend", "NcclCommunicator", "PreMultipliedSum"]


class NcclBackend(Backend):
    """NCCL in this process.

    Args:
        device_index: the GPU of this worker; -1: the one in the membership, else the current one.
    """

    name = "nccl"

    def __init__(self, *, device_index: int = -1) -> None:
        self._nccl = handles.load_bindings()
        version = self._nccl.get_version()
        # Ranks of different releases of NCCL may hang: the scheduler compares it before they meet.
        self.facts = {"nccl": f"{version // 10000}.{version // 100 % 100}.{version % 100}"}
        self._device_index = device_index
        self._presence: Presence | None = None
        self._preparation: Preparation | None = None

    def prepare(self, device_index: int) -> None:
        """Loads CuPy or torch and makes the GPU's context while this worker joins."""
        if self._preparation is None:
            self._preparation = Preparation(self._device_index if self._device_index >= 0 else device_index)

    def open_endpoint(self, address: str) -> str:
        """Opens the port on which this worker says whether it is building a communicator."""
        if self._presence is None:
            self._presence = Presence(address)
        return self._presence.endpoint

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Makes ``count`` ids; this process hosts NCCL's bootstrap root of each."""
        return tuple(bytes(self._nccl.get_unique_id()) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> NcclCommunicator:
        """Builds the communicator of a generation; see :class:`~muster.worker.communicators.base.Backend`."""
        if self._preparation is not None:
            self._preparation.wait()
        own = membership.peers[membership.rank]
        device = use_device(own.device_index if self._device_index < 0 else self._device_index)
        if self._presence is not None:
            self._presence.enter(presence_key(membership))
        waiting = handles.Waiting(
            membership, timeout_s=timeout_s, cancelled=cancelled, absent=lambda: _absent_words(membership)
        )
        root = handles.create_root(self._nccl, membership, waiting)
        try:
            ctas = fewest_ctas(
                device_model(device),
                hosts=len({peer.host_id for peer in membership.peers}),
                env=os.environ,
            )
            comm = handles.split_child(
                self._nccl, root, color=0, key=membership.rank, waiting=waiting, min_ctas=ctas
            )
        except Exception:
            handles.abort(self._nccl, root)
            raise
        return NcclCommunicator(
            self._nccl, comm, root, membership, device=device, timeout_s=timeout_s, min_ctas=ctas
        )

    def close(self) -> None:
        """Stops answering peers; idempotent."""
        if self._preparation is not None:  # an interpreter that ends meanwhile could crash
            self._preparation.wait(_PREPARATION_S)
        if self._presence is not None:
            self._presence.close()
            self._presence = None


def _absent_words(membership: Membership) -> str:
    others = [peer for peer in membership.peers if peer.rank != membership.rank]
    if not any(peer.data_address for peer in others):
        return "not all of " + ", ".join(map(handles.name_of, others)) + " came"
    absent = absent_peers(membership, others)
    if not absent:
        return "all ranks came, but NCCL did not connect them"
    return "missing: " + ", ".join(map(handles.name_of, absent))
