"""Decides which snapshots a rank takes, keeps and drops, both its own and those that it keeps for others.

A snapshot counts once the scheduler has said that it is complete everywhere: every member's part is complete
in the member's own memory and in the memory of its partners. Copies finish at different paces, so:

* A rank drops a snapshot that counts only after it has heard that a newer one counts. It keeps at most two of
  its own: the one that counts and the one in progress. It keeps as many for each rank whose partner it is.
* All ranks must take the same snapshots. The first one is taken when a generation begins. The scheduler names
  each further one: it is taken at the first step due from ``next`` on. A rank that hears this too late, or
  has no room, lets the step pass and reports it. The scheduler then names a later step, and the ranks that
  have taken the missed snapshot drop it.
* A rank that does not hear from the scheduler takes only the snapshot that was named, and needs no more
  memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.wire import messages


class RetentionChange(NamedTuple):
    """The parts that a rank must take and drop now.

    Attributes:
        take: the part of its own state to copy now; None: none.
        drop: the parts to free; they are not offered in an exchange any more.
    """

    take: PartKey | None = None
    drop: tuple[PartKey, ...] = ()


class Retention:
    """Decides which parts one rank takes, keeps and drops.

    Calls come from one thread, or under one lock. Steps are numbers of finished steps, the same on all ranks.
    Call :meth:`at_step` only when the step is known to have succeeded, and cannot be undone any more.

    Args:
        every: a snapshot is due after every ``every`` steps; the same on all ranks.

    Attributes:
        agreed: the newest snapshot that counts, as far as this rank knows; None: there is none.

    Raises:
        ValueError: ``every`` is less than 1.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be 1 or more; it is {every}")
        self.every = every
        self.agreed: SnapshotId | None = None
        self._generation = 0
        self._rank = 0
        self._world_size = 0
        self._first = 0
        self._taken: int | None = None
        self._is_complete = False
        self._passed = -1
        self._next: int | None = None
        self._is_over = False  # the generation takes no more
        self._kept: set[PartKey] = set()

    @property
    def kept(self) -> tuple[PartKey, ...]:
        """All parts that this rank keeps in memory, including those in progress."""
        return tuple(sorted(self._kept))

    def enter(
        self, generation: int, *, rank: int, world_size: int, step: int, keep: SnapshotId | None
    ) -> RetentionChange:
        """Begins a generation: all but ``keep`` is dropped, and the first snapshot is taken at once.

        All ranks must have agreed on ``keep``, even if no rank has to go back to it. If each rank kept the
        snapshot that it has heard of, there might be no complete snapshot left.

        A generation that is entered again takes no more snapshots: redone steps have the same numbers as
        before, and other ranks may hold parts of either.

        Args:
            generation: its number.
            rank: this rank in it.
            world_size: its number of ranks.
            step: number of finished steps, after a restoration if there was one.
            keep: the snapshot to keep, as ``restoration.decide`` has chosen; None: none.
        """
        self._is_over = generation == self._generation
        self.agreed = keep
        self._generation, self._rank, self._world_size = generation, rank, world_size
        self._first, self._passed, self._next = step, -1, None
        if self._is_over:
            gone = [self._own(self._taken)] if self._taken is not None else []
            self._taken, self._is_complete, self._passed = None, False, step
            return RetentionChange(drop=self._drop(part for part in gone if part.snapshot != keep))
        # Parts of this generation stay: other ranks may have entered it earlier and sent their parts.
        older = (part for part in self._kept if part.snapshot.generation < generation)
        drop = self._drop(part for part in older if part.snapshot != keep)
        return RetentionChange(self._take(step), drop)

    def at_step(self, step: int, word: messages.SnapshotWord | None) -> RetentionChange:
        """Decides between two steps what to take and to drop, by the scheduler's newest message.

        A part to drop may still be copied or sent; this must end before its memory is used again.

        Args:
            step: number of finished steps.
            word: ``session.snapshot_word``; None: none has come in this generation.
        """
        drop = self._hear(word)
        if step <= self._first or step % self.every:
            return RetentionChange(drop=drop)
        if self._may_take(step):
            return RetentionChange(self._take(step), drop)
        if step != self._taken:
            self._passed = max(self._passed, step)
        return RetentionChange(drop=drop)

    def completed(self, part: PartKey) -> None:
        """Notes that this rank's own part, if still wanted, is complete here and at all its partners."""
        if self._is_under_way(part):
            self._is_complete = True

    def failed(self, part: PartKey) -> RetentionChange:
        """Notes that this rank's own part cannot be completed, for example because a partner is gone."""
        if not self._is_under_way(part) or self._is_complete:
            return RetentionChange()
        return RetentionChange(drop=self._give_up())

    def accept(self, part: PartKey, agreed: SnapshotId | None) -> RetentionChange:
        """Makes room for another rank's part, whose header has arrived.

        Of that rank's parts, this one and the one that counts for it are kept from then on. The part may be
        offered in an exchange only once it is complete. A part that comes too late to be of use is dropped.

        Args:
            part: the part.
            agreed: the sender's ``agreed``, from the header.
        """
        generation = part.snapshot.generation
        if generation < self._generation or (self.agreed is not None and part.snapshot < self.agreed):
            return RetentionChange(drop=(part,))
        same_rank = (each for each in self._kept if each.rank == part.rank)
        drop = self._drop(
            each
            for each in same_rank
            if each.snapshot.generation == generation and each.snapshot not in (part.snapshot, agreed)
        )
        self._kept.add(part)
        return RetentionChange(drop=drop)

    def report(self) -> messages.SnapshotReport:
        """The report for ``session.report_snapshot``, to be sent after each call that changes it."""
        agreed = self.agreed
        return messages.SnapshotReport(
            self._generation,
            agreed.step if agreed is not None and agreed.generation == self._generation else -1,
            -1 if self._taken is None else self._taken,
            self._is_complete,
            self._passed,
        )

    # ------------------------------------------------------------ one in progress

    def _own(self, step: int) -> PartKey:
        return PartKey(SnapshotId(self._generation, step), self._world_size, self._rank)

    def _is_under_way(self, part: PartKey) -> bool:
        return self._taken is not None and part == self._own(self._taken)

    def _may_take(self, step: int) -> bool:
        """Whether to take a snapshot at this step: one is wanted by now, and none is in progress."""
        if self._is_over or self._taken is not None or self._next is None:
            return False
        return self._passed < self._next <= step

    def _take(self, step: int) -> PartKey:
        self._taken, self._is_complete = step, False
        part = self._own(step)
        self._kept.add(part)
        return part

    def _give_up(self) -> tuple[PartKey, ...]:
        assert self._taken is not None
        part = self._own(self._taken)
        self._passed = max(self._passed, self._taken)
        self._taken, self._is_complete = None, False
        return self._drop((part,))

    def _hear(self, word: messages.SnapshotWord | None) -> tuple[PartKey, ...]:
        if word is None or word.generation != self._generation:
            return ()
        self._next = word.next
        taken = self._taken
        if taken is None:
            return ()
        if word.complete == taken:
            return self._count() if self._is_complete else ()
        return self._give_up() if taken < word.next else ()

    def _count(self) -> tuple[PartKey, ...]:
        """Notes that the snapshot taken last counts; drops all older parts, also those of other ranks."""
        assert self._taken is not None
        agreed = self.agreed = SnapshotId(self._generation, self._taken)
        self._taken, self._is_complete = None, False
        return self._drop(part for part in self._kept if part.snapshot < agreed)

    def _drop(self, parts: Iterable[PartKey]) -> tuple[PartKey, ...]:
        gone = tuple(sorted(parts))
        self._kept.difference_update(gone)
        return gone
