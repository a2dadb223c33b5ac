"""Checks of ranks, roots and peers that the CPU communicators share."""

from __future__ import annotations

from muster.worker.communicators.base import Array, Communicator
from muster.worker.communicators.numpy_arrays import NumpyArray, checked
from muster.worker.communicators.validation import check_peer, check_rank
from muster.worker.errors import ArrayError


class CheckedCommunicator(Communicator):
    """A communicator on NumPy arrays, with the checks that all of them make before anything is sent."""

    def _parts(self, array: NumpyArray) -> list[NumpyArray]:
        return list(array.reshape(self.world_size, -1)) if array.size else [array] * self.world_size

    def _at_root(
        self, array: Array | None, name: str, root: int, *, writable: bool = True
    ) -> NumpyArray | None:
        self._check_rank(root, "root")
        if self.rank != root:
            return None
        if array is None:
            raise ArrayError(f"{name} is None at the root, rank {root}.")
        return checked(array, name, writable=writable)

    def _check_rank(self, rank: int, name: str) -> None:
        check_rank(self.membership, rank, name)

    def _check_peer(self, peer: int) -> None:
        check_peer(self.membership, peer)
