"""Simulated time: a queue of what happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class Loop:
    """Runs actions in order of their time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, when: float, action: Action, *arguments: Any) -> None:
        """Calls ``action`` at a time (now, if that has passed)."""
        self._number += 1
        heapq.heappush(self._queue, (max(when, self.now), self._number, action, arguments))

    def after(self, delay: float, action: Action, *arguments: Any) -> None:
        """Calls ``action`` in ``delay`` seconds."""
        self.at(self.now + delay, action, *arguments)

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Runs until it is over, nothing is left to do, or the time has come."""
        queue = self._queue
        while queue and queue[0][0] <= until and not over():
            self.now, _, action, arguments = heapq.heappop(queue)
            action(*arguments)
