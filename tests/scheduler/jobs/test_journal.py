"""The journal: what was committed comes back; nothing wrong with the file goes unnoticed or changes it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.ledger import Ledger
from muster.scheduler.core.machine import Machine as Job
from muster.scheduler.core.records import RECORD_TYPES, RecordError, decode_record, encode_record
from muster.scheduler.errors import SchedulerError
from muster.scheduler.jobs import journal as journals
from muster.scheduler.jobs.journal import (
    Journal,
    JournalBusyError,
    JournalDamagedError,
    JournalError,
    JournalFullError,
    JournalOwnerError,
    JournalUnreadableError,
    JournalVersionError,
)
from muster.version import __version__
from muster.wire import messages
from tests.disks import filled, mounted_disk, small_disk

CANDIDATE = messages.Candidate(
    node_id="knoten-ü7",
    incarnation=(1 << 64) - 1,
    host=messages.Host("id-1", "alpha", "10.0.0.1", "rack 3"),
    device=messages.Device("cuda", 3, "0000:41:00.0", "H200"),
    worker_num=2,
    worker_min=1,
    backend="nccl",
    local_index=3,
    data_address="10.0.0.1:4000",
    spare=True,
    facts=(("nccl", "2.28.9"), ("muster", "0.1.0")),
)
RECORDS: tuple[records.Record, ...] = (
    records.JobOpened("default", 2, 1),
    records.Admitted(CANDIDATE),
    records.GenerationFormed(1, (records.Placed(0, 0, 1, CANDIDATE),), -1, (), "all are in"),
    records.GroupEstablished(1),
    records.LeavePlanned("knoten-ü7", 5, "drained"),
    records.DrainPlanned(1, 1_800_000_000.5, ("knoten-ü7",), ("gpu-17",), "new disks"),
    records.DrainOver(1),
    records.GpuRefused("GPU-1", CANDIDATE.host, "knoten-ü7", 3, "7 words differ"),
    records.GpuAdmitted("GPU-1"),
    records.Removed("knoten-ü7", 5, "left", finished=True),
    records.GenerationEnded(1, "too few"),
    records.JobEnded(False, "nobody came"),
    records.Snapshot(
        opened=(records.JobOpened("default", 2, 1),),
        claims=(records.Holder(CANDIDATE, 3, True, ("drained",)),),
        retired=(records.Process("n", 5, "lost"),),
        absent=(records.Process("m", 6),),
        formed=(),
        completed=(records.Process("l", 7),),
        lost=(("k", "killed"),),
        parted=("k",),
        arriving=(),
        finished=("l",),
        launch=(1 << 64) - 1,
        finishing=True,
        established=False,
        stood=2,
        suspended=("too few",),
    ),
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


def test_notes_beside_the_records_survive_and_are_read_while_a_scheduler_writes(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, owner="job") as journal:
        journal.note("audit/one", "1 ab")
        journal.note("audit/one", "2 cd")
        assert journals.notes_of(path) == {"audit/one": "2 cd"}
    with Journal(path, owner="job") as journal:
        assert journal.notes() == {"audit/one": "2 cd"}
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE meta SET value = '9 ef' WHERE key = 'note:audit/one'")
    assert journals.notes_of(path) == {}  # its checksum does not fit


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
        "from muster.scheduler.core import records\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in range(20):\n"
        "    journal.append('default', 2 * [records.GroupEstablished(number)])\n"
        "print('done', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "j")], capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.returncode) == ("done\n", -signal.SIGKILL)
    with Journal(tmp_path / "j") as journal:
        written = journal.load("default")
    assert written == [records.GroupEstablished(number) for number in range(20) for _ in range(2)]


def test_a_failed_append_leaves_nothing_of_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("default", RECORDS[:1])
        with pytest.raises(TypeError):
            journal.append("default", [RECORDS[1], object()])  # type: ignore[list-item]
        assert journal.load("default") == [RECORDS[0]]


@contextlib.contextmanager
def no_space(disk: str, folder: Path) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A folder on a disk, and what takes its space away."""
    if disk == "mounted":
        with mounted_disk(folder) as at:
            yield lambda: filled(at)
    else:
        folder.mkdir()
        yield lambda: small_disk(1000)


