"""Reads what the kernel tells of a process or a thread in the file ``stat``, as proc(5) lists it."""

from __future__ import annotations

from pathlib import Path


def stat_fields(folder: str | Path = "/proc/self") -> list[str]:
    """Returns the fields that follow the name, so that index 0 is proc(5)'s field 3, the state.

    Args:
        folder: ``/proc/PID``, or ``/proc/PID/task/TID`` for a thread.

    Raises:
        OSError: there is no such process or thread.
    """
    return Path(folder, "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
