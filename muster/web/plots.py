"""Computes the coordinates of plots over time, and of generations, for SVG templates. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.web.model import ObservedGeneration
from muster.web.series import Series
from muster.web.words import clock, duration, number
from muster.wire.messages import MAX_NUMBERS
from muster.wire.time_by_cause import CAUSES

WIDTH, HEIGHT = 440, 180
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
LARGEST, SMALLEST = 1e300, 1e-290
"""The largest value and the smallest difference that are drawn, because workers may report any number."""

MARKED = 64
"""The largest number of member changes that are marked; the newest ones are."""

DRAWN = 240
"""The largest number of points of a line; more would not be visible."""


@dataclass(frozen=True, slots=True)
class AxisTick:
    """A tick on an axis: its place in pixels, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A line over time.

    Attributes:
        title: the name of the value.
        latest: the newest value, as text.
        summary: a sentence about the line, for screen readers.
        path: the line as an SVG path; empty if there is nothing to draw yet.
        x_ticks: the ticks of the time axis.
        y_ticks: the ticks of the value axis.
        marks: the places on the time axis at which members changed.
    """

    title: str
    latest: str
    summary: str
    path: str = ""
    x_ticks: tuple[AxisTick, ...] = ()
    y_ticks: tuple[AxisTick, ...] = ()
    marks: tuple[AxisTick, ...] = ()


def plots(series: Series, generations: Sequence[ObservedGeneration] = ()) -> list[Plot]:
    """Returns a job's plots: loss, learning rate, samples per second, seconds per step, the script's numbers.

    Args:
        series: the job's figures.
        generations: the generations whose beginnings are marked.
    """
    points = series.points
    own: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for name, value in point.numbers:
            own.setdefault(name, []).append((point.time_s, value))
    changes = [
        (
            each.formed,
            f"{clock(each.formed)}: generation {each.number}, {each.members} members: {each.reason}",
        )
        for each in generations[-MARKED:]
        if each.number > 1
    ]
    rates = [(p.time_s, p.learning_rate) for p in points if p.learning_rate is not None]
    return [
        plot("Loss", [(p.time_s, p.loss) for p in points if p.loss is not None], changes),
        plot("Learning rate", rates, changes),
        plot("Samples per second", [(p.time_s, p.samples_per_s) for p in points], changes, zero=True),
        plot("Seconds per step", series.step_times(), changes, zero=True),
        *(plot(name, own[name], changes) for name in sorted(own)[:MAX_NUMBERS]),
    ]


def plot(
    title: str,
    points: Sequence[tuple[float, float]],
    changes: Sequence[tuple[float, str]] = (),
    *,
    zero: bool = False,
) -> Plot:
    """Returns the plot of a line through points.

    Args:
        title: the name of the value.
        points: pairs of time in seconds and value.
        changes: pairs of time and text of member changes; those within the drawn time are marked.
        zero: whether the value axis begins at 0.
    """
    points = thinned([point for point in points if abs(point[1]) <= LARGEST])
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        latest = number(points[-1][1]) if points else ""
        return Plot(title, latest, f"{title}: nothing to draw yet.")
    start_s, end_s = points[0][0], points[-1][0]
    values = [value for _, value in points]
    ticks = nice_ticks(0.0 if zero else min(values), max(values))
    low, high = min(ticks[0], min(values)), max(ticks[-1], max(values))

    def x(time_s: float) -> float:
        return round(LEFT + (time_s - start_s) / (end_s - start_s) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    path = "M" + "L".join(f"{x(time_s)} {y(value)}" for time_s, value in points)
    took = duration(end_s - start_s)
    summary = (
        f"{title} over {took}: from {number(values[0])} to {number(values[-1])}, "
        f"lowest {number(min(values))}, highest {number(max(values))}."
    )
    middle_s = (start_s + end_s) / 2
    times = ((start_s, f"-{took}"), (middle_s, f"-{duration((end_s - start_s) / 2)}"), (end_s, "now"))
    return Plot(
        title,
        number(values[-1]),
        summary,
        path,
        tuple(AxisTick(x(time_s), text) for time_s, text in times),
        tuple(AxisTick(y(value), number(value)) for value in ticks),
        tuple(AxisTick(x(time_s), text) for time_s, text in changes if start_s <= time_s <= end_s),
    )


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduces a line to its two ends and at most ``DRAWN`` means of neighbouring points between them."""
    if len(points) <= DRAWN:
        return points
    each = math.ceil(len(points) / DRAWN)
    parts = [points[i : i + each] for i in range(1, len(points) - 1, each)]
    means = [(sum(t for t, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in parts]
    return [points[0], *means, points[-1]]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns round values in about ``count`` equal steps, from at most ``low`` to at least ``high``."""
    if high - low <= SMALLEST:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if abs(low) > SMALLEST else (0.0, 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a generation on the timeline; ``state`` is ``building``, or ``stood`` if established."""

    x: float
    width: float
    state: str
    text: str
    summary: str


def bars(generations: Sequence[ObservedGeneration], now: float) -> list[Bar]:
    """Returns the generations' bars on the timeline, with a least width at which short ones are visible."""
    if not generations:
        return []
    start = generations[0].formed
    span = max(now - start, 1.0)
    found = []
    for generation in generations:
        end = generation.over if generation.over is not None else now
        stood = min(generation.stood if generation.stood is not None else end, end)
        title = f"generation {generation.number}, {generation.members} members"
        for begin, until, state in ((generation.formed, stood, "building"), (stood, end, "stood")):
            if until <= begin:
                continue
            x, width = 1000 * (begin - start) / span, max(3.0, 1000 * (until - begin) / span)
            took = duration(until - begin)
            words = f"{title}: {'stood' if state == 'stood' else 'was being built'} for {took}"
            text = str(generation.number) if state == "stood" and width > 24 else ""
            found.append(Bar(round(min(x, 997.0), 1), round(width, 1), state, text, words))
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a job's time: cause, start and width of its bar (of 1000), percentage and duration."""

    cause: str
    x: float
    width: float
    percent: str
    took: str

    @property
    def kind(self) -> str:
        """The part's CSS class."""
        return f"c-{self.cause.replace(' ', '-')}"


def shares(seconds_by_cause: Mapping[str, float]) -> list[Share]:
    """Returns the parts of a job's time, in the order of the causes; empty if nothing is known."""
    whole_s = sum(max(0.0, seconds_by_cause.get(cause, 0.0)) for cause in CAUSES)
    found, x = [], 0.0
    for cause in CAUSES:
        seconds = seconds_by_cause.get(cause, 0.0)
        if seconds > 0.0:
            part = seconds / whole_s
            percent = f"{100 * part:.0f} %" if part >= 0.005 else "< 1 %"
            found.append(Share(cause, round(x, 1), round(1000 * part, 1), percent, duration(seconds)))
            x += 1000 * part
    return found
