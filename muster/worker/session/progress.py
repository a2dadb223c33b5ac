"""The training's progress, as reported by loop and script."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from typing import SupportsFloat, SupportsIndex

from muster.wire.codec import MAX_NUMBER
from muster.wire.messages import MAX_NUMBER_NAME, MAX_NUMBERS

log = logging.getLogger("muster.worker")


class Progress:
    """The latest report of a training's progress.

    A loop that numbers its steps, as ElasticLoop does, reports the number and the speed, and the script only
    adds a loss. Without such a loop, each report of the script counts as a step, and the speed is computed
    from its samples.

    Args:
        clock: returns monotonic seconds.

    Attributes:
        step: steps finished.
        samples_per_s: this worker's speed.
        loss: the last reported loss; None if there is none.
        learning_rate: the last reported learning rate; None if there is none.
        steps: the total number of steps; 0 if not known.
        epoch: the epoch that the training is in, from 1; 0 if not known.
        epochs: the total number of epochs; 0 if not known.
        numbers: the script's own numbers by name, as last reported; all finite.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step = 0
        self.samples_per_s = 0.0
        self.loss: float | None = None
        self.learning_rate: float | None = None
        self.steps = self.epoch = self.epochs = 0
        self.numbers: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._clock = clock
        self._numbered = False
        self._last_s: float | None = None

    def take(
        self,
        step: int | None,
        samples_per_s: float | None,
        numbers: Mapping[str, SupportsFloat] | None = None,
        *,
        loss: SupportsFloat | None = None,
        samples: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
        learning_rate: SupportsFloat | None = None,
    ) -> bool:
        """Handles a report; returns whether it counts as a step, and not only numbers or an epoch.

        Raises:
            TypeError, ValueError: ``step``, ``steps``, ``epoch`` or ``epochs`` is not a count, or one of
                ``numbers`` is not a number.
        """
        self._take_numbers(numbers or {})
        self.epoch = self.epoch if epoch is None else count_of("epoch", epoch)
        self.epochs = self.epochs if epochs is None else count_of("epochs", epochs)
        is_beside_steps = (step, samples_per_s, loss, samples, steps, learning_rate) == (None,) * 6
        if is_beside_steps and (numbers or epoch is not None or epochs is not None):
            return False
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

    def _take_numbers(self, numbers: Mapping[str, SupportsFloat]) -> None:
        """Stores the script's own numbers. A number that is no longer finite is no longer shown.

        Numbers that cannot be sent are left out with a warning, because training must not end because of
        them.
        """
        for name, given in numbers.items():
            value = float(given)
            if not math.isfinite(value):
                self.numbers.pop(name, None)
            elif name in self.numbers or (fits(name) and len(self.numbers) < MAX_NUMBERS):
                self.numbers[name] = value
            elif name not in self._left_out and len(self._left_out) < MAX_NUMBERS:
                self._left_out.add(name)
                log.warning(
                    "session.report(): %.80r is left out: there may be %d numbers, with names of 1 to %d"
                    " characters without blanks.",
                    name,
                    MAX_NUMBERS,
                    MAX_NUMBER_NAME,
                )


def fits(name: str) -> bool:
    """Whether messages can contain a number with this name."""
    return 1 <= len(name) <= MAX_NUMBER_NAME and name.isprintable() and " " not in name


def count_of(name: str, value: SupportsIndex) -> int:
    """Checks a count for use in messages, where a wrong value would end a thread.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is out of bounds.
    """
    count = operator.index(value)
    if not 0 <= count <= MAX_NUMBER:
        raise ValueError(f"{name} must be from 0 to {MAX_NUMBER}; it is {str(count)[:40]}.")
    return count


def seconds_of(name: str, value: SupportsFloat) -> float:
    """Checks a duration that goes into messages.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative, or not finite.
    """
    seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a number of seconds from 0; it is {seconds}.")
    return seconds
