"""For how long a GPU waited for other ranks' gradients: by two events around each wait of a stream."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_KEPT: list[Any] = []
"""The events that graphs record, two for each capturing model of a generation.

None is ever destroyed: a graph that is launched with one that is gone ends the process.
"""

MOST_WAITS = 4096
"""So many waits are kept until they are over; the oldest are given up first."""


class DeviceWaits:
    """Measures how long a training stream stood still while it waited for others; the host never waits.

    A rank whose GPU computes longer finds the others' gradients there already, and waits less than they do.
    What the last bucket needs to travel counts as well, on all ranks alike.

    Args:
        device: whose current stream waits.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._begin: Any = None
        self._end: Any = None
        self._graphs_record = self._captured = False
        self._replayed = False
        self._eager: deque[tuple[Any, Any]] = deque(maxlen=MOST_WAITS)
        self._spare: list[tuple[Any, Any]] = []
        self._measures = False

    @contextlib.contextmanager
    def measuring(self, *, capturing: bool) -> Iterator[None]:
        """Context in which the current stream is made to wait for others; one within another counts once.

        Args:
            capturing: a CUDA graph is captured, which measures that at each of its replays; of several
                such contexts it measures the last one.
        """
        if self._measures or not self._made(capturing):
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        events = (self._begin, self._end) if capturing else self._spare.pop() if self._spare else self._new()
        self._measures = True
        try:
            events[0].record(stream)
            yield
            events[1].record(stream)
        finally:
            self._measures = False
        if not capturing:
            self._eager.append(events)
        elif not self._captured:
            self._captured = True
            _KEPT.extend(events)

    def within_step(self, tensor: Any) -> contextlib.AbstractContextManager[None]:
        """Context in which the current stream, not the host, waits until others have come for this tensor.

        Of a step that a graph captures nothing is measured here, and nothing of the host's memory.
        """
        if not tensor.is_cuda or torch.cuda.is_current_stream_capturing():
            return contextlib.nullcontext()
        return self.measuring(capturing=False)

    def replayed(self) -> None:
        """Notes that a graph which measures has been launched."""
        self._replayed = self._replayed or self._captured

    def take(self) -> float | None:
        """How long the waits were that have ended since the last call, in seconds; None: none has."""
        found = [self._take_replayed()]
        with contextlib.suppress(RuntimeError):  # of a step that broke
            while self._eager and self._eager[0][1].query():
                events = self._eager.popleft()
                found.append(float(events[0].elapsed_time(events[1])) / 1000)
                self._spare.append(events)
        measured = [seconds for seconds in found if seconds is not None]
        return sum(measured) if measured else None

    def _take_replayed(self) -> float | None:
        if not self._replayed:
            return None
        try:
            if not self._end.query():
                return None
            waited_s = float(self._begin.elapsed_time(self._end)) / 1000
        except RuntimeError:  # of a step that broke, or one that has begun since
            return None
        if waited_s < 0.0:
            return None  # the next step has begun to measure
        self._replayed = False
        return waited_s

    def _made(self, capturing: bool) -> bool:
        """Makes the events that graphs record, once; False: this torch has none that a graph can record."""
        if self._begin is None:
            try:
                self._begin, self._end = self._new(external=True)
                self._graphs_record = True
            except TypeError:  # torch before 2.8
                self._begin, self._end = self._new()
        return self._graphs_record or not capturing

    def _new(self, **options: bool) -> tuple[Any, Any]:
        make = functools.partial(torch.cuda.Event, enable_timing=True, **options)
        return make(), make()
