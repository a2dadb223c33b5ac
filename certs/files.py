"""Reading with a bound, and writing so that a reader never sees half a file and a stranger none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from muster.certs.errors import FileError

MAX_FILE_BYTES = 64 << 20


def read_file(path: str | os.PathLike[str], what: str, *, limit: int = MAX_FILE_BYTES) -> bytes:
    """Reads a whole file.

    Args:
        path: the file.
        what: what it should be, for messages ("the PKCS#12 file").
        limit: the most bytes it may have.

    Raises:
        FileError: missing, unreadable or too large.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{what} {os.fspath(path)!r} cannot be read: {reason}.") from None
    if len(data) > limit:
        raise FileError(f"{what} {os.fspath(path)!r} has more than {limit} bytes.")
    return data


def write_file(path: Path, data: bytes, *, mode: int = 0o600, replace: bool = True) -> None:
    """Writes a file in one step: written beside, synced, then renamed.

    Args:
        path: the file.
        data: its content.
        mode: its permission bits, in force from the first byte.
        replace: False refuses to overwrite.

    Raises:
        FileError: it exists, or cannot be written.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), mode)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            if replace:
                beside.replace(path)
            else:
                path.hardlink_to(beside)
        finally:
            beside.unlink(missing_ok=True)
    except FileExistsError:
        raise FileError(
            f"{str(path)!r} exists already.", remedy="Choose another name, or pass --force."
        ) from None
    except OSError as error:
        raise FileError(f"{str(path)!r} cannot be written: {error.strerror}.") from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Waits for other processes that hold this directory, and keeps them out meanwhile; not reentrant.

    For changes that read a file before they replace it. The system lets go when a process dies; the empty
    file ``.lock`` stays, because whoever removed it would take it from under those that wait.

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
