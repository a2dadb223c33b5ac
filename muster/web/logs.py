"""Finds the logs of a launch on this host, and reads their ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.wire import launches
from muster.wire.files import open_regular
from muster.wire.log_lines import one_line

LOGS_SHOWN = 32
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Log:
    """A log file; ``name`` is the file's name without control characters."""

    name: str
    path: Path


def launch_of(job_id: str, port: int, env: Mapping[str, str]) -> launches.Launched | None:
    """Returns this user's launch of a job on this host with a scheduler at ``port``; None without one."""
    found = (each for each in launches.running(env) if each.job_id == job_id and each.port == str(port))
    return next(found, None)


def logs_of(directory: Path) -> list[Log]:
    """Returns the logs of a launch, the scheduler's first, then by number."""
    try:
        found = [path for path in directory.iterdir() if path.suffix == ".log" and not path.is_symlink()]
    except OSError:
        return []

    def order(path: Path) -> tuple[bool, int, str]:
        digits = "".join(c for c in path.stem.rpartition("_")[2] if c.isdigit())
        return "scheduler" not in path.stem, int(digits or 0), path.name

    return [Log(one_line(path.name), path) for path in sorted(found, key=order)[:LOGS_SHOWN]]


def tail(log: Log, lines: int) -> str:
    """Returns the last lines of a log, each without control characters."""
    try:
        descriptor = open_regular(log.path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        return f"It cannot be read: {error.strerror}."
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
    whole = text.split("\n")[1:] if size > TAIL_BYTES else text.split("\n")
    return "\n".join(one_line(line) for line in whole[-lines - 1 :])
