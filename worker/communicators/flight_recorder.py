"""The last collectives of this worker, for hang reports: what was issued, and what is over.

Entries are numbered within their group and generation, as all its ranks count them, so that the scheduler
can lay the logs of two ranks side by side. Noting one costs well under a microsecond. Heartbeats read the
log from another thread, which must never call into CUDA: it would hang with a hanging GPU.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from muster.worker.communicators.base import Array, Work
from muster.worker.control.messages import Collective

KEPT_COLLECTIVES = 32


class Entry:
    """One collective; what costs time to find out is found out when it is asked for."""

    __slots__ = ("_buffer_bytes", "_dtype", "begun", "group", "name", "on_device", "over", "sequence", "work")

    def __init__(self, sequence: int, name: str, group: str, buffer: Array | None, begun: float) -> None:
        self.begun = begun
        self.sequence = sequence
        self.name = name
        self.group = group
        self._dtype = getattr(buffer, "dtype", "")
        self._buffer_bytes = getattr(buffer, "nbytes", 0)
        self.work: Work | None = None
        """Tells whether it is over; None while it is being issued."""
        self.on_device = False
        """Only the device knows whether it is over."""
        self.over = False

    @property
    def done(self) -> bool:
        """Whether it is known to be over."""
        return self.over or (not self.on_device and self.work is not None and self.work.done())

    def value(self) -> Collective:
        """As the scheduler is told."""
        group, dtype = _printable(self.group)[:128], _printable(str(self._dtype))[:32]
        return Collective(self.sequence, self.name, group, dtype, int(self._buffer_bytes), self.done)


class CollectiveLog:
    """The last collectives of this worker in this generation, over all groups.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting_since: float | None = None
        self.awaited = 0  # async collectives that the training thread waits for
        self._entries: deque[Entry] = deque(maxlen=KEPT_COLLECTIVES)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def begin(self, name: str, group: str, buffer: Array | None) -> Entry:
        """Notes that a collective is issued."""
        self._counts[group] += 1
        entry = Entry(self._counts[group], name, group, buffer, self._clock())
        self._entries.append(entry)
        return entry

    def await_device(self) -> None:
        """The host begins to wait for the device; :meth:`settle` ends that."""
        self._waiting_since = self._clock()

    def settle(self) -> None:
        """The device has been waited for: all that was issued is over."""
        self._waiting_since = None
        for entry in self._entries:
            entry.over = True

    def clear(self) -> None:
        """A new generation begins: all its ranks count from 1."""
        self._entries.clear()
        self._counts.clear()
        self._waiting_since = None

    def hanging_s(self) -> float:
        """For how long the oldest collective has been under way that is not over; 0: none is."""
        open_since = [entry.begun for entry in tuple(self._entries) if not (entry.on_device or entry.done)]
        waiting = self._waiting_since
        if waiting is not None:
            open_since.append(waiting)
        return self._clock() - min(open_since) if open_since else 0.0

    def late_s(self) -> float:
        """For how long this worker's thread has waited in a collective; or, where only a device knows what is
        over, for how long it has issued nothing more. In seconds; 0: it does not wait.
        """
        newest = max((entry.begun for entry in tuple(self._entries) if entry.on_device), default=None)
        unsettled = any(entry.on_device and not entry.over for entry in tuple(self._entries))
        on_device_s = self._clock() - newest if newest is not None and unsettled else 0.0
        return max(self.hanging_s() if self.waits() else 0.0, on_device_s)

    def waits(self) -> bool:
        """Whether this worker's thread can do nothing before others have come to a collective."""
        if self._waiting_since is not None or self.awaited > 0:
            return True
        newest = self._entries[-1] if self._entries else None
        return newest is not None and newest.work is None and not newest.over

    def recent(self, *, last_only: bool = False) -> tuple[Collective, ...]:
        """The last collectives, oldest first; or the very last."""
        entries = tuple(self._entries)
        return tuple(entry.value() for entry in (entries[-1:] if last_only else entries))


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
