"""The numbers of a checkpoint folder's attempts: which of two files is the later one, without a clock."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from muster.wire.files import beside, read_regular

_ATTEMPTS = ".attempts"
"""The directory of a folder where each attempt has a file: its number's name, and who took it."""
TAKEN_WITHIN_S = 1.0
"""How long a number's file may be without a name, on file systems without hard links."""

NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))


def number_of_attempt(root: Path, attempt: str, files: Iterable[int]) -> int:
    """An attempt's number in a folder: the one that it has, or the next one, which is its own from now on.

    Whoever makes the file of a number has it, also where several hosts share the file system.

    Args:
        root: the folder.
        attempt: its name.
        files: the numbers of attempts that have files there.

    Raises:
        OSError: the folder cannot be written, or not read.
    """
    folder = root / _ATTEMPTS
    folder.mkdir(parents=True, exist_ok=True)
    number = max([*files, *_taken(folder)], default=0)
    # Numbers are taken in order. A folder that is read while they are may show one and not the one before: a
    # second look has all up to the highest of the first.
    for each in sorted(_taken(folder), reverse=True):
        if _who_took(folder, each) == attempt:
            return each
    while True:
        number += 1
        try:
            _take(folder / f"{number:06d}", attempt)
        except FileExistsError:
            if _who_took(folder, number) != attempt:
                continue
        return number


def _taken(folder: Path) -> list[int]:
    return [int(each.name) for each in folder.iterdir() if each.name.isascii() and each.name.isdigit()]


def _take(path: Path, attempt: str) -> None:
    """Makes the file of a number, with the attempt's name in it from its first moment on.

    Raises:
        FileExistsError: somebody has the number.
        OSError: the file cannot be written.
    """
    new = beside(path)
    try:
        _write_new(new, attempt)
        try:
            os.link(new, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _write_new(path, attempt)  # the name comes a moment after the file: who sees none waits for it
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _write_new(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _who_took(folder: Path, number: int) -> str:
    """The attempt that has a number; "": none that can be told."""
    path, until = folder / f"{number:06d}", time.monotonic() + TAKEN_WITHIN_S
    while True:
        try:
            name = read_regular(path, 200).decode("ascii", "replace")
        except OSError as error:
            if error.errno != errno.ESTALE:  # a network's file system: it was made again
                return ""
            name = ""
        if name or time.monotonic() > until:
            return name
        time.sleep(0.01)
