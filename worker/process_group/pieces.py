"""The tcp communicator with what torch's process groups have beside its collectives: uneven all-to-all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from muster.worker.communicators.base import NumpyArray, as_bytes
from muster.worker.communicators.tcp.communicator import TcpCommunicator
from muster.worker.communicators.tcp.connection import Call, Connection
from muster.worker.errors import CollectiveMismatchError


class PieceCommunicator(TcpCommunicator):
    """Collectives of one process group; one call at a time."""

    def links(self) -> Mapping[int, Connection]:
        """The connections that there are now, by rank."""
        return dict(self._links)

    def all_to_all_pieces(self, send: Sequence[NumpyArray], recv: Sequence[NumpyArray], dtype: str) -> None:
        """Piece j of rank i's ``send`` becomes piece i of rank j's ``recv``; pieces may differ in size.

        Args:
            send: flat arrays, one for each rank.
            recv: flat arrays, one for each rank; share no memory with ``send``.
            dtype: of all of them, by its name.

        Raises:
            CollectiveMismatchError: on all ranks, where one sends to another what that does not expect.
        """
        call = Call("all_to_all", dtype)
        sizes = np.array([[piece.size for piece in send], [piece.size for piece in recv]], np.int64)

        def action() -> None:
            if self.world_size > 1:
                parts = self._agree(call, as_bytes(sizes.reshape(-1)))
                self._check_sizes([np.frombuffer(part, np.int64).reshape(2, -1) for part in parts])
            recv[self.rank][...] = send[self.rank]
            for step in range(1, self.world_size):
                to, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
                self._move({to: as_bytes(send[to])}, {source: as_bytes(recv[source])})

        self._issue(call, action, async_op=False)

    def _check_sizes(self, sizes: Sequence[NumpyArray]) -> None:
        for rank, (sent, _) in enumerate(sizes):
            for other, (_, expected) in enumerate(sizes):
                if sent[other] != expected[rank]:
                    raise CollectiveMismatchError(
                        f"all_to_all in group {self.membership.group!r}: {self._names([rank])} sends"
                        f" {sent[other]} elements to {self._names([other])}, which expects {expected[rank]}.",
                        remedy="The split sizes of the ranks must fit each other.",
                    )
