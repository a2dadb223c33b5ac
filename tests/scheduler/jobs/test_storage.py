"""A journal whose writes wait for space: what the log says at the end of the waiting."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from muster.scheduler.errors import NoSpaceError
from muster.scheduler.jobs.storage import WaitingStorage
from tests.waiting import go

DONE = "all waiting writes to the journal are done"


class FullDisk:
    """A journal that refuses its first writes, and says when it has refused one."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.refused = asyncio.Event()

    async def append(self, job_id: str, records: object) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            self.refused.set()
            raise NoSpaceError("No space is left on the device.")


def test_what_waited_and_is_written_is_said_to_be_done(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        storage = WaitingStorage(FullDisk(1), asyncio.get_running_loop().time)  # type: ignore[arg-type]
        await storage.append("job", [])
        assert storage.unwritable == ""

    go(test())
    assert DONE in caplog.text


def test_what_is_given_up_while_it_waits_is_not_said_to_be_done(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        disk = FullDisk(1_000_000)
        storage = WaitingStorage(disk, asyncio.get_running_loop().time)  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(storage.append("job", []))
        await disk.refused.wait()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert storage.unwritable == ""

    go(test())
    assert "the journal cannot be written" in caplog.text and DONE not in caplog.text
