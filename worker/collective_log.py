"""The last collectives of this worker, for hang reports: what was issued, and what is over.

Entries are numbered within their group and generation, as all its ranks count them, so that the scheduler
can lay the logs of two ranks side by side. Noting one costs well under a microsecond. Heartbeats read the
log from another thread, which must never call into CUDA: it would hang with a hanging GPU.
"""

from __future__ import annotations

from collections import defaultdict, deque

from worker.communicators.base import Array, Work
from worker.core.messages import Collective

KEPT_COLLECTIVES = 32


class Entry:
    """One collective; what costs time to find out is found out when it is asked for."""

    __slots__ = ("_buffer_bytes", "_dtype", "group", "name", "over", "sequence", "work")

    def __init__(self, sequence: int, name: str, group: str, buffer: Array | None) -> None:
        self.sequence = sequence
        self.name = name
        self.group = group
        self._dtype = getattr(buffer, "dtype", "")
        self._buffer_bytes = getattr(buffer, "nbytes", 0)
        self.work: Work | None = None
        """Tells whether it is over; None where only the device knows."""
        self.over = False

    def value(self) -> Collective:
        """As the scheduler is told."""
        done = self.over or (self.work is not None and self.work.done())
        return Collective(
            self.sequence, self.name, self.group, str(self._dtype)[:32], int(self._buffer_bytes), done
        )


class CollectiveLog:
    """The last collectives of this worker in this generation, over all groups."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT_COLLECTIVES)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def begin(self, name: str, group: str, buffer: Array | None) -> Entry:
        """Notes that a collective is issued."""
        self._counts[group] += 1
        entry = Entry(self._counts[group], name, group, buffer)
        self._entries.append(entry)
        return entry

    def settle(self) -> None:
        """The device has been waited for: all that was issued is over."""
        for entry in self._entries:
            entry.over = True

    def clear(self) -> None:
        """A new generation begins: all its ranks count from 1."""
        self._entries.clear()
        self._counts.clear()

    def recent(self, *, last_only: bool = False) -> tuple[Collective, ...]:
        """The last collectives, oldest first; or the very last."""
        entries = tuple(self._entries)
        return tuple(entry.value() for entry in (entries[-1:] if last_only else entries))
