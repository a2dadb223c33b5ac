"""Names of snapshots and of their parts."""

from __future__ import annotations

from typing import NamedTuple


class SnapshotId(NamedTuple):
    """One snapshot of all ranks. The later one is the greater: a generation goes on where another ended.

    Attributes:
        generation: in which it was taken.
        step: steps finished then.
    """

    generation: int
    step: int

    def __str__(self) -> str:
        """In words."""
        return f"step {self.step} of generation {self.generation}"


class PartKey(NamedTuple):
    """What one rank has to keep of a snapshot.

    Attributes:
        snapshot: of which it is a part.
        world_size: ranks in the snapshot's generation.
        rank: of its owner in that generation.
    """

    snapshot: SnapshotId
    world_size: int
    rank: int
