"""Derives the time limit of a collective from the pace of this worker's steps."""

from __future__ import annotations

import statistics
from collections import deque

LEAST_S = 10.0
STEPS = 5
"""How many median steps a collective may take."""

KEPT = 31


class Pace:
    """The durations of recent steps, or of recent long waits in a script that counts no steps, in seconds.

    Args:
        least_s: the least time limit of a collective in seconds, no matter how short the steps are.
    """

    def __init__(self, least_s: float = LEAST_S) -> None:
        self._least_s = least_s
        self._durations: deque[float] = deque(maxlen=KEPT)
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._step: int | None = None
        self._since = 0.0

    def note_step(self, step: int, now: float) -> None:
        """Records that ``step`` steps are finished, and the next one begins."""
        if self._step is not None and step == self._step + 1:
            self._durations.append(now - self._since)
        self._step, self._since = step, now

    def note_wait(self, seconds: float) -> None:
        """Records that a long wait has ended well.

        In a script that counts no steps, such waits may be normal. If steps are counted, the wait is part of
        the duration of its step.
        """
        self._waits.append(seconds)

    @property
    def limit_s(self) -> float:
        """Returns the time limit of a collective in seconds: five median steps, at least ``least_s``.

        With an even number of steps, the smaller of the two middle values is used. So if one of the first two
        steps waited for a busy rank, the other step sets the limit.
        """
        usual = self._durations or self._waits
        return max(self._least_s, STEPS * statistics.median_low(usual)) if usual else self._least_s
