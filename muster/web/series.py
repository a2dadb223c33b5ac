"""A time series with a bounded number of points, which becomes coarser as it becomes longer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

POINTS_KEPT = 600


class Point(NamedTuple):
    """A job's figures at a time.

    Attributes:
        time_s: the time in seconds since 1970.
        step: the number of steps that all workers have finished.
        samples_per_s: the speed of all workers together.
        loss: the loss; None if not reported.
        learning_rate: the learning rate; None if not reported.
        numbers: the script's own numbers, as pairs of name and value.
    """

    time_s: float
    step: int
    samples_per_s: float
    loss: float | None = None
    learning_rate: float | None = None
    numbers: tuple[tuple[str, float], ...] = ()


@dataclass
class Series:
    """Points in order of time.

    When there are ``POINTS_KEPT`` points, every second one is dropped, and the least time between new points
    is almost doubled.

    Attributes:
        points: the points.
        apart_s: the least time between two new points, in seconds.
    """

    points: list[Point] = field(default_factory=list)
    apart_s: float = 0.0

    def take(self, point: Point) -> None:
        """Adds a point, unless it is too close to the last; drops later points if the clock was set back."""
        while self.points and self.points[-1].time_s > point.time_s:
            self.points.pop()
        last = self.points[-1] if self.points else None
        if last is not None and point.time_s < last.time_s + self.apart_s:
            return
        self.points.append(point)
        if len(self.points) >= POINTS_KEPT:
            self.points = self.points[::2]
            self.apart_s = 1.8 * (self.points[-1].time_s - self.points[0].time_s) / len(self.points)

    def prepend(self, older: Iterable[Point]) -> None:
        """Adds earlier points at the front."""
        before = self.points[0].time_s if self.points else float("inf")
        points = [*(point for point in older if point.time_s < before), *self.points]
        self.points, self.apart_s = [], 0.0
        for point in points:
            self.take(point)

    def step_times(self) -> list[tuple[float, float]]:
        """Returns pairs of time and mean seconds per step, one for each point at which steps had ended."""
        found = []
        start = self.points[0] if self.points else None
        for point in self.points:
            if start is None or point.step < start.step:  # The training has started over.
                start = point
            elif point.step > start.step:
                found.append((point.time_s, (point.time_s - start.time_s) / (point.step - start.step)))
                start = point
        return found
