"""Decides which samples each rank takes in each step.

The order of an epoch is a function of (seed, epoch) alone. Global batches are cut from it one after the
other, and each rank takes its part of the batch. So any number of workers trains on the same global batches
as a single process. If the number of workers changes in the middle of an epoch, only the division of the next
batches changes: no sample is lost or used twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.errors import SettingsError, WorkerError


class SamplerPosition(NamedTuple):
    """All that determines this rank's next samples: equal positions give equal samples."""

    epoch: int
    position: int
    batch_size: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's part of one global batch.

    Attributes:
        epoch: number of the epoch, from 0.
        step: number of the batch within its epoch, from 0 (counted in batches of the current size).
        indices: this rank's samples, int64; may be empty if a last batch has fewer samples than there are
            ranks.
        global_size: number of samples in the batch, over all ranks.
        world_size: number of ranks that share the batch.
        last: whether it ends the epoch.
    """

    epoch: int
    step: int
    indices: NDArray[np.int64]
    global_size: int
    world_size: int
    last: bool

    @property
    def share(self) -> float:
        """This rank's share of the batch's samples, 0 to 1.

        The sum over ranks of ``share * local mean`` is the mean of the batch.
        """
        return len(self.indices) / self.global_size

    @property
    def weight(self) -> float:
        """The factor for this rank's mean loss when gradients are averaged over ranks; 1 for equal parts."""
        return self.share * self.world_size

    def split(self, parts: int) -> list[NDArray[np.int64]]:
        """Splits this rank's samples into ``parts`` pieces of nearly equal size; some may be empty."""
        return np.array_split(self.indices, parts)


class ShardedSampler:
    """Distributes the samples of a data set to ranks, epoch by epoch.

    ``batch()`` returns the same batch until ``advance()`` moves to the next one, so that a failed step can be
    repeated. All ranks must call ``advance()`` for the same batches.

    It also serves as the ``batch_sampler`` of torch's ``DataLoader``: iterating yields this rank's samples of
    each batch from the current position to the end of the epoch, and does not move the position, even if the
    loader prefetches. An :class:`~muster.training.loop.ElasticLoop` drives such a loader. Without one, call
    ``advance()`` after each step, and set ``drop_last``: otherwise a last batch without samples for this rank
    is skipped here, and other ranks have one batch more.

    Args:
        size: number of samples in the data set, > 0.
        batch_size: number of samples in a global batch, over all ranks, > 0.
        rank: this process's rank.
        world_size: number of ranks.
        seed: seed of the shuffle, >= 0.
        shuffle: False keeps the data set's own order in every epoch.
        drop_last: leaves out a last batch that is smaller than ``batch_size``.

    Raises:
        SettingsError: an argument is out of range.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        _require(size >= 1, "size", size, ">= 1")
        _require(batch_size >= 1, "batch_size", batch_size, ">= 1")
        _require(not drop_last or batch_size <= size, "batch_size", batch_size, f"<= {size} with drop_last")
        _require(0 <= seed < 2**63, "seed", seed, "0 to 2**63 - 1")
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._order_of: tuple[int, int] | None = None
        self._order: NDArray[np.int64] = np.arange(size, dtype=np.int64)
        self.reshard(rank, world_size)

    def reshard(self, rank: int, world_size: int) -> None:
        """Sets rank and world size after a change of members; the position in the epoch stays."""
        _require(world_size >= 1, "world_size", world_size, ">= 1")
        _require(0 <= rank < world_size, "rank", rank, f"0 to {world_size - 1}")
        self.rank, self.world_size = rank, world_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in a whole epoch."""
        full, rest = divmod(self.size, self.batch_size)
        return full + bool(rest and not self.drop_last)

    def batch(self) -> Batch:
        """Returns this rank's part of the next global batch; the position stays."""
        start = self.position
        stop = min(start + self.batch_size, self._end)
        count = stop - start
        first = start + count * self.rank // self.world_size
        beyond = start + count * (self.rank + 1) // self.world_size
        return Batch(
            epoch=self.epoch,
            step=-(-start // self.batch_size),
            indices=self._epoch_order()[first:beyond],
            global_size=count,
            world_size=self.world_size,
            last=stop == self._end,
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's samples of each remaining batch of the epoch, except batches with none."""
        ahead = copy.copy(self)
        for _ in range(len(self)):
            indices = ahead.batch().indices.tolist()
            ahead.advance()
            if indices:
                yield indices

    def __len__(self) -> int:
        """Number of remaining batches of the epoch."""
        return -(-(self._end - self.position) // self.batch_size)

    @property
    def place(self) -> SamplerPosition:
        """Returns everything on which the result of ``batch()`` depends."""
        return SamplerPosition(
            self.epoch, self.position, self.batch_size, self.rank, self.world_size, self.seed, self.shuffle
        )

    def following(self) -> ShardedSampler:
        """Returns a copy of the sampler that is one batch ahead."""
        ahead = copy.copy(self)
        ahead.advance()
        return ahead

    def advance(self) -> None:
        """Moves to the next batch; after the last batch of an epoch the next epoch begins."""
        self.position = min(self.position + self.batch_size, self._end)
        self._normalize()

    def state(self) -> dict[str, Any]:
        """Returns the position as plain numbers, for :meth:`restore` from a checkpoint or on a new rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from where ``state`` was taken; world size and batch size may differ.

        Raises:
            WorkerError: the state belongs to a data set of another size.
        """
        if state["size"] != self.size:
            raise WorkerError(
                f"The saved position is in a data set of {state['size']} samples, this one has {self.size}.",
                remedy="Resume with the data that the run began with, or start over without --resume.",
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self._normalize()

    @property
    def _end(self) -> int:
        """Returns the position at which the epoch ends; with ``drop_last``, after the last full batch."""
        if not self.drop_last:
            return self.size
        return self.position + (self.size - self.position) // self.batch_size * self.batch_size

    def _normalize(self) -> None:
        if self.position >= self._end:
            self.epoch, self.position = self.epoch + 1, 0

    def _epoch_order(self) -> NDArray[np.int64]:
        wanted = (self.seed, self.epoch) if self.shuffle else None
        if self._order_of != wanted:
            self._order = np.arange(self.size, dtype=np.int64)
            if wanted:
                np.random.Generator(np.random.Philox(key=list(wanted))).shuffle(self._order)
            self._order_of = wanted
        return self._order


def _require(holds: bool, name: str, value: int, legal: str) -> None:
    if not holds:
        raise SettingsError(f"ShardedSampler: {name} is {value}, it must be {legal}.")
