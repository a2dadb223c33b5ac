"""For how long a GPU waited for other ranks' gradients: by two events around the join of two streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_KEPT: list[Any] = []
"""The events that graphs record, two for each capturing model of a generation.

None is ever destroyed: a graph that is launched with one that is gone ends the process.
"""


class DeviceWaits:
    """Measures how long a training stream stood still at the end of backward passes; the host never waits.

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
        self._recorded = False

    @contextlib.contextmanager
    def measuring(self, *, capturing: bool) -> Iterator[None]:
        """Context in which the current stream is made to wait for others.

        Args:
            capturing: a CUDA graph is captured, which measures that at each of its replays.
        """
        if not self._made(capturing):
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        self._begin.record(stream)
        yield
        self._end.record(stream)
        self._recorded = not capturing
        if capturing and not self._captured:
            self._captured = True
            _KEPT.extend((self._begin, self._end))

    def replayed(self) -> None:
        """Notes that a graph which measures has been launched."""
        self._recorded = self._recorded or self._captured

    def take(self) -> float | None:
        """The last measured wait, in seconds; None: none has ended since the last call."""
        if not self._recorded:
            return None
        try:
            if not self._end.query():
                return None
            waited_s = float(self._begin.elapsed_time(self._end)) / 1000
        except RuntimeError:  # of a step that broke, or one that has begun since
            return None
        if waited_s < 0.0:
            return None  # the next step has begun to measure
        self._recorded = False
        return waited_s

    def _made(self, capturing: bool) -> bool:
        """Makes the events, once; False: this torch has none that a graph can record."""
        if self._begin is None:
            try:
                events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
                self._graphs_record = True
            except TypeError:  # torch before 2.8
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._begin, self._end = events
        return self._graphs_record or not capturing
