"""Reads files whose names come from users: only regular files, without blocking, and with a size limit.

A path to a FIFO, a device or a growing file must not block a process or fill its memory. This module imports
only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_TOKEN_BYTES = 8
_LEFT_AFTER_S = 600.0
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
}


def path_of(text: str) -> Path:
    """Makes a user's path absolute; ``~NAME`` stays as written if there is no such user."""
    return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 - Path's own raises there


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Opens a file without blocking, and refuses anything that is not a regular file.

    Args:
        path: the file.
        flags: as for :func:`os.open`.
        mode: the permission bits if the file is created.

    Returns:
        The descriptor, which children do not inherit.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; ``strerror`` says what it is.
    """
    # With O_NONBLOCK, opening a FIFO succeeds or fails immediately. Regular files ignore it.
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a link, and none is followed here") from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a FIFO, a socket or a device, not a regular file") from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise OSError(number, f"it is {_KINDS.get(kind, 'something else')}, not a regular file")
    return descriptor


def open_own(path: str | os.PathLike[str]) -> int:
    """Opens a file of this user for appending; creates a missing one so that only its owner can use it.

    In a folder to which others may write, somebody may have put a link there, or a file of their own in order
    to read what is appended.

    Returns:
        The descriptor, which children do not inherit.

    Raises:
        OSError: as for :func:`open_regular`, or the file is a link or belongs to another user.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
    with contextlib.suppress(FileExistsError):
        return open_regular(path, flags | os.O_CREAT | os.O_EXCL)
    descriptor = open_regular(path, flags)
    whose = os.fstat(descriptor).st_uid
    if whose != os.geteuid() and whose != _owner_of_new_files(Path(path)):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it belongs to another user, {whose}")
    return descriptor


def _owner_of_new_files(beside_path: Path) -> int:
    """Returns the owner of a file that this process creates; on some file systems, that is another user."""
    return _new_file(beside_path).st_uid


def _new_file(beside_path: Path) -> os.stat_result:
    """Returns the status of a new file, which shows the file system's clock and the owner of new files."""
    name = beside(beside_path)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        name.unlink(missing_ok=True)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Reads a whole regular file.

    Args:
        path: the file.
        limit: the largest number of bytes that it may have.

    Raises:
        OSError: as for :func:`open_regular`; EFBIG if the file has more bytes.
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
    return data


def readable_by_others(path: str | os.PathLike[str]) -> str:
    """Returns a warning if others may read a file that holds a secret; empty if not, or if it is missing."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except (OSError, ValueError):
        return ""
    return (
        f"{os.fspath(path)} may be read by every user of this host (mode {mode:04o})" if mode & 0o004 else ""
    )


def beside(path: Path) -> Path:
    """Returns an unguessable temporary name in the file's folder, which is later renamed to the file."""
    return path.with_name(f".{path.name}.{os.urandom(_TOKEN_BYTES).hex()}.part")


def remove_left(folder: Path) -> None:
    """Removes files named by :func:`beside` that killed processes have left, if they are ten minutes old.

    The age is measured by the file system's clock. The clock of another host that is writing there may be an
    hour off.
    """
    left = list(folder.glob(f".*.{'[0-9a-f]' * 2 * _TOKEN_BYTES}.part"))
    with contextlib.suppress(OSError):
        now = _new_file(folder / "now").st_mtime if left else 0.0
        for each in left:
            with contextlib.suppress(OSError):
                if now - each.lstat().st_mtime > _LEFT_AFTER_S:
                    each.unlink()