@pytest.mark.parametrize("disk", ["mounted", "limited"])
def test_what_finds_no_space_is_appended_once_when_there_is_some(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "COMPACT_RECORDS", 20)
    steps = generations(range(20))
    with no_space(disk, tmp_path / "disk") as taken:
        with Journal(tmp_path / "disk" / "j") as journal:
            for number, step in enumerate(steps):
                if number % 5 == 0:
                    with taken():
                        for _ in range(3):
                            with pytest.raises(JournalFullError, match="cannot be used"):
                                journal.append("default", step)
                journal.append("default", step)
        with Journal(tmp_path / "disk" / "j") as journal:
            assert folded(journal.load("default")) == folded(record for step in steps for record in step)


@pytest.mark.parametrize("disk", ["mounted", "limited"])
def test_a_start_that_finds_no_space_can_be_tried_again(disk: str, tmp_path: Path) -> None:
    path = tmp_path / "disk" / "j"
    with no_space(disk, tmp_path / "disk") as taken:
        with taken(), pytest.raises(JournalFullError):
            Journal(path)
        with Journal(path) as journal:
            journal.append("default", RECORDS[:1])
        set_writer(path, "0.1.9")  # which is noted, and takes a write
        with taken(), pytest.raises(JournalFullError):
            Journal(path)
        with Journal(path) as journal:
            assert journal.load("default") == [RECORDS[0]]


