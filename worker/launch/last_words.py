"""Notes of a worker for its launcher: its rank, its progress, what ended it, who was lost first.

The launcher sees exit codes and signals only, in the order in which processes end, which is not the order in
which they failed. So it gives each worker a file in memory, named by MUSTER_LAST_WORDS. How far the training
is stands in its first bytes and is overwritten; the rest is appended, a JSON object a line, which
:func:`muster.worker.launch.report.read_words` reads.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "MUSTER_LAST_WORDS"
FILE_NAME = "muster-last-words"
SLOT_BYTES = 256
"""Bytes for the progress."""

PROGRESS_EVERY_S = 0.2
_progress_due_s = 0.0


def note(**facts: object) -> None:
    """Appends one line of facts; without a launcher, or where that is gone, it does nothing."""
    _write(os.O_APPEND, (json.dumps(facts) + "\n").encode())


def note_progress(**facts: object) -> None:
    """Overwrites the training's progress, a few times a second at most; like :func:`note`."""
    global _progress_due_s
    if VARIABLE not in os.environ or time.monotonic() < _progress_due_s:
        return
    _progress_due_s = time.monotonic() + PROGRESS_EVERY_S
    data = json.dumps(facts).encode()
    if len(data) <= SLOT_BYTES:
        _write(0, data.ljust(SLOT_BYTES))


def _write(flags: int, data: bytes) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        if not str(Path(path).readlink()).startswith(
            f"/memfd:{FILE_NAME}"
        ):  # another process has the number by now
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)
    except OSError:
        return
    try:
        os.write(descriptor, data)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def describe_devices(devices: Sequence[tuple[str, str]]) -> str:
    """The kinds and models of the workers' devices, in words: ``4 x NVIDIA H200``, or ``CPU``."""
    counts = Counter(model or kind for kind, model in devices if kind != "cpu")
    words = [f"{count} x {name}" for name, count in sorted(counts.items())]
    return " and ".join([*words, "CPU"] if any(kind == "cpu" for kind, _ in devices) else words)


def set_title(who: str, script: str) -> None:
    """Names this process for ``ps``: ``muster: rank 3 train.py``.

    The kernel shows what stands where the process's arguments were put at its start; Python has its own copy
    of them. Without a launcher nothing is done: the process is not Muster's to name.

    Args:
        who: ``rank 3``.
        script: path or name of what the process runs.
    """
    if VARIABLE not in os.environ:
        return
    title = f"muster: {who} {Path(script).name}".rstrip().encode()
    try:
        Path("/proc/self/comm").write_bytes(title[:15].rstrip())
        fields = (
            Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        begin, end = int(fields[45]), int(fields[46])
        if 0 < begin < end:
            memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
            try:
                # Zeros to the end: where the last byte is none, the kernel reads on into the environment.
                os.pwrite(memory, title[: end - begin - 1].ljust(end - begin, b"\0"), begin)
            finally:
                os.close(memory)
    except (OSError, ValueError, IndexError):
        return
