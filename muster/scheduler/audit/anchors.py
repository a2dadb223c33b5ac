"""Records the head of the audit log in the journal, so that missing lines at the log's end are detected."""

from __future__ import annotations

import asyncio
import logging

from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.chain import Anchor
from muster.scheduler.errors import SchedulerError
from muster.scheduler.jobs.storage import Storage

LOG = logging.getLogger("scheduler")

ANCHOR_INTERVAL_S = 1.0
"""The time between two records of the head, in seconds. If lines that are more recent than that are cut off,
this is not detected.
"""

PREFIX = "audit/"


class Anchors:
    """Records the heads of an audit log in a journal.

    Args:
        audit: the log.
        storage: the journal; it must be open from :meth:`begin` to :meth:`end`.
    """

    def __init__(self, audit: AuditLog, storage: Storage) -> None:
        self._audit = audit
        self._storage = storage
        self._noted = 0
        self._keeping: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Reports lines that the journal knows of but the log lacks, and starts to record the head."""
        head = self._audit.head
        text = (await self._storage.notes()).get(PREFIX + head.log, "")
        try:
            known = Anchor.decoded(head.log, text).head.number if text else 0
        except ValueError:
            known = 0
        if known > head.number:
            sentence = (
                f"lines {head.number + 1} to {known} of the audit log are missing at its end: the"
                " journal knows of them"
            )
            LOG.error("%s", sentence)
            self._audit.write("cut", {"known": known, "text": sentence})
        self._keeping = asyncio.ensure_future(self._keep())

    async def end(self) -> None:
        """Records the last head."""
        if self._keeping is not None:
            self._keeping.cancel()
            await self._note()

    async def _keep(self) -> None:
        while True:
            await self._note()
            await asyncio.sleep(ANCHOR_INTERVAL_S)

    async def _note(self) -> None:
        head = self._audit.head
        if head.number == self._noted:
            return
        try:
            await self._storage.note(PREFIX + head.log, head.encoded(self._audit.key))
            self._noted = head.number
        except SchedulerError as error:  # The disk is full, or another scheduler leads.
            LOG.debug("the audit log's head is not noted: %s", error)
