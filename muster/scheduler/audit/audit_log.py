"""The audit log: who joined, left, was refused, expelled or drained, and who was a member in which step.

Each line is signed and names the previous line (``chain.py``). The key is created on first use in
``FILE.key``, which only this user can read; ``muster audit key`` prints the public key. If the log is
renamed, for example by logrotate, the next line is written to a new file with the old name. A restarted
scheduler appends to the existing file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from muster.scheduler.audit.chain import Head, public_text, read_line, signed
from muster.scheduler.audit.logs import LOG
from muster.scheduler.errors import SchedulerSettingsError
from muster.wire.files import open_own, open_regular

TAIL_BYTES = 8 * 1024 * 1024
"""The number of bytes at the end of a file that are read to find its last line. A line about a generation of
4,096 members has 0.5 MB.
"""

_KEY_BYTES = 4096


class AuditLog:
    """A file of JSON lines, each of which is chained to the previous line and signed.

    Args:
        path: the file; created with mode 0600. It must not be a symbolic link or belong to another user.
        wall_clock: returns the date and time.

    Raises:
        SchedulerSettingsError: the file cannot be opened, or its key cannot be read or created.
    """

    def __init__(
        self, path: Path, wall_clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
    ) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._lock = threading.Lock()  # Failed handshakes are written from another thread.
        try:
            self._fd = open_own(path)
            self._key = _load_key(path.with_name(f"{path.name}.key"))
            head, self._torn = _last_line(path, public_text(self._key))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SchedulerSettingsError(
                f"MS_AUDIT_LOG must name a file that can be written; '{path}': {reason}."
            ) from error
        self._head = head or Head(secrets.token_hex(8))
        if head is None:
            self.write("began", {"key": public_text(self._key), "text": "A log with this public key begins."})

    @property
    def head(self) -> Head:
        """The position and hash of the last line that was written."""
        return self._head

    @property
    def key(self) -> str:
        """The public key, in hexadecimal digits."""
        return public_text(self._key)

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        """Appends one event with a single write, so that it does not mix with another process's lines."""
        entry = {"time": self._wall_clock().isoformat(timespec="milliseconds"), "event": event, **facts}
        with self._lock:
            try:
                self._follow_the_name()
                line, head = signed(entry, self._head, self._key)
                data = b"\n" + line if self._torn else line
                written = os.write(self._fd, data)
                self._torn = written < len(data)
                if self._torn:
                    raise OSError(0, "the disk took only a part of a line")
                self._head = head
            except OSError as error:
                LOG.error("the audit log cannot be written: %s", error.strerror)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _follow_the_name(self) -> None:
        """Opens a new file if the old one was renamed or removed."""
        with contextlib.suppress(FileNotFoundError):
            now, own = self._path.lstat(), os.fstat(self._fd)
            if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
                return
        descriptor = open_own(self._path)
        os.close(self._fd)
        self._fd, self._torn = descriptor, False


def _load_key(path: Path) -> Ed25519PrivateKey:
    """Loads the signing key of a log, and creates it if there is none yet.

    Raises:
        OSError: the key can be neither read nor created.
        ValueError: the file does not hold an Ed25519 key.
    """
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
        data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        return key
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise ValueError(f"its key {path} is another user's")
        data = file.read(_KEY_BYTES)
    try:
        loaded = load_pem_private_key(data, None)
    except (TypeError, ValueError):
        raise ValueError(f"its key {path} is damaged") from None
    if not isinstance(loaded, Ed25519PrivateKey):
        raise ValueError(f"its key {path} is no Ed25519 key")
    return loaded


def _last_line(path: Path, key: str) -> tuple[Head | None, bool]:
    """Returns the last line signed with this key, and whether the file ends in the middle of a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    lines = data.split(b"\n")
    for line in reversed(lines):
        read = read_line(line, "")
        if read is not None and read.is_by(key):
            return read.head, bool(lines[-1])
        with contextlib.suppress(ValueError, RecursionError):
            if line and "log" not in json.loads(line):
                break  # A version before 0.3 wrote this line, so no line before it is signed.
    return None, bool(lines[-1])
