"""Names of snapshots and of their parts."""

from __future__ import annotations

from typing import NamedTuple


class SnapshotId(NamedTuple):
    """Names one snapshot of all ranks; the later of two is the greater.

    Attributes:
        generation: the generation in which it was taken.
        step: number of steps finished then.
    """

    generation: int
    step: int

    def __str__(self) -> str:
        """Names step and generation in words."""
        return f"step {self.step} of generation {self.generation}"


class PartKey(NamedTuple):
    """Names one rank's part of a snapshot.

    Attributes:
        snapshot: the snapshot.
        world_size: the number of ranks in the snapshot's generation.
        rank: the rank of the part's owner in that generation.
    """

    snapshot: SnapshotId
    world_size: int
    rank: int