def test_records_are_not_refused_because_their_snapshot_finds_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would be appended twice."""
    monkeypatch.setattr(journals, "COMPACT_RECORDS", 81)
    *steps, last = [*generations(range(20)), [records.GenerationEnded(20, "x")]]
    refused = []
    with mounted_disk(tmp_path / "disk") as disk:
        for pages_left in range(0, 24, 2):
            path = disk / f"{pages_left}.j"
            with Journal(path) as journal:
                for step in steps:
                    journal.append("default", step)
                with filled(disk, 4096 * pages_left):
                    try:
                        journal.append("default", last)
                    except JournalFullError:
                        refused.append(pages_left)
                assert bool(journal.load("default")[-1] == last[0]) != (pages_left in refused)
            path.unlink()
    assert refused and len(refused) < 12


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
    ("later version", lambda p: change(p, "PRAGMA user_version = 3"), JournalVersionError, "version 3"),
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
        rows = [("default", "x" * 500, "0")] * 200
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


DRAIN = {"number": 1, "at_s": 2.0, "node_ids": [], "hosts": [], "reason": ""}
BAD_RECORDS: list[tuple[object, str]] = [
    (["GroupEstablished"], "pair"),
    (["Nonsense", {}], "unknown type"),
    (["GroupEstablished", {}], "exactly the fields"),
    (["GroupEstablished", {"generation": 1, "more": 2}], "exactly the fields"),
    (["GroupEstablished", {"generation": "1"}], "GroupEstablished.generation must be of type"),
    (["GroupEstablished", {"generation": True}], "not bool"),
    (["Admitted", {"candidate": encode_record(RECORDS[1])}], "Admitted.candidate must have"),
    (["DrainPlanned", {**DRAIN, "node_ids": "1"}], "DrainPlanned.node_ids must be a list, not str"),
    (["DrainPlanned", {**DRAIN, "node_ids": ["1", 2]}], r"DrainPlanned.node_ids\[1\] must be of type"),
]


@pytest.mark.parametrize(("value", "told"), BAD_RECORDS)
def test_a_record_that_does_not_fit_is_refused(value: object, told: str) -> None:
    with pytest.raises(RecordError, match=told):
        decode_record(value)


# ---------------------------------------------------------------- what checksums and snapshots are for


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, owner="default") as journal:
        journal.append("default", RECORDS)
        journal.append("other", RECORDS[:3])
    good = path.read_bytes()
    chance, refused = random.Random(5), 0
    places = [at for at, byte in enumerate(good) if byte] + chance.sample(range(len(good)), 50)
    for at in chance.sample(places, 120):
        path.write_bytes(good[:at] + bytes((good[at] ^ 1 << chance.randrange(8),)) + good[at + 1 :])
        try:
            with Journal(path, owner="default") as journal:
                assert journal.load("default") == list(RECORDS), at
                assert journal.load("other") == list(RECORDS[:3]), at
        except JournalError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM records WHERE number = 8",
        "DELETE FROM records WHERE number = 1",
        "DELETE FROM records",
        "UPDATE records SET number = 100 WHERE number = 3",
        "INSERT INTO records SELECT 100, job_id, record, checksum FROM records WHERE number = 2",
        "UPDATE meta SET value = 'another'",
    ],
)
def test_records_that_are_missing_moved_or_repeated_are_noticed(tmp_path: Path, harm: str) -> None:
    with Journal(tmp_path / "j", owner="default") as journal:
        journal.append("default", RECORDS[:8])
    change(tmp_path / "j", harm)
    with pytest.raises(JournalDamagedError):
        Journal(tmp_path / "j", owner="default")


def generations(numbers: range) -> list[list[records.Record]]:
    """A job in which node b is lost and replaced in every generation."""
    stays = CANDIDATE.replaced(node_id="a", incarnation=1)
    steps: list[list[records.Record]] = (
        [] if numbers.start else [[records.JobOpened("default", 2, 1), records.Admitted(stays)]]
    )
    for number in numbers:
        other = CANDIDATE.replaced(node_id="b", incarnation=100 + number)
        members = (records.Placed(0, 0, 1, stays), records.Placed(1, 0, 1, other))
        steps += [
            [records.Admitted(other), records.GenerationFormed(number + 1, members, 0, (1,), "replaced")],
            [records.GroupEstablished(number + 1)],
            [records.Removed("b", 100 + number, "killed")],
        ]
    return steps


def folded(records: Iterable[records.Record]) -> Ledger:
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger


def test_a_compacted_journal_says_the_same_in_fewer_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "COMPACT_RECORDS", 20)
    path, steps = tmp_path / "j", generations(range(60))
    with Journal(path) as journal:
        journal.append("other", RECORDS[:2])
        for step in steps[:120]:
            journal.append("default", step)
        assert folded(journal.load("default")) == folded(record for step in steps[:120] for record in step)
    size = path.stat().st_size
    with Journal(path) as journal:  # also after a restart
        for step in steps[120:]:
            journal.append("default", step)
        assert len(journal.load("default")) <= 25
        assert journal.load("other") == list(RECORDS[:2])
        assert folded(journal.load("default")) == folded(record for step in steps for record in step)
    assert path.stat().st_size < size + 20_000  # 20 generations are 40,000 bytes


def test_records_that_contradict_one_another_are_kept_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "COMPACT_RECORDS", 3)
    written = [records.Removed("nobody", number, "") for number in range(9)]
    with Journal(tmp_path / "j") as journal:
        for record in written:
            journal.append("default", [record])
        assert journal.load("default") == written


def test_every_ledger_comes_back_from_its_snapshot() -> None:
    ledger = Ledger()
    for step in generations(range(3)):
        for record in step:
            ledger.apply(record)
            again = Ledger()
            again.apply(decode_record(json.loads(json.dumps(encode_record(ledger.snapshot())))))
            assert again == ledger
    ledger.apply(records.LeavePlanned("a", 1, "drained"))
    ledger.apply(records.GenerationEnded(3, "too few"))
    ledger.apply(records.Removed("a", 1, "", finished=True))
    again = Ledger()
    again.apply(ledger.snapshot())
    assert again == ledger


def test_a_job_recovered_from_a_snapshot_is_the_same_job() -> None:
    steps = generations(range(3))[:-1]
    records = [record for step in steps for record in step]
    settings = events.CoreSettings(2, 1, 0, 60.0, 5.0, 1.0)
    jobs = [Job.recover("default", settings, kept, 1.0) for kept in (records, [folded(records).snapshot()])]
    views = [job.view(2.0) for job in jobs]
    assert views[0] == views[1]
    back = events.Joined(
        events.SessionId(7), CANDIDATE.replaced(node_id="a", incarnation=1), 3, 0, built=True
    )
    assert jobs[0].step(back, 2.0) == jobs[1].step(back, 2.0)
    assert jobs[0].step(events.Tick(), 30.0) == jobs[1].step(events.Tick(), 30.0)
    assert jobs[0].deadline() == jobs[1].deadline()


# ---------------------------------------------------------------- journals of other versions

GOLDEN = Path(__file__).parents[2] / "golden" / "journal-0.1.sqlite"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "scheduler-golden.sqlite"
    path.write_bytes(GOLDEN.read_bytes())
    return path


def test_a_journal_of_version_0_1_is_rewritten_and_kept(old: Path) -> None:
    with Journal(old, owner="golden") as journal:
        written = journal.load("golden")
        assert [type(record).__name__ for record in written] == [
            "JobOpened",
            "Admitted",
            "Admitted",
            "GenerationFormed",
            "GroupEstablished",
        ]
        formed = written[3]
        assert isinstance(formed, records.GenerationFormed)
        assert [(each.rank, each.candidate.node_id) for each in formed.members] == [(0, "0"), (1, "1")]
        journal.append("golden", [records.GenerationEnded(1, "too few")])
    assert old.with_name(f"{old.name}.format-1").read_bytes() == GOLDEN.read_bytes()
    with Journal(old, owner="golden") as again:
        assert again.load("golden") == [*written, records.GenerationEnded(1, "too few")]
        with pytest.raises(JournalBusyError):
            Journal(old, owner="golden")


def test_a_job_of_version_0_1_goes_on(old: Path) -> None:
    with Journal(old, owner="golden") as journal:
        settings = events.CoreSettings(2, 2, 0, 30.0, 5.0, 1.0)
        job = Job.recover("golden", settings, journal.load("golden"), now=10.0)
    assert (job.view(10.0).state, job.view(10.0).generation) == ("running", 1)


OLD_DAMAGE: list[tuple[str, Callable[[Path], object], type[JournalError], str]] = [
    (
        "text",
        lambda p: change(p, "UPDATE records SET record = 'x' WHERE number = 2"),
        JournalDamagedError,
        "sum",
    ),
    ("owner", lambda p: change(p, "UPDATE meta SET value = 'other'"), JournalOwnerError, "that of job other"),
    ("no owner", lambda p: change(p, "DELETE FROM meta"), JournalDamagedError, "whose"),
]


@pytest.mark.parametrize(
    ("harm", "error", "named"), [d[1:] for d in OLD_DAMAGE], ids=[d[0] for d in OLD_DAMAGE]
)
def test_a_damaged_journal_of_version_0_1_is_not_touched(
    old: Path, harm: Callable[[Path], object], error: type[JournalError], named: str
) -> None:
    harm(old)
    before = contents(old.parent)
    with pytest.raises(error, match=named):
        Journal(old, owner="golden")
    assert contents(old.parent) == before


def set_writer(path: Path, version: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'version'", (version,))


def test_a_journal_of_a_later_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    set_writer(tmp_path / "j", "99.0.0")
    before = contents(tmp_path)
    with pytest.raises(JournalVersionError, match=r"Muster 99\.0\.0 has written it"):
        Journal(tmp_path / "j")
    assert contents(tmp_path) == before


def test_a_journal_that_an_earlier_version_wrote_is_taken_over_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Journal(tmp_path / "j").close()
    set_writer(tmp_path / "j", "0.1.5")
    with caplog.at_level("INFO", "scheduler"):
        Journal(tmp_path / "j").close()
        Journal(tmp_path / "j").close()
    assert [record.getMessage() for record in caplog.records] == [
        f"journal {tmp_path / 'j'} was written by Muster 0.1.5; Muster {__version__} continues it"
    ]
