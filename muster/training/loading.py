"""Prepares the data of the next steps, by a DataLoader's processes or a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from muster.errors import SettingsError
from muster.training.sampler import Batch, SamplerPosition, ShardedSampler
from muster.training.state import TrainingState

Source = Iterable[Any] | Callable[[Batch], Any]
"""A DataLoader whose ``batch_sampler`` is the state's sampler, or a function of the batch."""


@dataclass(frozen=True, slots=True)
class _Made:
    place: SamplerPosition
    data: Any = None
    error: Exception | None = None


class Loading:
    """Returns the data of a run's batches in order, through redone steps and changes of members.

    Steps that are redone by the same members get the same objects again. When the position or the members
    have changed, data made ahead is dropped, and the loader starts over at the position.

    Args:
        source: see :data:`Source`.
        state: the training state, whose sampler determines the batches.

    Raises:
        SettingsError: the loader's ``batch_sampler`` is not the state's sampler.
    """

    def __init__(self, source: Source, state: TrainingState) -> None:
        self._source = source
        self._state = state
        self._iterator: Iterator[Any] | None = None
        self._next: SamplerPosition | None = None
        self._waited_s = 0.0
        self._made: list[_Made] = []  # for the step before, the last step taken, and the step ahead
        if not callable(source) and getattr(source, "batch_sampler", None) is not state.sampler:
            raise SettingsError(
                "the loader must use the state's sampler:"
                " DataLoader(dataset, batch_sampler=state.sampler, ...)"
            )

    def take(self) -> Any:
        """Returns the data of the sampler's next batch; None if this rank has no sample in it.

        Raises:
            SettingsError: the loader ended before the epoch did.
        """
        sampler = self._state.sampler
        for index, made in enumerate(self._made):
            if made.place == sampler.place:
                del self._made[: max(index - 1, 0)]
                break
        else:
            made = _Made(sampler.place, self._make(sampler, fresh=sampler.place != self._next))
            self._made = [*self._made[-1:], made]
        if made.error is not None:
            raise made.error
        return made.data

    def prepare(self) -> None:
        """Prepares the batch after the sampler's next one, in the same epoch; :meth:`take` raises errors."""
        following = self._state.sampler.following()
        if following.epoch != self._state.sampler.epoch:
            return
        if any(made.place == following.place for made in self._made):
            return
        if not callable(self._source) and following.place != self._next:
            return
        try:
            made = _Made(following.place, self._make(following, fresh=False))
        except Exception as error:
            made = _Made(following.place, error=error)
        self._made.append(made)

    def take_waited_s(self) -> float:
        """Returns the seconds for which this process has waited for data, or made it, since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        """Ends a loader's processes, unless it has ``persistent_workers``."""
        self._iterator = self._next = None
        self._made = []

    def _make(self, sampler: ShardedSampler, *, fresh: bool) -> Any:
        begun = time.monotonic()
        try:
            return self._make_now(sampler, fresh=fresh)
        finally:
            self._waited_s += time.monotonic() - begun

    def _make_now(self, sampler: ShardedSampler, *, fresh: bool) -> Any:
        batch = sampler.batch()
        if callable(self._source):
            return self._source(batch)
        following = sampler.following()
        if not len(batch.indices):
            return None
        if fresh or self._iterator is None:
            self._iterator = None  # ends the processes of the previous one, which would be in the way
            self._iterator = self._state.iterate(self._source)
        self._next = None
        try:
            data = next(self._iterator)
        except StopIteration:
            raise SettingsError("the loader ended before the epoch did") from None
        self._next = following.place if following.epoch == sampler.epoch else None
        return data
