"""Requests the Python stacks of processes, and reads what they write."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from muster.wire.process_stat import stat_fields
from muster.worker.stacks.handler import FILE, SIGNAL

ANSWER_S = 2.0
"""How long a process may take to begin its answer, and again to complete it, in seconds."""

QUIET_S = 0.1
"""An answer is complete when nothing has come for this many seconds."""

MOST_BYTES = 1 << 20
YOUNG_S = 1.0
"""A process younger than this many seconds may be about to execute another program, which the signal would
kill.
"""

_LOOK_S = 0.01


class Mailbox:
    """A file in memory to which processes write the stacks that this process requests.

    Without requests, it costs only the descriptor.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(FILE)
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """The value of :data:`~muster.worker.stacks.handler.VARIABLE` for processes that may be asked."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def ask(self, pid: int, wait_s: float = ANSWER_S) -> str | None:
        """Returns the Python stacks of all threads of a process; empty if none came in time.

        Args:
            pid: the process.
            wait_s: how long to wait for the answer, in seconds.

        Returns:
            The stacks, or None if the process was not asked, because it has no handler and the signal would
                kill it.
        """
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            with self._lock:
                return self._ask(pid, handle, wait_s)
        finally:
            os.close(handle)

    def _ask(self, pid: int, handle: int, wait_s: float) -> str | None:
        if not answers(pid):
            return None
        os.ftruncate(self._descriptor, 0)
        try:
            signal.pidfd_send_signal(handle, SIGNAL)
        except OSError:
            return None
        self._await(time.monotonic() + wait_s)
        return os.pread(self._descriptor, MOST_BYTES, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _await(self, deadline: float) -> None:
        size, since = 0, time.monotonic()
        while (now := time.monotonic()) < deadline and not (size and now >= since + QUIET_S):
            time.sleep(_LOOK_S)
            if (new := os.fstat(self._descriptor).st_size) != size:
                size, since = new, now


def answers(pid: int) -> bool:
    """Whether a process may be asked: it exists, has a handler, and will not execute another program."""
    try:
        return catches(pid, SIGNAL) and age_s(pid) >= YOUNG_S
    except OSError:
        return False


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal.

    Raises:
        OSError: there is no such process.
    """
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def age_s(pid: int) -> float:
    """Returns the age of a process in seconds.

    Raises:
        OSError: there is no such process.
    """
    begun_ticks = int(stat_fields(f"/proc/{pid}")[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun_ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int, most: int = 64) -> list[int]:
    """Returns a process and all its descendants, up to a limit."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
        if len(found) >= most:
            break
    return found[:most]
