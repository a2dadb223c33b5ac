"""Measures how long a GPU waits for other ranks, by two events around each wait of its stream."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_KEPT: list[Any] = []
"""The events that graphs record, two for each wait in a captured step of a model in a generation.

They are kept for ever, because launching a graph whose event is destroyed ends the process.
"""

MOST_WAITS = 4096
"""Maximum number of waits that are kept until they are over; beyond it the oldest are dropped."""

MOST_CAPTURED = 512
"""Maximum number of waits of a captured step that are measured, from its beginning."""


class DeviceWaits:
    """Measures how long a training stream waits for other ranks; the host never waits.

    A slower rank finds the others' gradients ready, so it waits less than they do. The communication of the
    last bucket counts as well, equally on all ranks.

    Args:
        device: the device; its current stream is measured.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._graphs_record: bool | None = None
        self._captured: list[tuple[Any, Any]] = []
        self._recorded = 0  # of these, by the graphs of the step that was captured last
        self._is_launched = self._replayed = False
        self._eager: deque[tuple[Any, Any]] = deque(maxlen=MOST_WAITS)
        self._spare: list[tuple[Any, Any]] = []
        self._measures = False

    @contextlib.contextmanager
    def measuring(self, *, capturing: bool) -> Iterator[None]:
        """Context that measures the current stream's waits for other ranks; a nested one counts once.

        Args:
            capturing: whether a CUDA graph is being captured, which then measures them at each replay.
        """
        events = None if self._measures else self._next_captured() if capturing else self._next_eager()
        if events is None:
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        self._measures = True
        try:
            events[0].record(stream)
            yield
            events[1].record(stream)
        finally:
            self._measures = False
        if capturing:
            self._recorded += 1
        else:
            self._eager.append(events)

    def within_step(self, tensor: Any) -> contextlib.AbstractContextManager[None]:
        """Context that measures the current stream's wait for a collective on this tensor.

        Nothing is measured for a tensor in host memory, for which the host waits.
        """
        if not tensor.is_cuda:
            return contextlib.nullcontext()
        return self.measuring(capturing=torch.cuda.is_current_stream_capturing())

    def replayed(self) -> None:
        """Notes that the captured step has been launched."""
        self._is_launched = self._replayed = self._recorded > 0

    def take(self) -> float | None:
        """Returns the total seconds of waits that have ended since the last call; None: no wait has."""
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
        waited_s = []
        for begin, end in self._captured[: self._recorded]:
            with contextlib.suppress(RuntimeError):  # of a capture, or a step, that broke
                if not end.query():
                    return None
                waited_s.append(float(begin.elapsed_time(end)) / 1000)
        if not waited_s or min(waited_s) < 0.0:
            return None  # the next step has begun to measure
        self._replayed = False
        return sum(waited_s)

    def _next_eager(self) -> tuple[Any, Any]:
        return self._spare.pop() if self._spare else self._new()

    def _next_captured(self) -> tuple[Any, Any] | None:
        """Returns the events for a captured step's next wait; None: graphs record none, or these suffice."""
        if self._is_launched:  # another step is captured now
            self._recorded, self._is_launched = 0, False
        if self._recorded == len(self._captured) < MOST_CAPTURED and self._graphs_record is not False:
            try:
                self._captured.append(self._new(external=True))
                _KEPT.extend(self._captured[-1])
                self._graphs_record = True
            except TypeError:  # torch before 2.8
                self._graphs_record = False
        return self._captured[self._recorded] if self._recorded < len(self._captured) else None

    def _new(self, **options: bool) -> tuple[Any, Any]:
        make = functools.partial(torch.cuda.Event, enable_timing=True, **options)
        return make(), make()
