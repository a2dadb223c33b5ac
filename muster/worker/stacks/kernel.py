"""Reads the kernel's view of a process's threads: their state, where each waits, and in which call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from muster.wire.process_stat import stat_fields

MOST_THREADS = 64
PF_EXITING = 0x4
"""The flag of a thread that ends, in Linux's include/linux/sched.h."""

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a driver",
    "T": "is stopped",
    "Z": "has ended",
}


def threads_of(pid: int) -> Iterator[str]:
    """Yields lines about the threads of a process; information that may not be read is mentioned once."""
    unreadable = False
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    except OSError as error:
        yield f"not readable: {error.strerror}"
        return
    for task in tasks[:MOST_THREADS]:
        name, state = _read(task / "comm") or "?", _state(task)
        call = (_read(task / "syscall") or "").split(" ")[0]  # What follows are values.
        wchan = _read(task / "wchan")
        where = f", in {wchan}" if wchan and wchan != "0" else ""
        called = f", system call {call}" if call.isdecimal() else ""
        yield f"thread {task.name} ({name}) {state}{where}{called}"
        stack = _read(task / "stack")
        unreadable = unreadable or stack is None
        yield from (f"    {line.partition('] ')[2] or line}" for line in (stack or "").splitlines())
    if len(tasks) > MOST_THREADS:
        yield f"and {len(tasks) - MOST_THREADS} threads more"
    if unreadable:
        yield "the kernel's stacks (/proc/PID/stack) may be read by root alone"


def is_ending(pid: int) -> bool:
    """Whether a process's main thread ends or has ended.

    A killed process closes its connections before its parent can collect it. False if it cannot be read.
    """
    try:
        return bool(int(stat_fields(f"/proc/{pid}")[6]) & PF_EXITING)
    except (OSError, IndexError):
        return False


def _state(task: Path) -> str:
    try:
        letter = stat_fields(task)[0]
    except (OSError, IndexError):
        letter = "?"
    return _STATES.get(letter, letter)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
