"""The journal: what was committed comes back; nothing wrong with the file goes unnoticed or changes it."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.scheduler.core import messages as v
from muster.scheduler.core import records as r
from muster.scheduler.core.records import RECORD_TYPES, RecordError, decode_record, encode_record
from muster.scheduler.errors import SchedulerError
from muster.scheduler.jobs.journal import (
    Journal,
    JournalBusyError,
    JournalDamagedError,
    JournalError,
    JournalOwnerError,
    JournalUnreadableError,
    JournalVersionError,
)

CANDIDATE = v.Candidate(
    node_id="knoten-ü7",
    incarnation=(1 << 64) - 1,
    host=v.Host("id-1", "alpha", "10.0.0.1", "rack 3"),
    device=v.Device("cuda", 3, "0000:41:00.0", "H200"),
    worker_num=2,
    worker_min=1,
    backend="nccl",
    local_index=3,
    data_address="10.0.0.1:4000",
    spare=True,
    facts=(("nccl", "2.28.9"), ("muster", "0.1.0")),
)
RECORDS: tuple[r.Record, ...] = (
    r.JobOpened("default", 2, 1),
    r.Admitted(CANDIDATE),
    r.GenerationFormed(1, (v.Member(0, 0, 1, CANDIDATE),), -1, (), "all are in"),
    r.GroupEstablished(1),
    r.LeavePlanned("knoten-ü7", 5, "drained"),
    r.Removed("knoten-ü7", 5, "left", finished=True),
    r.GenerationEnded(1, "too few"),
    r.JobEnded(False, "nobody came"),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_kind_of_record_comes_back_equal_and_in_order(tmp_path: Path) -> None:
    assert {type(record).__name__ for record in RECORDS} == set(RECORD_TYPES)
    with Journal(tmp_path / "j") as journal:
        journal.append("default", RECORDS[:3])
        journal.append("other", RECORDS[:1])
        journal.append("default", RECORDS[3:])
    with Journal(tmp_path / "j") as journal:
        assert journal.job_ids() == ["default", "other"]
        assert journal.load("default") == list(RECORDS)
        assert journal.load("other") == [RECORDS[0]]


def test_a_new_journal_is_empty_and_closed_to_others(tmp_path: Path) -> None:
    with Journal(tmp_path / "folder" / "j") as journal:
        assert journal.job_ids() == [] and journal.load("default") == []
        assert (tmp_path / "folder" / "j").stat().st_mode & 0o077 == 0
        assert [p.name for p in (tmp_path / "folder").iterdir() if p.name.startswith(".")] == []


def test_forget_drops_one_job(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("a", RECORDS[:2])
        journal.append("b", RECORDS[:1])
        journal.forget("a")
        assert journal.job_ids() == ["b"] and journal.load("a") == []


def test_what_append_returned_for_survives_a_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from muster.scheduler.jobs.journal import Journal\n"
        "from muster.scheduler.core import records as r\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in range(20):\n"
        "    journal.append('default', [r.GroupEstablished(number), r.GroupEstablished(number)])\n"
        "print('done', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "j")], capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.returncode) == ("done\n", -signal.SIGKILL)
    with Journal(tmp_path / "j") as journal:
        records = journal.load("default")
    assert records == [r.GroupEstablished(number) for number in range(20) for _ in range(2)]


def test_a_failed_append_leaves_nothing_of_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("default", RECORDS[:1])
        with pytest.raises(TypeError):
            journal.append("default", [RECORDS[1], object()])  # type: ignore[list-item]
        assert journal.load("default") == [RECORDS[0]]


def test_a_second_scheduler_is_turned_away_and_the_first_goes_on(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        with pytest.raises(JournalBusyError, match="another scheduler has it open"):
            Journal(tmp_path / "j")
        journal.append("default", RECORDS[:1])
        assert journal.load("default") == [RECORDS[0]]


def test_the_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j", owner="red").close()
    with pytest.raises(JournalOwnerError, match="that of job red, not of job blue"):
        Journal(tmp_path / "j", owner="blue")
    Journal(tmp_path / "j", owner="red").close()


def change(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


def flip_in_text(path: Path) -> None:
    data = path.read_bytes()
    at = data.rindex(b"nobody came")
    path.write_bytes(data[:at] + b"somebody ca" + data[at + 11 :])


DAMAGE: list[tuple[str, Callable[[Path], object], type[JournalError], str]] = [
    ("empty", lambda p: p.write_bytes(b""), JournalDamagedError, "not an SQLite file"),
    ("text", lambda p: p.write_text("hello" * 100), JournalDamagedError, "not an SQLite file"),
    ("cut", lambda p: p.write_bytes(p.read_bytes()[:5000]), JournalDamagedError, "damaged"),
    (
        "garbled page",
        lambda p: p.write_bytes(p.read_bytes()[:4096] + b"\xa5" * (p.stat().st_size - 4096)),
        JournalDamagedError,
        "damaged",
    ),
    ("flipped letters", flip_in_text, JournalDamagedError, "checksum"),
    (
        "foreign database",
        lambda p: change(p, "PRAGMA application_id = 7"),
        JournalDamagedError,
        "not a journal of Muster",
    ),
    ("later version", lambda p: change(p, "PRAGMA user_version = 2"), JournalVersionError, "version 2"),
    ("no owner", lambda p: change(p, "DELETE FROM meta"), JournalDamagedError, "whose"),
    ("no table", lambda p: change(p, "DROP TABLE meta"), JournalError, "no such table"),
]


@pytest.mark.parametrize(("harm", "error", "told"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_a_damaged_file_is_named_and_not_touched(
    tmp_path: Path, harm: Callable[[Path], object], error: type[JournalError], told: str
) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.append("default", RECORDS)
    harm(path)
    before = contents(tmp_path)
    with pytest.raises(error, match=told) as caught:
        Journal(path)
    assert contents(tmp_path) == before
    assert str(path) in str(caught.value) and caught.value.remedy
    assert isinstance(caught.value, SchedulerError)


def test_a_commit_that_a_crash_cut_short_is_as_if_it_had_never_begun(tmp_path: Path) -> None:
    path, crashed = tmp_path / "j", tmp_path / "crashed"
    with Journal(path) as journal:
        journal.append("default", RECORDS[:1])
    crashed.mkdir()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as half_done:
        half_done.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
        half_done.execute("BEGIN")
        rows = [("default", "x" * 500, 0)] * 200
        half_done.executemany("INSERT INTO records (job_id, record, checksum) VALUES (?, ?, ?)", rows)
        for name in ("j", "j-journal"):
            (crashed / name).write_bytes((tmp_path / name).read_bytes())
        assert len((crashed / "j").read_bytes()) > 200 * 500
    with Journal(crashed / "j") as recovered:
        assert recovered.load("default") == [RECORDS[0]]


def test_what_was_committed_lies_in_the_one_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("default", RECORDS)
        (tmp_path / "copy").write_bytes((tmp_path / "j").read_bytes())
    with Journal(tmp_path / "copy") as copy:
        assert copy.load("default") == list(RECORDS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    (tmp_path / "j").chmod(0)
    with pytest.raises(JournalUnreadableError, match="Permission denied"):
        Journal(tmp_path / "j")


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalUnreadableError, match="directory"):
        Journal(tmp_path)


BAD_RECORDS: list[tuple[object, str]] = [
    (["GroupEstablished"], "pair"),
    (["Nonsense", {}], "unknown type"),
    (["GroupEstablished", {}], "exactly the fields"),
    (["GroupEstablished", {"generation": 1, "more": 2}], "exactly the fields"),
    (["GroupEstablished", {"generation": "1"}], "GroupEstablished.generation must be of type"),
    (["GroupEstablished", {"generation": True}], "not bool"),
    (["Admitted", {"candidate": encode_record(RECORDS[1])}], "Admitted.candidate must have"),
]


@pytest.mark.parametrize(("value", "told"), BAD_RECORDS)
def test_a_record_that_does_not_fit_is_refused(value: object, told: str) -> None:
    with pytest.raises(RecordError, match=told):
        decode_record(value)
