"""The members of a communicator's group, with their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from muster.errors import ArrayError


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of a group as its communicator sees it. ``rank`` is the rank within the group."""

    rank: int
    node_id: str
    incarnation: int
    host_id: str
    host_name: str
    data_address: str
    device_index: int = -1


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of a communicator, and which of them this process is.

    ``peers`` are in order of rank; ``unique_ids`` are secret.
    """

    job_id: str
    generation: int
    group: str
    rank: int
    peers: tuple[Peer, ...]
    unique_ids: tuple[bytes, ...] = field(repr=False, default=())

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.peers)

    def check_rank(self, rank: int, name: str) -> None:
        """Checks that ``rank``, called ``name`` in the message, is one of the group.

        Raises:
            ArrayError: ``rank`` is not a rank of the group.
        """
        if not hasattr(rank, "__index__") or not 0 <= rank < self.world_size:
            raise ArrayError(
                f"{name} is {rank!r}; the group {self.group!r} has ranks 0 to {self.world_size - 1}."
            )

    def check_peer(self, peer: int, *, itself: bool = False) -> None:
        """Checks that ``peer`` is another rank of the group or, with ``itself``, any rank of it.

        Raises:
            ArrayError: ``peer`` is not a rank of the group, or is this rank and ``itself`` is not set.
        """
        self.check_rank(peer, "peer")
        if peer == self.rank and not itself:
            raise ArrayError(f"Rank {peer} cannot send to or receive from itself.")

    def part(self, group: str, ranks: Sequence[int]) -> Membership | None:
        """The membership of a subset, in the order of ``ranks``; None on ranks that are not in it.

        Raises:
            ArrayError: ``ranks`` is empty, repeats a rank, or names one outside the group.
        """
        for rank in ranks:
            self.check_rank(rank, "a rank of the group")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ArrayError(f"The group {group!r} must have at least one rank, and each only once.")
        if self.rank not in ranks:
            return None
        peers = tuple(replace(self.peers[rank], rank=i) for i, rank in enumerate(ranks))
        return replace(self, group=group, rank=list(ranks).index(self.rank), peers=peers)
