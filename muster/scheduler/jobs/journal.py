"""The journal: the records of all jobs in one SQLite file, from which a scheduler restarts.

Every call of :meth:`Journal.append` is one transaction, which is on the disk when the call returns
(``synchronous=FULL``). A scheduler that restarts after being killed finds exactly the commits that returned,
and perhaps the complete commit that was in progress. SQLite's rollback journal is used, not its write-ahead
log: commits are then in the file itself, where damage is detected. SQLite would silently ignore a damaged
write-ahead log and lose its commits.

Each record's checksum covers the records before it, and the last checksum of a job is stored separately, so
that a changed, moved, repeated or lost record is detected. After :data:`COMPACT_RECORDS` records of a job, a
snapshot of the ledger replaces them.

A journal of version 0.1 (format 1) is rewritten when it is opened; the old file is kept next to it.

The file is locked exclusively, so that two schedulers never write to one journal. All checks run on a copy
before anything is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from muster.scheduler.core.ledger import Ledger
from muster.scheduler.core.records import Record, RecordError, decode_record, encode_record
from muster.scheduler.errors import NoSpaceError, SchedulerError
from muster.version import __version__
from muster.wire.files import beside, open_regular, remove_left
from muster.wire.log_lines import MAX_LINE, one_line
from muster.wire.messages import BEFORE_VERSIONS, is_later_series
from muster.wire.threads import Pool

LOG = logging.getLogger("scheduler")
P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_ID = 0x4D757374
"""Marks the file as a Muster journal (SQLite's application_id): "Must" in ASCII."""

SCHEMA_VERSION = 2
OLD_VERSION = 1
"""The format of version 0.1: the same records, each with its own CRC-32."""

COMPACT_RECORDS = 256
"""The number of a job's records after which one snapshot replaces them."""

PROBE_BYTES = 64 * 1024
"""Bytes that are written to test whether there is space; more than SQLite needs for a few records."""

_NOTE = "note:"
"""Prefix of a note's key, which distinguishes it from the keys of owner and version."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL,
    record TEXT NOT NULL,
    checksum TEXT NOT NULL
);
CREATE TABLE heads (
    job_id TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    checksum TEXT NOT NULL
) WITHOUT ROWID;
"""


class JournalError(SchedulerError):
    """The journal cannot be used; nothing in it was changed.

    Attributes:
        path: the journal's file.
        what: the problem.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self.path = path
        self.what = what
        super().__init__(f"Journal {path}: {one_line(what[:MAX_LINE])}.", remedy=remedy)


class JournalUnreadableError(JournalError):
    """The file cannot be opened, read or written."""


class JournalFullError(JournalUnreadableError, NoSpaceError):
    """The disk or a quota is full; nothing was written."""


class JournalBusyError(JournalError):
    """Another scheduler has the journal open."""


class JournalDamagedError(JournalError):
    """The file is not a journal, or its content is damaged."""


class JournalVersionError(JournalError):
    """The journal was written in another version of its format."""


class JournalOwnerError(JournalError):
    """The journal belongs to another scheduler's job."""


class Files(Protocol):
    """The blocking journal that :class:`InThread` runs."""

    def append(self, job_id: str, records: Sequence[Record]) -> None:
        """Makes records durable, all or none."""

    def load(self, job_id: str) -> Sequence[Record]:
        """Reads all records of a job, oldest first."""

    def job_ids(self) -> Sequence[str]:
        """The jobs that have records."""

    def forget(self, job_id: str) -> None:
        """Deletes a job's records."""

    def notes(self) -> Mapping[str, str]:
        """The notes stored next to the records, by name."""

    def note(self, name: str, text: str) -> None:
        """Stores a text under a name."""

    def close(self) -> None:
        """Closes the files."""


class InThread:
    """Runs a blocking journal in a separate thread.

    Args:
        open_files: opens the journal, in that thread.
    """

    def __init__(self, open_files: Callable[[], Files]) -> None:
        self._open_files = open_files
        self._files: Files | None = None
        self._thread = Pool(1, "journal")

    async def load(self) -> Mapping[str, Sequence[Record]]:
        """See :class:`muster.scheduler.jobs.storage.Storage`."""
        if self._files is None:
            self._files = await self._run(self._open_files)
        files = self._files
        return {job_id: await self._run(files.load, job_id) for job_id in await self._run(files.job_ids)}

    async def append(self, job_id: str, records: Sequence[Record]) -> None:
        """See :class:`muster.scheduler.jobs.storage.Storage`."""
        if records:
            assert self._files is not None
            await self._run(self._files.append, job_id, records)

    async def forget(self, job_id: str) -> None:
        """See :class:`muster.scheduler.jobs.storage.Storage`."""
        assert self._files is not None
        await self._run(self._files.forget, job_id)

    async def notes(self) -> Mapping[str, str]:
        """See :class:`muster.scheduler.jobs.storage.Storage`."""
        assert self._files is not None
        return await self._run(self._files.notes)

    async def note(self, name: str, text: str) -> None:
        """See :class:`muster.scheduler.jobs.storage.Storage`."""
        assert self._files is not None
        await self._run(self._files.note, name, text)

    async def close(self) -> None:
        """See :class:`muster.scheduler.jobs.storage.Storage`."""
        if self._files is not None:
            self._thread.submit(self._files.close)
        self._thread.shutdown(wait=True)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Durable records of jobs. May be used from any thread, but only from one thread at a time.

    Args:
        path: the file. If it does not exist, it is created together with its folder, which only this user
            can read.
        owner: the job id of the scheduler that keeps the journal; "" to skip the check of the owner.

    Raises:
        JournalError: the file cannot be used; nothing in it was changed.
    """

    def __init__(self, path: Path | str, *, owner: str = "") -> None:
        self.path = Path(path)
        with self._as_journal_errors():
            if not self.path.exists():
                self._create(owner)
            self._lock = self._take_lock()
            try:
                remove_left(self.path.parent)
                if self._version() == OLD_VERSION:
                    self._upgrade(owner)
                self._inspect(owner)
                self._connection = self._open()
                try:
                    self._note_version()
                    kept = self._read(self._connection)
                except BaseException:
                    self._connection.close()
                    raise
                self._appended = {job_id: len(records) for job_id, records in kept.items()}
            except BaseException:
                os.close(self._lock)
                raise

    def append(self, job_id: str, records: Sequence[Record]) -> None:
        """Writes records in one commit. They survive a crash once this returns.

        Raises:
            JournalFullError: there is no space, and nothing was written. The records may be appended again
                when there is space.
            JournalError: writing failed, and nothing was written.
        """
        texts = [_text(record) for record in records]
        with self._as_journal_errors():
            with self._transaction() as connection:
                _insert(connection, job_id, texts)
            self._appended[job_id] = self._appended.get(job_id, 0) + len(texts)
        if self._appended[job_id] >= COMPACT_RECORDS:
            with contextlib.suppress(JournalFullError), self._as_journal_errors():
                self._compact(job_id)  # If this fails for lack of space, the next append tries again.

    def load(self, job_id: str) -> list[Record]:
        """Reads all records of a job, in the order in which they were appended.

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
        """Deletes all records of a job, so that a job of that name can start again."""
        with self._as_journal_errors(), self._transaction() as connection:
            _delete(connection, job_id)
        self._appended.pop(job_id, None)

    def notes(self) -> dict[str, str]:
        """The notes stored next to the records, by name."""
        with self._as_journal_errors():
            return _notes(self._connection)

    def note(self, name: str, text: str) -> None:
        """Stores a text under a name, replacing the previous text. It survives a crash once this returns.

        Raises:
            JournalError: the note could not be written.
        """
        key = f"{_NOTE}{name}"
        row = (key, text, chained_checksum("", key, text))
        with self._as_journal_errors(), self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", row)

    def close(self) -> None:
        """Closes the file; the journal cannot be used any more."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()

    # ------------------------------------------------------------ opening

    def _create(self, owner: str) -> None:
        """Creates an empty journal unless another scheduler has created one; the lock decides who uses it."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError), self._made(owner, {}, __version__) as name:
            os.link(name, self.path)
        self._sync_folder()

    @contextlib.contextmanager
    def _made(self, owner: str, texts: Mapping[str, Sequence[str]], version: str) -> Iterator[Path]:
        """Writes a complete journal under a temporary name; the caller then links or moves it into place."""
        name = beside(self.path)
        os.close(open_regular(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        try:
            connection = sqlite3.connect(name, isolation_level=None)
            with contextlib.closing(connection):
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.executescript(_SCHEMA)
                meta = {"owner": owner, "version": version}
                rows = [(key, value, chained_checksum("", key, value)) for key, value in meta.items()]
                connection.executemany("INSERT INTO meta VALUES (?, ?, ?)", rows)
                for job_id, kept in texts.items():
                    _insert(connection, job_id, kept)
            yield name
        finally:
            name.unlink(missing_ok=True)

    def _upgrade(self, owner: str) -> None:
        """Replaces a journal of version 0.1 with one of the present format; keeps the old file beside it."""
        with self._copy() as connection:
            [whose] = connection.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone() or (None,)
            self._check_whose(whose, owner)
            texts = self._old_texts(connection)
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")  # Rolls back what a killed scheduler had begun.
            connection.execute("COMMIT")
        kept = self.path.with_name(f"{self.path.name}.format-{OLD_VERSION}")
        kept.unlink(missing_ok=True)
        os.link(self.path, kept)
        with self._made(str(whose), texts, BEFORE_VERSIONS) as name:
            name.replace(self.path)
            self._sync_folder()
        old, self._lock = self._lock, self._take_lock()
        os.close(old)

    def _old_texts(self, connection: sqlite3.Connection) -> dict[str, list[str]]:
        """The records of a journal of version 0.1, as text, by job."""
        texts: dict[str, list[str]] = {}
        rows = connection.execute("SELECT number, job_id, record, checksum FROM records ORDER BY number")
        for number, job_id, text, checksum in rows:
            if zlib.crc32(f"{job_id}\0{text}".encode()) != checksum:
                raise self._damaged(f"record {number} does not match its checksum")
            self._decoded(number, str(text))
            texts.setdefault(job_id, []).append(str(text))
        return texts

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_lock(self) -> int:
        # The descriptor stays open until close(), because closing any descriptor drops SQLite's own locks.
        lock = open_regular(self.path, os.O_RDWR)
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
        """Checks a copy of the journal, because SQLite would change the original by merely closing it."""
        with self._copy() as connection:
            self._check_objects(connection)
            self._check_owner(connection, owner)
            self._check_writer(_writer(connection))
            self._read(connection)

    @contextlib.contextmanager
    def _copy(self) -> Iterator[sqlite3.Connection]:
        """Copies the journal, checks the pages of the copy, and lends a connection to it."""
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
                yield connection

    def _version(self) -> int:
        with self.path.open("rb") as file:
            return int.from_bytes(file.read(64)[60:], "big")

    def _check_header(self) -> None:
        with self.path.open("rb") as file:
            header = file.read(100)
        if len(header) < 100 or header[:16] != b"SQLite format 3\0":
            raise self._damaged("it is not an SQLite file")
        if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
            raise self._damaged("it is an SQLite file, but not a journal of Muster")
        version = int.from_bytes(header[60:64], "big")
        if version not in (OLD_VERSION, SCHEMA_VERSION):
            raise JournalVersionError(
                self.path,
                f"its format is version {version}, this scheduler reads version {SCHEMA_VERSION}",
                "Run the version of Muster that wrote it, or choose another MS_RECOVERY_PATH.",
            )

    def _check_objects(self, connection: sqlite3.Connection) -> None:
        """Refuses triggers, which would act when records are written, and views, which replace tables."""
        query = "SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view') LIMIT 1"
        for kind, name in connection.execute(query):
            raise self._damaged(f"it has a {kind}, {str(name)[:80]}")

    def _check_owner(self, connection: sqlite3.Connection, owner: str) -> None:
        row = connection.execute("SELECT value, checksum FROM meta WHERE key = 'owner'").fetchone()
        if row is not None and row[1] != chained_checksum("", "owner", str(row[0])):
            raise self._damaged("its owner's name does not match its checksum")
        self._check_whose(row[0] if row is not None else None, owner)

    def _check_writer(self, version: str) -> None:
        """Refuses a journal written by a later version, whose records this version may not understand."""
        if is_later_series(version, __version__):
            raise JournalVersionError(
                self.path,
                f"Muster {version} has written it, and this scheduler is of version {__version__}",
                "Run that version or a later one, or choose another MS_RECOVERY_PATH.",
            )

    def _note_version(self) -> None:
        """Records the version that writes from now on; logs if another version wrote the journal before."""
        before = _writer(self._connection)
        if before != __version__:
            if before:
                LOG.info(
                    "journal %s was written by Muster %s; Muster %s continues it",
                    self.path,
                    before,
                    __version__,
                )
            row = ("version", __version__, chained_checksum("", "version", __version__))
            with self._transaction() as connection:
                connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", row)

    def _check_whose(self, whose: str | None, owner: str) -> None:
        if whose is None:
            raise self._damaged("it does not say whose it is")
        if owner and whose and whose != owner:
            raise JournalOwnerError(
                self.path,
                f"it is that of job {whose}, not of job {owner}",
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
        heads: dict[str, tuple[int, str]] = {}
        rows = connection.execute("SELECT number, job_id, record, checksum FROM records ORDER BY number")
        for number, job_id, text, checksum in rows:
            count, before = heads.get(job_id, (0, ""))
            if chained_checksum(before, job_id, str(text)) != checksum:
                raise self._damaged(f"record {number} does not match its checksum")
            heads[job_id] = count + 1, checksum
            jobs.setdefault(job_id, []).append(self._decoded(number, str(text)))
        if not heads_agree(connection, heads):
            raise self._damaged("records at its end are missing")
        return jobs

    def _decoded(self, number: int, text: str) -> Record:
        try:
            return decode_record(json.loads(text))
        except (RecordError, ValueError, RecursionError) as error:
            raise self._damaged(f"record {number}: {error}") from error

    def _compact(self, job_id: str) -> None:
        """Replaces a job's records with one snapshot, if they are valid and the generation is established."""
        ledger = Ledger()
        try:
            for record in self._read(self._connection)[job_id]:
                ledger.apply(record)
        except (KeyError, AttributeError, TypeError):
            self._appended[job_id] = 0
            return  # The records are kept, so that recovery can report what is wrong with them.
        if ledger.established and ledger.outcome is None:
            with self._transaction() as connection:
                _delete(connection, job_id)
                _insert(connection, job_id, [_text(ledger.snapshot())])
        self._appended[job_id] = 0

    def _damaged(self, what: str) -> JournalDamagedError:
        return JournalDamagedError(
            self.path,
            f"damaged or foreign: {what}",
            "Restore it from a backup, or move it away and start the job again.",
        )

    @contextlib.contextmanager
    def _as_journal_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise self._unreadable(str(error), full=self._is_full(error)) from error
            raise self._damaged(str(error)) from error
        except UnicodeDecodeError as error:  # SQLite's message about a damaged schema may not be UTF-8.
            raise self._damaged("a part of it that is text is not UTF-8") from error
        except OSError as error:
            raise self._unreadable(error.strerror or str(error), full=error.errno in _NO_SPACE) from error

    def _is_full(self, error: sqlite3.OperationalError) -> bool:
        """Whether the error means that the disk is full.

        If a quota is reached, SQLite only says that writing failed, so a test file is written then.
        """
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            return code == sqlite3.SQLITE_FULL
        name = beside(self.path)
        try:
            probe = open_regular(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                left = PROBE_BYTES
                while left:
                    left -= os.write(probe, bytes(left))
                os.fsync(probe)
            finally:
                os.close(probe)
                name.unlink(missing_ok=True)
        except OSError as obstacle:
            return obstacle.errno in _NO_SPACE
        return False

    def _unreadable(self, what: str, *, full: bool = False) -> JournalUnreadableError:
        kind = JournalFullError if full else JournalUnreadableError
        return kind(
            self.path,
            f"cannot be used: {what}",
            "Make space on its disk."
            if full
            else "See to permissions and free space, or choose another MS_RECOVERY_PATH.",
        )


def notes_of(path: Path) -> dict[str, str]:
    """Reads a journal's notes from a copy, so that this also works while a scheduler has the journal open.

    Raises:
        OSError: the file cannot be read.
        sqlite3.Error: the file is not a journal.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "journal.sqlite"
        shutil.copyfile(path, copy)
        hot = path.with_name(f"{path.name}-journal")
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(hot, copy.with_name(f"{copy.name}-journal"))
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            return _notes(connection)


def _notes(connection: sqlite3.Connection) -> dict[str, str]:
    rows = connection.execute("SELECT key, value, checksum FROM meta WHERE key LIKE ?", (f"{_NOTE}%",))
    return {
        key.removeprefix(_NOTE): value
        for key, value, checksum in rows
        if checksum == chained_checksum("", key, value)
    }


def _writer(connection: sqlite3.Connection) -> str:
    """The version of Muster that last wrote a journal; empty if the journal does not say."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
    return str(row[0]) if row is not None else ""


def _text(record: Record) -> str:
    return json.dumps(encode_record(record), separators=(",", ":"), ensure_ascii=False)


def _insert(connection: sqlite3.Connection, job_id: str, texts: Sequence[str]) -> None:
    head = connection.execute("SELECT number, checksum FROM heads WHERE job_id = ?", (job_id,)).fetchone()
    count, checksum = head or (0, "")
    rows = []
    for text in texts:
        count, checksum = count + 1, chained_checksum(checksum, job_id, text)
        rows.append((job_id, text, checksum))
    connection.executemany("INSERT INTO records (job_id, record, checksum) VALUES (?, ?, ?)", rows)
    connection.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", (job_id, count, checksum))


def heads_agree(connection: sqlite3.Connection, heads: dict[str, tuple[int, str]]) -> bool:
    """Whether each job's number of records and last checksum match those stored in ``heads``."""
    kept = connection.execute("SELECT job_id, number, checksum FROM heads")
    return heads == {job_id: (number, checksum) for job_id, number, checksum in kept}


def _delete(connection: sqlite3.Connection, job_id: str) -> None:
    connection.execute("DELETE FROM records WHERE job_id = ?", (job_id,))
    connection.execute("DELETE FROM heads WHERE job_id = ?", (job_id,))


def chained_checksum(before: str, job_id: str, text: str) -> str:
    """The checksum of a record together with the previous checksum."""
    return hashlib.blake2b("\0".join((before, job_id, text)).encode(), digest_size=8).hexdigest()
