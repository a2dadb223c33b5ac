"""The journal: what must survive a restart of the scheduler, in one SQLite file.

Every call of :meth:`Journal.append` is one transaction, on the disk when it returns (``synchronous=FULL``).
A scheduler killed between two commits finds exactly the commits that returned (and perhaps the one under
way, whole). SQLite's rollback journal is used, not its write-ahead log: what was committed lies in the file
itself, where damage shows, while a damaged log is passed over without a word, and its commits with it.

The file is opened exclusively, so that two schedulers never write one journal. Whatever is wrong with it is
found before anything is written: the checks run on a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from muster.scheduler.core.records import Record, RecordError, decode_record, encode_record
from muster.scheduler.errors import SchedulerError

APPLICATION_ID = 0x4D757374
"""Marks the file as a Muster journal (SQLite's application_id): "Must" in ASCII."""

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL,
    record TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
"""


class JournalError(SchedulerError):
    """The journal cannot be used; nothing in it was changed.

    Attributes:
        path: the journal's file.
        what: what is wrong.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self.path = path
        self.what = what
        super().__init__(f"Journal {path}: {what}.", remedy=remedy)


class JournalUnreadableError(JournalError):
    """The file cannot be opened, read or written."""


class JournalBusyError(JournalError):
    """Another scheduler has the journal open."""


class JournalDamagedError(JournalError):
    """The file is no journal, or its content is damaged."""


class JournalVersionError(JournalError):
    """The journal was written by another version of its format."""


class JournalOwnerError(JournalError):
    """The journal is that of another scheduler's job."""


class Journal:
    """Records of jobs, durable. May be used from any thread, by one at a time.

    Args:
        path: the file; made (with its folder, readable by this user only) if it is not there.
        owner: job id of the scheduler that keeps it; "" leaves it unchecked.

    Raises:
        JournalError: the file is not usable; nothing in it was changed.
    """

    def __init__(self, path: Path | str, *, owner: str = "") -> None:
        self.path = Path(path)
        with self._as_journal_errors():
            if not self.path.exists():
                self._create(owner)
            self._lock = self._take_lock()
            try:
                self._inspect(owner)
                self._connection = self._open()
            except BaseException:
                os.close(self._lock)
                raise

    def append(self, job_id: str, records: Sequence[Record]) -> None:
        """Writes records down in one commit; they survive a crash once this returns.

        Raises:
            JournalError: nothing of them was written (disk full, say).
        """
        rows = [_row(job_id, record) for record in records]
        with self._as_journal_errors(), self._transaction() as connection:
            connection.executemany("INSERT INTO records (job_id, record, checksum) VALUES (?, ?, ?)", rows)

    def load(self, job_id: str) -> list[Record]:
        """All records of a job, in the order in which they were appended.

        Raises:
            JournalError: a record is damaged.
        """
        with self._as_journal_errors():
            return self._read(self._connection).get(job_id, [])

    def job_ids(self) -> list[str]:
        """The jobs that have records, oldest first."""
        with self._as_journal_errors():
            return list(self._read(self._connection))

    def forget(self, job_id: str) -> None:
        """Drops all records of a job, so that a job of that name can begin anew."""
        with self._as_journal_errors(), self._transaction() as connection:
            connection.execute("DELETE FROM records WHERE job_id = ?", (job_id,))

    def close(self) -> None:
        """Closes the file; the journal cannot be used any more."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Journal:
        """Returns itself, to be closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the file."""
        self.close()

    # ------------------------------------------------------------ opening

    def _create(self, owner: str) -> None:
        """Makes an empty journal beside the path and moves it there, so that none is ever half made."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        os.close(handle)
        try:
            connection = sqlite3.connect(name, isolation_level=None)
            with contextlib.closing(connection):
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.executescript(_SCHEMA)
                connection.execute("INSERT INTO meta VALUES ('owner', ?)", (owner,))
            os.link(name, self.path)
        except FileExistsError:
            pass  # another scheduler was faster; the lock decides between the two
        finally:
            Path(name).unlink()
        self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_lock(self) -> int:
        # Held until close(): closing any descriptor of the file would drop SQLite's own locks.
        lock = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise JournalBusyError(
                self.path,
                "another scheduler has it open",
                "Stop that scheduler, or give this one another MS_RECOVERY_PATH.",
            ) from None
        return lock

    def _inspect(self, owner: str) -> None:
        """Checks a copy of the journal, as SQLite would change the original by merely closing it."""
        self._check_header()
        with tempfile.TemporaryDirectory(prefix="muster-journal-") as folder:
            copy = Path(folder) / "copy"
            shutil.copyfile(self.path, copy)
            rollback = self.path.with_name(f"{self.path.name}-journal")
            if rollback.exists():
                shutil.copyfile(rollback, copy.with_name("copy-journal"))
            with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
                faults = [row[0] for row in connection.execute("PRAGMA integrity_check")]
                if faults != ["ok"]:
                    raise self._damaged(str(faults[0]))
                self._check_owner(connection, owner)
                self._read(connection)

    def _check_header(self) -> None:
        with self.path.open("rb") as file:
            header = file.read(100)
        if len(header) < 100 or header[:16] != b"SQLite format 3\0":
            raise self._damaged("it is not an SQLite file")
        if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
            raise self._damaged("it is an SQLite file, but not a journal of Muster")
        version = int.from_bytes(header[60:64], "big")
        if version != SCHEMA_VERSION:
            raise JournalVersionError(
                self.path,
                f"its format is version {version}, this scheduler reads version {SCHEMA_VERSION}",
                "Run the version of Muster that wrote it, or choose another MS_RECOVERY_PATH.",
            )

    def _check_owner(self, connection: sqlite3.Connection, owner: str) -> None:
        row = connection.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
        if row is None:
            raise self._damaged("it does not say whose it is")
        if owner and row[0] and row[0] != owner:
            raise JournalOwnerError(
                self.path,
                f"it is that of job {row[0]}, not of job {owner}",
                "Set MS_JOB_ID to that job, or give this one another MS_RECOVERY_PATH.",
            )

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=0, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    # ------------------------------------------------------------ reading and writing

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _read(self, connection: sqlite3.Connection) -> dict[str, list[Record]]:
        jobs: dict[str, list[Record]] = {}
        rows = connection.execute("SELECT number, job_id, record, checksum FROM records ORDER BY number")
        for number, job_id, text, checksum in rows:
            if _checksum(job_id, text) != checksum:
                raise self._damaged(f"record {number} does not match its checksum")
            try:
                jobs.setdefault(job_id, []).append(decode_record(json.loads(text)))
            except (RecordError, ValueError) as error:
                raise self._damaged(f"record {number}: {error}") from error
        return jobs

    def _damaged(self, what: str) -> JournalDamagedError:
        return JournalDamagedError(
            self.path,
            f"damaged or foreign: {what}",
            "Restore it from a backup, or move it away and start the job anew.",
        )

    @contextlib.contextmanager
    def _as_journal_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise self._unreadable(str(error)) from error
            raise self._damaged(str(error)) from error
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error

    def _unreadable(self, what: str) -> JournalUnreadableError:
        return JournalUnreadableError(
            self.path,
            f"cannot be used: {what}",
            "See to permissions and free space, or choose another MS_RECOVERY_PATH.",
        )


def _row(job_id: str, record: Record) -> tuple[str, str, int]:
    text = json.dumps(encode_record(record), separators=(",", ":"), ensure_ascii=False)
    return job_id, text, _checksum(job_id, text)


def _checksum(job_id: str, text: str) -> int:
    return zlib.crc32(f"{job_id}\0{text}".encode())
