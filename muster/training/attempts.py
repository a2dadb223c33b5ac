"""Numbers the attempts that write into a checkpoint folder, so that files are ordered without a clock."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from muster.wire.files import beside, read_regular

_ATTEMPTS = ".attempts"
"""The folder's subdirectory with a file per attempt: named by its number, it contains the attempt's name."""
TAKEN_WITHIN_S = 1.0
"""Seconds that a number's file may lack the attempt's name, on file systems without hard links."""

NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))


def number_of_attempt(root: Path, attempt: str, files: Iterable[int]) -> int:
    """Returns an attempt's number in a folder; takes the next number if the attempt has none yet.

    The process that creates the file of a number has taken it, also if several hosts share the file system.

    Args:
        root: the folder.
        attempt: its name.
        files: the numbers of attempts that have files there.

    Raises:
        OSError: the folder cannot be written or read.
    """
    folder = root / _ATTEMPTS
    folder.mkdir(parents=True, exist_ok=True)
    number = max([*files, *_taken(folder)], default=0)
    # Numbers are taken in order. A folder that is listed at that time may show a number and not the previous
    # one. A second listing has all numbers up to the highest one of the first listing.
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
    """Creates the file of a number, with the attempt's name in it from the first moment on.

    Raises:
        FileExistsError: another attempt has the number.
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
            _write_new(path, attempt)  # the name comes a moment after the file: readers wait for it
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
    """Returns the attempt that has a number; "" if its file cannot be read."""
    path, until = folder / f"{number:06d}", time.monotonic() + TAKEN_WITHIN_S
    while True:
        try:
            name = read_regular(path, 200).decode("ascii", "replace")
        except OSError as error:
            if error.errno != errno.ESTALE:  # on a network file system: the file was replaced
                return ""
            name = ""
        if name or time.monotonic() > until:
            return name
        time.sleep(0.01)
