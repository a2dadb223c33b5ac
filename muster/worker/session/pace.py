"""How long a collective may take, by the pace of this worker's steps."""

from __future__ import annotations

import statistics
from collections import deque

LEAST_S = 10.0
STEPS = 5
"""How many median steps a collective may take."""

KEPT = 31


class Pace:
    """The durations of the last steps, in seconds; in a script that counts none, of long waits.

    Args:
        least_s: however short the steps are, so long a collective may take.
    """

    def __init__(self, least_s: float = LEAST_S) -> None:
        self._least_s = least_s
        self._durations: deque[float] = deque(maxlen=KEPT)
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._step: int | None = None
        self._since = 0.0

    def note_step(self, step: int, now: float) -> None:
        """Notes that ``step`` steps are finished, and the next one begins."""
        if self._step is not None and step == self._step + 1:
            self._durations.append(now - self._since)
        self._step, self._since = step, now

    def note_wait(self, seconds: float) -> None:
        """Notes that a long wait has ended well: in a script that counts no steps that may be usual.

        Where steps are counted, its step's duration holds it already.
        """
        self._waits.append(seconds)

    @property
    def limit_s(self) -> float:
        """How long a collective may take: five times the median step, at least ``least_s``.

        Of two in the middle the shorter one: after two steps, of which one waited for a busy rank, the other
        says how long a step is.
        """
        usual = self._durations or self._waits
        return max(self._least_s, STEPS * statistics.median_low(usual)) if usual else self._least_s
