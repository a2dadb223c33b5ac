"""How far a training is, from what loop and script report."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import SupportsFloat, SupportsIndex

from muster.wire.codec import MAX_NUMBER


class Progress:
    """The latest report of a training's progress.

    A loop that numbers its steps, as ElasticLoop does, reports number and speed; a script beside it then adds
    a loss. Without such a loop each report of the script is a step, and the speed follows from its samples.

    Args:
        clock: seconds on a monotonic clock.

    Attributes:
        step: steps finished.
        samples_per_s: this worker's speed.
        loss: as last reported; None: never.
        learning_rate: likewise.
        steps: how many there are to be; 0: not known.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step = 0
        self.samples_per_s = 0.0
        self.loss: float | None = None
        self.learning_rate: float | None = None
        self.steps = 0
        self._clock = clock
        self._numbered = False
        self._last_s: float | None = None

    def take(
        self,
        step: int | None,
        samples_per_s: float | None,
        *,
        loss: SupportsFloat | None = None,
        samples: int | None = None,
        steps: int | None = None,
        learning_rate: SupportsFloat | None = None,
    ) -> bool:
        """Takes a report in; whether it is one of a step, rather than of a loss alone.

        Raises:
            TypeError, ValueError: ``step`` or ``steps`` is no count.
        """
        step = None if step is None else count_of("step", step)
        steps = None if steps is None else count_of("steps", steps)
        if loss is not None:
            self.loss = float(loss)
        if learning_rate is not None:
            self.learning_rate = float(learning_rate)
        if steps is not None:
            self.steps = steps
        if step is None and self._numbered:
            return False
        self._numbered = step is not None
        self.step = self.step + 1 if step is None else step
        now_s, last_s = self._clock(), self._last_s
        self._last_s = now_s
        if samples_per_s is None and samples is not None and last_s is not None and now_s > last_s:
            samples_per_s = float(samples / (now_s - last_s))
        if samples_per_s is not None:
            samples_per_s = float(samples_per_s)
            self.samples_per_s = samples_per_s if math.isfinite(samples_per_s) and samples_per_s > 0 else 0.0
        return True


def count_of(name: str, value: SupportsIndex) -> int:
    """A count that messages can carry: a thread would fail on any other, and the worker fall silent.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is out of bounds.
    """
    count = operator.index(value)
    if not 0 <= count <= MAX_NUMBER:
        raise ValueError(f"{name} must be from 0 to {MAX_NUMBER}; it is {str(count)[:40]}.")
    return count


def seconds_of(name: str, value: SupportsFloat) -> float:
    """A duration that messages can carry.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or not finite.
    """
    seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a number of seconds from 0; it is {seconds}.")
    return seconds
