"""The interface of journals, and a wrapper that repeats writes until the journal has space."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from muster.scheduler.core.records import Record
from muster.scheduler.core.shortage import Shortage
from muster.scheduler.errors import NoSpaceError

LOG = logging.getLogger("scheduler")
T = TypeVar("T")


class Storage(Protocol):
    """A journal: :mod:`muster.scheduler.jobs.journal` or :mod:`muster.scheduler.etcd.journal`.

    A call that raises :class:`NoSpaceError` may be repeated unchanged. It is carried out only once.
    """

    async def load(self) -> Mapping[str, Sequence[Record]]:
        """Reads all records of each job, oldest first."""

    async def append(self, job_id: str, records: Sequence[Record]) -> None:
        """Makes records durable, all or none. Without records, only checks that nobody else writes here."""

    async def forget(self, job_id: str) -> None:
        """Deletes a job's records."""

    async def notes(self) -> Mapping[str, str]:
        """The notes stored next to the records, by name."""

    async def note(self, name: str, text: str) -> None:
        """Stores a text under a name, replacing the previous one."""

    async def close(self) -> None:
        """Closes the journal, so that another process can write it."""


class WaitingStorage:
    """A journal whose calls wait until there is space, however long that takes. Passes on other errors.

    Args:
        storage: the journal.
        now: seconds on a monotonic clock.
    """

    def __init__(self, storage: Storage, now: Callable[[], float]) -> None:
        self._storage = storage
        self._now = now
        self._shortage = Shortage()

    @property
    def unwritable(self) -> str:
        """Why nothing can be written at present, as a sentence; empty if nothing is known to prevent it."""
        return self._shortage.why

    async def load(self) -> Mapping[str, Sequence[Record]]:
        """See :class:`Storage`."""
        return await self._in_time(self._storage.load)

    async def append(self, job_id: str, records: Sequence[Record]) -> None:
        """See :class:`Storage`."""
        await self._in_time(lambda: self._storage.append(job_id, records))

    async def forget(self, job_id: str) -> None:
        """See :class:`Storage`."""
        await self._in_time(lambda: self._storage.forget(job_id))

    async def notes(self) -> Mapping[str, str]:
        """See :class:`Storage`."""
        return await self._storage.notes()

    async def note(self, name: str, text: str) -> None:
        """See :class:`Storage`; this call alone does not wait for space.

        Raises:
            NoSpaceError: there is no space.
        """
        await self._storage.note(name, text)

    async def close(self) -> None:
        """See :class:`Storage`."""
        await self._storage.close()

    async def _in_time(self, write: Callable[[], Awaitable[T]]) -> T:
        shortage, call, is_done = self._shortage, object(), False
        try:
            while True:
                try:
                    result = await write()
                    is_done = True
                    return result
                except NoSpaceError as error:
                    pause_s = shortage.refused(call, error.message, self._now())
                    if shortage.report_due(self._now()):
                        LOG.error(
                            "the journal cannot be written: %s Training goes on; joins and losses wait until"
                            " it can be.",
                            error,
                        )
                await asyncio.sleep(pause_s)
        finally:
            since = shortage.since
            if shortage.over(call) and is_done:  # else it is given up, or failed for another reason
                LOG.warning("all waiting writes to the journal are done, after %.1f s", self._now() - since)
