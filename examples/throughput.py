"""Counts an example's steps, and measures the speed of those that did nothing but train."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_MOST_REDONE = 8
"""More than the steps that a change of members may undo."""


class Throughput:
    """Counts the steps that this process has trained, and their samples per second.

    A step's time goes from the end of the one before to its own. The speed leaves out steps in which
    something else happened too: the first one of a generation, before which members were waited for and
    states sent, the one after a :meth:`pause`, and those that :meth:`add` is given as not timed. All others
    count, captured or not.

    Args:
        clock: seconds on a monotonic clock.

    Attributes:
        steps: finished ones, all of them.
        captured: how many of them were launched as a graph.
        samples: of the timed steps, over all ranks.
        microseconds: that the timed steps took.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = self.captured = self.samples = self.microseconds = 0
        self._clock = clock
        self._generation: int | None = None
        self._since = 0.0
        self._last: dict[int, bool] = {}  # whether each of the last numbers was captured

    def add(
        self, samples: int, *, generation: int, number: int = 0, captured: bool = False, timed: bool = True
    ) -> None:
        """Counts a step that has just been finished.

        Args:
            samples: of the step, over all ranks.
            generation: in which it was trained.
            number: of the step, from 1: one that is done once more counts once; 0: it is not known.
            captured: it was launched as a graph.
            timed: it did nothing but train; False for one that compiled or captured, say.
        """
        now = self._clock()
        self.steps += 1
        self.captured += captured
        if number:
            for redone in [each for each in self._last if each >= number]:
                self.steps -= 1
                self.captured -= self._last.pop(redone)
            self._last[number] = captured
            self._last.pop(number - _MOST_REDONE, None)
        if timed and generation == self._generation:
            self.samples += samples
            self.microseconds += round((now - self._since) * 1e6)
        self._generation, self._since = generation, now

    def pause(self) -> None:
        """Excludes the time to the next step from the speed: a rank writes a checkpoint, say."""
        self._generation = None

    @property
    def samples_per_s(self) -> float | None:
        """Over all ranks; None while no step has been timed."""
        return self.samples / self.microseconds * 1e6 if self.samples and self.microseconds else None

    def row(self) -> list[int]:
        """The counts as numbers, for :meth:`take`."""
        return [self.steps, self.captured, self.samples, self.microseconds]

    def take(self, rows: Sequence[Sequence[int]]) -> None:
        """Takes over the counts of the rank with the most steps: the others came later, as replacements.

        Args:
            rows: what :meth:`row` gave on each rank.
        """
        most = max(rows, key=lambda row: row[0])
        self.steps, self.captured, self.samples, self.microseconds = most
