"""Attacks on a journal by one who can write where it is kept: the SQLite file, or the job's keys in etcd.

The scheduler that reads it must refuse in one sentence that a terminal can show, and change nothing.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.scheduler.core import records
from muster.scheduler.etcd import journal as etcd_journal
from muster.scheduler.etcd.journal import EtcdJournal, EtcdJournalDamagedError
from muster.scheduler.jobs import journal as sqlite_journal
from muster.scheduler.jobs.journal import Journal, JournalError, chained_checksum
from muster.wire.v1 import etcd_pb2 as pb
from tests.scheduler.etcd.test_leadership import Rig
from tests.waiting import go

JOB = "j"
DEEP = "[" * 100_000
ESCAPE = "\x1b[2J"


def says_it_well(error: Exception) -> bool:
    """Whether it is one line that a terminal shows as it is, and not a long one."""
    return str(error).isprintable() and len(str(error)) < 1000


# ---------------------------------------------------------------- SQLite's file


def change(*statements: str) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        connection = sqlite3.connect(path)
        with connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    return attack


def forged(text: str) -> Callable[[Path], None]:
    """A record with the checksums that it should have: they keep nobody out."""
    checksum = chained_checksum("", JOB, text)

    def attack(path: Path) -> None:
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("DELETE FROM records")
            connection.execute("INSERT INTO records VALUES (1, ?, ?, ?)", (JOB, text, checksum))
            connection.execute("UPDATE heads SET number = 1, checksum = ?", (checksum,))
        connection.close()

    return attack


def owned_by(name: str) -> Callable[[Path], None]:
    return change(
        f"UPDATE meta SET value = '{name}', checksum = '{chained_checksum('', 'owner', name)}'"
        " WHERE key = 'owner'"
    )


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(forged(DEEP), id="nested"),
        pytest.param(forged(f'["{"9" * 10_000}", {"9" * 10_000}]'), id="huge number"),
        pytest.param(forged(json.dumps(["x" * 1_000_000, {}])), id="huge name"),
        pytest.param(forged('["GroupEstablished",{"generation":NaN}]'), id="NaN"),
        pytest.param(forged('["FromTheFuture",{}]'), id="unknown record"),
        pytest.param(owned_by(ESCAPE), id="escapes in the owner"),
        pytest.param(owned_by("x" * 1_000_000), id="huge owner"),
        pytest.param(
            change("CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END"), id="trigger"
        ),
        pytest.param(
            change("ALTER TABLE meta RENAME TO m", "CREATE VIEW meta AS SELECT * FROM m"), id="view"
        ),
        pytest.param(change(f'CREATE VIEW "{ESCAPE}" AS SELECT 1'), id="escapes in a view"),
    ],
)
def test_a_journal_that_an_enemy_wrote_is_refused_and_left_as_it_is(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    path = tmp_path / "journal"
    with Journal(path, owner=JOB) as journal:
        journal.append(JOB, [records.GroupEstablished(1)])
    attack(path)
    before = path.read_bytes()
    with pytest.raises(JournalError) as caught:
        Journal(path, owner=JOB)
    assert says_it_well(caught.value) and caught.value.remedy
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize(
    ("attack", "name", "without"),
    [
        (change(f'CREATE VIEW "{ESCAPE}" AS SELECT 1'), "one_line", str),
        (owned_by(ESCAPE), "one_line", str),
        (owned_by("x" * 1_000_000), "MAX_LINE", 1 << 30),
        (forged(json.dumps(["x" * 1_000_000, {}])), "MAX_LINE", 1 << 30),
    ],
    ids=["escapes in a view", "escapes in the owner", "huge owner", "huge name"],
)
def test_without_its_defence_the_refusal_is_no_line_for_a_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[Path], None],
    name: str,
    without: object,
) -> None:
    path = tmp_path / "journal"
    Journal(path, owner=JOB).close()
    attack(path)
    monkeypatch.setattr(sqlite_journal, name, without)
    with pytest.raises(JournalError) as caught:
        Journal(path, owner=JOB)
    assert not says_it_well(caught.value)


# ---------------------------------------------------------------- etcd's keys

HEADS, BATCHES = b"/muster/job/heads/", b"/muster/job/jobs/"


def one_batch(value: bytes, *, head: bytes = b"1 1") -> dict[bytes, bytes]:
    return {HEADS + b"j": head, BATCHES + b"j/" + b"%016d" % 1: value}


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param({HEADS + b"\xff\x1b": b"1 1"}, id="name that is no text"),
        pytest.param({HEADS + ESCAPE.encode() + b"/../\0": b"1 1"}, id="escapes in a name"),
        pytest.param({HEADS + b"x" * 100_000: b"1 1"}, id="huge name"),
        pytest.param({HEADS + b"j": b"\x1b" * 100_000}, id="huge head"),
        pytest.param({HEADS + b"j": b"1 " + b"9" * 4000}, id="head beyond all batches"),
        pytest.param({HEADS + b"j": b"1 -5"}, id="head before all batches"),
        pytest.param(one_batch(b""), id="empty"),
        pytest.param(one_batch(b"px"), id="no number of parts"),
        pytest.param(one_batch(b"z" + zlib.compress(b"[]")[:-3]), id="cut short"),
        pytest.param(one_batch(b"z" + zlib.compress(DEEP.encode())), id="nested"),
        pytest.param(one_batch(b"z" + zlib.compress(b"7")), id="no list"),
        pytest.param(one_batch(b"z" + zlib.compress(b'[["FromTheFuture",{}]]')), id="unknown record"),
        pytest.param(
            one_batch(b"z" + zlib.compress(json.dumps([["x" * 200_000, {}]]).encode())), id="huge record name"
        ),
        pytest.param(one_batch(b"z" + zlib.compress(b"[" + b" " * 1_000_000 + b"]")), id="swells"),
    ],
)
def test_keys_that_an_enemy_put_are_refused_and_left_as_they_are(
    planted: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_journal, "MAX_BATCH_BYTES", 300_000)

    async def test() -> None:
        rig = Rig()
        for key, value in planted.items():
            rig.store.pairs[key] = pb.KeyValue(key=key, value=value, mod_revision=1, create_revision=1)
        claim, _ = rig.process("one")
        await claim.campaign()
        with pytest.raises(EtcdJournalDamagedError) as caught:
            await EtcdJournal(claim).load()
        assert says_it_well(caught.value) and caught.value.remedy
        assert {key: rig.store.pairs[key].value for key in planted} == planted

    go(test())


def test_without_the_bound_a_batch_may_swell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes in etcd are a megabyte here, and might be many."""

    async def test() -> None:
        rig = Rig()
        for key, value in one_batch(b"z" + zlib.compress(b"[" + b" " * 1_000_000 + b"]")).items():
            rig.store.pairs[key] = pb.KeyValue(key=key, value=value, mod_revision=1, create_revision=1)
        claim, _ = rig.process("one")
        await claim.campaign()
        monkeypatch.setattr(etcd_journal, "MAX_BATCH_BYTES", 300_000)
        with pytest.raises(EtcdJournalDamagedError):
            await EtcdJournal(claim).load()
        monkeypatch.setattr(etcd_journal, "MAX_BATCH_BYTES", 1 << 30)
        await EtcdJournal(claim).load()

    go(test())
