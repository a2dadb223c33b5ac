"""Measures the time of this worker's steps by cause: computing, waiting for others, waiting for data."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from muster.wire.codec import LONGEST_TIMES_S
from muster.wire.messages import StepTimes, step_times_apart_s

EARLY = 0.9
"""The share of the report interval after which the next report is due. It is less than 1, so that the
heartbeat at the end of the interval is not just too early.
"""


class WaitedFor(Protocol):
    """The part of a :class:`~muster.communicators.fault_aware.FlightRecorder` that is used here."""

    waited_s: float
    """How long the training thread has waited for others or for a device, in total, in seconds."""

    def take_device_wait(self) -> float | None:
        """Returns for how long a device waited for others in the last step; None: it was not measured."""


def _no_links() -> Mapping[int, float]:
    return {}


class StepClock:
    """Sums up how the steps since the last report were spent; reports are sent with heartbeats.

    The part of a step that is not spent waiting for others or for data counts as computing. On a GPU, the
    waiting time is that of its stream if it is measured, otherwise that of the host. The time of a change of
    members is not counted, nor is the time for which the worker has declared itself busy.

    Args:
        waits: the training thread's waits in collectives.
        clock: returns monotonic seconds.
        links: returns how long data could not be sent to each rank, in total, in seconds.

    Attributes:
        checkpoints_s: how long the training was blocked by checkpoints, in total, in seconds.
    """

    def __init__(
        self,
        waits: WaitedFor,
        clock: Callable[[], float],
        links: Callable[[], Mapping[int, float]] = _no_links,
    ) -> None:
        self._waits = waits
        self._clock = clock
        self._links = links
        self._lock = threading.Lock()  # Heartbeats are sent from another thread.
        self._apart_s = step_times_apart_s(1)
        self._due = 0.0
        self._since: float | None = None
        self._waited_before = 0.0
        self._data_s = 0.0
        self._excused_s = 0.0
        self.checkpoints_s = 0.0
        self._steps = 0
        self._sums = [0.0] * 6
        self._sent: dict[int, float] = {}
        self._is_told = False

    def begin(self, members: int = 1, rank: int = 0) -> None:
        """Records that a group is established: the first step begins now.

        Args:
            members: number of members of the group. With more members, each waits longer between two reports.
            rank: this worker's rank. Members report in turns.
        """
        now = self._clock()
        with self._lock:
            self._apart_s = step_times_apart_s(members)
            self._due = now + self._apart_s * rank / members
            self._sent = dict(self._links())
            self._steps, self._sums = 0, [0.0] * 6
            self._is_told = False
        self._waits.take_device_wait()  # Drops the wait in a step of the previous group.
        self._begin_step(now)

    def _begin_step(self, now: float) -> None:
        self._since, self._waited_before = now, self._waits.waited_s
        self._data_s = self._excused_s = 0.0

    def note_data(self, seconds: float) -> None:
        """Records that the training thread has waited for data."""
        self._data_s += seconds

    def excuse(self, seconds: float, *, for_checkpoint: bool = False) -> None:
        """Records that the worker did something alone that is not part of a step."""
        self._excused_s += seconds
        if for_checkpoint:
            self.checkpoints_s += seconds

    def end_step(self) -> None:
        """Records that a step has ended, and the next one begins."""
        now, since = self._clock(), self._since
        if since is not None:
            data_s = self._data_s
            waited_s = max(0.0, self._waits.waited_s - self._waited_before)
            device_s = self._waits.take_device_wait()
            if device_s is not None:  # The host's wait includes the time in which its device computes.
                waited_s = min(device_s, max(0.0, now - since - data_s - self._excused_s))
            computed_s = max(0.0, now - since - waited_s - data_s - self._excused_s)
            with self._lock:
                if not self._is_told:
                    self._add(1, (computed_s, computed_s, waited_s, waited_s, data_s, data_s))
        self._begin_step(now)

    def add(self, steps: int, seconds: Sequence[float]) -> None:
        """Adds steps that this worker's program has timed itself; from then on, :meth:`end_step` counts none.

        Args:
            steps: the number of these steps.
            seconds: the durations as in :class:`~muster.wire.messages.StepTimes`, without the link's.

        Raises:
            TypeError, ValueError: the arguments are not such numbers.
        """
        count, sums = operator.index(steps), [float(each) for each in seconds]
        with self._lock:
            most = LONGEST_TIMES_S - self._steps, LONGEST_TIMES_S - sum(self._sums)
            if not 1 <= count <= most[0] or len(sums) != 6 or min(sums) < 0.0 or not sum(sums) <= most[1]:
                raise ValueError(f"{steps} steps of {sums} seconds are no times of steps.")
            if not self._is_told:  # Drops the times measured here, which do not include the program's waits.
                self._is_told, self._steps, self._sums = True, 0, [0.0] * 6
            self._add(count, sums)

    def _add(self, steps: int, seconds: Sequence[float]) -> None:
        self._steps += steps
        for place in (0, 2, 4):
            self._sums[place] += seconds[place]
            self._sums[place + 1] = max(self._sums[place + 1], seconds[place + 1])

    def take(self) -> StepTimes | None:
        """Returns the steps not reported yet; None if it is too early for a report, or if there are none."""
        now = self._clock()
        with self._lock:
            if not self._steps or now < self._due:
                return None
            self._due = now + EARLY * self._apart_s
            steps, sums = self._steps, self._sums
            self._steps, self._sums = 0, [0.0] * 6
            link, link_s = self._slowest_link()
            return StepTimes(steps, (*sums, link_s), link)

    def _slowest_link(self) -> tuple[int, float]:
        """Returns the rank with the slowest link since the last call, counted from 1; 0 if there is none.

        Also returns for how many seconds data could not be sent to it.
        """
        sent = dict(self._links())
        taken = {rank: seconds - self._sent.get(rank, 0.0) for rank, seconds in sent.items()}
        self._sent = sent
        if not taken:
            return 0, 0.0
        rank = max(taken, key=lambda each: taken[each])
        return rank + 1, max(0.0, taken[rank])
