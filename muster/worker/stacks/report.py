"""Combines the stacks of a worker's process into a text of limited size, without secrets.

A worker reads its own Python stacks under the interpreter's lock, without a signal. A program's agent asks
the program by a signal. In the same way, the launcher asks a worker whose lock is held by C code.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from muster.wire.messages import Collective
from muster.wire.redaction import without_secrets
from muster.worker.stacks.handler import SIGNAL
from muster.worker.stacks.kernel import threads_of
from muster.worker.stacks.libraries import gpus, nccl_ras, torch_recorder
from muster.worker.stacks.mailbox import Mailbox, answers, family
from muster.worker.stacks.native import native_frames

CUT = "\n(cut)"
ASKED_AT_MOST = 8
"""The largest number of a program's processes that are asked."""

UNASKED = (
    f"no process of this program has Muster's handler for signal {int(SIGNAL)}: it is not Python, has not"
    " imported torch or JAX yet, or has a handler of its own"
)
FOREIGN_RECORDER = (
    "not to be had from outside the program: torch writes it by itself where TORCH_FR_BUFFER_SIZE and"
    " TORCH_NCCL_DUMP_ON_TIMEOUT are set"
)


def own_report(limit_bytes: int, env: Mapping[str, str], recent: Sequence[Collective] = ()) -> str:
    """Returns the stacks of this process.

    Args:
        limit_bytes: the size limit of the text, in bytes.
        env: this process's environment, whose secrets are removed from the text.
        recent: its last collectives.
    """
    pid = os.getpid()
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Python stacks", own_stacks),
        ("last collectives", lambda: "\n".join(map(_in_words, recent)) or "none"),
        ("kernel", lambda: "\n".join(threads_of(pid))),
        ("native frames", lambda: native_frames(pid)),
        ("NCCL RAS", lambda: nccl_ras(pid, env)),
        ("GPUs", gpus),
        ("torch's flight recorder", torch_recorder),
    ]
    return _text(f"pid {pid}", sections, limit_bytes, env)


def program_report(mailbox: Mailbox, pid: int, limit_bytes: int, env: Mapping[str, str]) -> str:
    """Returns the stacks of a program that is a child of this process, and of processes that it started.

    Args:
        mailbox: the mailbox that its processes were given.
        pid: pid of its first process.
        limit_bytes: the size limit of the text, in bytes.
        env: the program's environment, whose secrets are removed from the text.
    """
    # The first process may be a shell, or may have started others.
    pids = [each for each in family(pid) if answers(each)][:ASKED_AT_MOST] or [pid]
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Python stacks", lambda: asked_stacks(mailbox, pids)),
        ("kernel", lambda: "\n".join(line for each in pids for line in threads_of(each))),
        ("native frames", lambda: native_frames(pids[0])),
        ("NCCL RAS", lambda: nccl_ras(pids[0], env)),
        ("GPUs", gpus),
        ("torch's flight recorder", lambda: FOREIGN_RECORDER),
    ]
    return _text(f"program, pid {pid}, asked by its agent", sections, limit_bytes, env)


def own_stacks() -> str:
    """Returns the Python stacks of all threads of this process, each with its thread's name."""
    descriptor = os.memfd_create("muster-own-stacks")
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
    for thread in threading.enumerate():
        number = f"hread 0x{thread.ident or 0:016x}"
        text = text.replace(f"{number} (", f"{number}, {thread.name} (")
    return "\n\n".join(sorted(text.split("\n\n"), key=_own_last))


def _own_last(thread: str) -> int:
    """Returns a sort key that puts the main thread first, and Muster's own threads last."""
    head = thread.partition("\n")[0]
    return 0 if ", MainThread (" in head else 2 if ", muster-" in head else 1


def asked_stacks(mailbox: Mailbox, pids: Iterable[int]) -> str:
    """Returns the Python stacks of the processes among these that have Muster's handler."""
    found: list[str] = []
    silent: list[str] = []
    for pid in pids:
        said = mailbox.ask(pid)
        if said:
            threads = sorted(said.split("\n\n"), key=lambda thread: not thread.startswith("Current"))
            found.append("\n\n".join((f"process {pid}:", *threads)))
        elif said is not None:
            silent.append(str(pid))
    if silent:
        found.append(f"no answer from pid {', '.join(silent)}: stopped, or in the kernel")
    return "\n\n".join(found) or UNASKED


def _text(
    head: str,
    sections: Iterable[tuple[str, Callable[[], str]]],
    limit_bytes: int,
    env: Mapping[str, str],
) -> str:
    parts = [head]
    for title, take in sections:  # The first one is the longest.
        try:
            said = take()
        except Exception as error:  # A report that fails must not prevent the others.
            said = f"none: {error!r}"
        said = _cut(said, limit_bytes * 5 // 8)
        parts.append(f"{title}: {said}" if "\n" not in said else f"{title}:\n{said}")
    return _cut(without_secrets("\n\n".join(parts), env), limit_bytes)


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= limit_bytes:
        return data.decode(errors="replace")
    return data[: max(0, limit_bytes - len(CUT))].decode(errors="ignore") + CUT


def _in_words(call: Collective) -> str:
    state = "done" if call.done else "not done"
    return f"{call.sequence} of group {call.group}: {call.name} of {call.size_bytes} B {call.dtype}, {state}"
