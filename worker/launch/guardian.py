"""No orphans: a small process that ends the launcher's process groups if the launcher itself is killed.

``SIGKILL`` leaves the launcher no chance to clean up, and Linux's parent-death signal reaches only
direct children. The guardian holds the read end of a pipe whose write end the launcher alone keeps open:
when that end closes, it kills every group that was announced and not withdrawn.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Guardian:
    """The launcher's handle on the guardian process. Make it before anything else is started."""

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _guard(read_end, self._write_end)
        os.close(read_end)

    def fileno(self) -> int:
        """The write end of the pipe; a forked child that lives on must close it."""
        return self._write_end

    def announce(self, group: int) -> None:
        """Entrusts a process group; called in the child itself, so that there is no gap."""
        self._tell(b"+%d\n" % group)

    def withdraw(self, group: int) -> None:
        """The group has ended. Its number may be used again by others, so it must not be killed."""
        self._tell(b"-%d\n" % group)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; the launcher can do without
            os.write(self._write_end, line)

    def forget(self) -> None:
        """In a forked child: lets go of the pipe."""
        os.close(self._write_end)

    def close(self) -> None:
        """Ends the guardian; the launcher has ended every group itself."""
        os.close(self._write_end)
        os.waitpid(self.pid, 0)


def _guard(read_end: int, write_end: int) -> None:
    """The guardian's whole life; never returns."""
    try:
        os.close(write_end)
        os.setsid()  # what a terminal sends to the launcher's group must not end the guardian
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for group in _groups_left(read_end):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _groups_left(read_end: int) -> set[int]:
    """Reads announcements until the launcher is gone."""
    groups: set[int] = set()
    with os.fdopen(read_end, "rb") as lines:
        for line in lines:
            if line.startswith(b"+"):
                groups.add(int(line[1:]))
            else:
                groups.discard(int(line[1:]))
    return groups
