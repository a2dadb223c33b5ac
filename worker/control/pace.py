"""When a worker that waits for its peers has waited too long: measured by its own steps."""

from __future__ import annotations

import statistics
from collections import deque

LEAST_S = 10.0
STEPS = 5
"""So many median steps it may take."""

KEPT = 31


class Pace:
    """The durations of the last steps, in seconds."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=KEPT)
        self._step = -1
        self._since = 0.0

    def note_step(self, step: int, now: float) -> None:
        """``step`` steps are finished, and the next one begins."""
        if step == self._step + 1:
            self._durations.append(now - self._since)
        self._step, self._since = step, now

    def note_wait(self, seconds: float) -> None:
        """A wait that was too long has ended well: a script that counts no steps may do so each time."""
        self._durations.append(seconds)

    @property
    def limit_s(self) -> float:
        """How long a collective may take: five times the median step, at least ten seconds."""
        if not self._durations:
            return LEAST_S
        return max(LEAST_S, STEPS * statistics.median(self._durations))
