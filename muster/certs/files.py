"""Reads files with a size limit; writes them atomically, and secrets for their owner only."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from muster.certs.errors import FileError
from muster.wire.files import beside, read_regular, readable_by_others, remove_left

LOG = logging.getLogger("muster.certs")

MAX_FILE_BYTES = 64 << 20


def read_file(path: str | os.PathLike[str], what: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Reads a whole file.

    Args:
        path: the file.
        what: a name for the file in errors, such as "the PKCS#12 file".
        limit: the largest allowed size in bytes.

    Raises:
        FileError: the file is missing, unreadable, not a regular file, or too large.
    """
    try:
        return read_regular(path, limit)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{what} {os.fspath(path)!r} cannot be read: {reason}.") from None


def read_secret(path: str | os.PathLike[str], what: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Reads a file with a key or a password; warns once per file if other users may read it.

    Raises:
        FileError: as :func:`read_file`.
    """
    data = read_file(path, what, limit=limit)
    exposed = readable_by_others(path)
    if exposed:
        _warn_once(f"{what[:1].upper()}{what[1:]} {exposed}: chmod 600 it.")
    return data


@contextlib.contextmanager
def unheard_warnings() -> Iterator[None]:
    """Context that suppresses this module's warnings; processes forked later log them again."""
    LOG.disabled = True
    try:
        yield
    finally:
        LOG.disabled = False
        _warn_once.cache_clear()


@functools.cache
def _warn_once(sentence: str) -> None:
    LOG.warning("%s", sentence)


def write_file(path: Path, data: bytes, *, mode: int = 0o600, replace: bool = True) -> None:
    """Writes a file atomically: to a temporary file beside it, which is synced and renamed.

    Args:
        path: the file.
        data: its content.
        mode: its permission bits, in force from the first byte.
        replace: False refuses to overwrite.

    Raises:
        FileError: the file exists and ``replace`` is False, or it cannot be written.
    """
    unfinished = beside(path)
    try:
        remove_left(path.parent)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), mode)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            if replace:
                unfinished.replace(path)
            else:
                path.hardlink_to(unfinished)
        finally:
            unfinished.unlink(missing_ok=True)
    except FileExistsError:
        raise FileError(
            f"{str(path)!r} exists already.", remedy="Choose another name, or pass --force."
        ) from None
    except OSError as error:
        raise FileError(f"{str(path)!r} cannot be written: {error.strerror}.") from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context that holds a lock of a directory; waits for other processes that hold it. Not reentrant.

    Changes that read a file before they replace it need it. The kernel releases the lock when a process dies.
    The empty file ``.lock`` is kept: if it were removed, a waiting process would lock a file that is gone.

    Raises:
        FileError: the directory cannot be written.
    """
    path = directory / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FileError(f"{str(path)!r} cannot be opened: {error.strerror}.") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise FileError(f"{str(path)!r} cannot be locked: {error.strerror}.") from None
        yield
    finally:
        os.close(descriptor)
