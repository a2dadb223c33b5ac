"""The audit log's head in the journal: noted while it grows, and asked for at the start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muster.scheduler.audit import anchors
from muster.scheduler.audit.anchors import PREFIX, Anchors
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.chain import Anchor
from muster.scheduler.errors import NoSpaceError
from muster.scheduler.jobs.journal import InThread, Journal, notes_of
from tests.waiting import go, until


class Rig:
    """An audit log beside a journal."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.sqlite"
        self.audit = AuditLog(folder / "audit.jsonl")
        self.storage = InThread(lambda: Journal(self.path))
        self.anchors = Anchors(self.audit, self.storage)

    async def begin(self) -> None:
        await self.storage.load()
        await self.anchors.begin()

    async def end(self) -> None:
        await self.anchors.end()
        await self.storage.close()
        self.audit.close()

    def noted(self) -> int:
        log = self.audit.head.log
        text = notes_of(self.path).get(PREFIX + log, "")
        return Anchor.decoded(log, text).head.number if text else 0


def test_the_head_is_noted_while_the_log_grows_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "ANCHOR_INTERVAL_S", 0.001)

    async def test() -> None:
        rig = Rig(tmp_path)
        await rig.begin()
        rig.audit.write("joined", {})
        await until(lambda: rig.noted() == 2)
        monkeypatch.setattr(anchors, "ANCHOR_INTERVAL_S", 1e6)
        await asyncio.sleep(0.01)
        rig.audit.write("left", {})
        await rig.end()
        assert rig.noted() == 3
        assert rig.audit.head.number == 3

    go(test())


def test_a_scheduler_that_finds_lines_missing_says_so_and_writes_it_down(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        await rig.begin()
        rig.audit.write("joined", {})
        rig.audit.write("expelled", {})
        await rig.end()
        path = tmp_path / "audit.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
        rig = Rig(tmp_path)
        await rig.begin()
        await rig.end()
        assert "lines 3 to 3 of the audit log are missing at its end" in path.read_text().splitlines()[2]

    go(test())


def test_a_journal_without_space_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "ANCHOR_INTERVAL_S", 0.001)

    async def test() -> None:
        rig = Rig(tmp_path)
        tries = 0
        real = rig.storage.note

        async def full(name: str, text: str) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise NoSpaceError("The disk is full.")
            await real(name, text)

        monkeypatch.setattr(rig.storage, "note", full)
        await rig.begin()
        await until(lambda: rig.noted() == 1)
        await rig.end()

    go(test())
