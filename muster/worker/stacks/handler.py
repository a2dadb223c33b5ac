"""Lets a launcher or agent request a process's Python stacks: faulthandler on a real-time signal.

faulthandler's handler is written in C and does not need the interpreter's lock, so it also answers while C
code holds the lock. It writes to the requester's file in memory, which MUSTER_STACKS names. If the script
already has a handler for the signal, that one is kept.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from pathlib import Path

SIGNAL = signal.SIGRTMAX - 3
VARIABLE = "MUSTER_STACKS"
FILE = "muster-stacks"

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

_registered: list[int] = []
"""The descriptor that the handler writes to, if there is one; it is never closed."""


def answer_signal(env: Mapping[str, str]) -> None:
    """Makes :data:`SIGNAL` write the stacks of all threads for the requester; does nothing if there is none.

    Args:
        env: the environment with :data:`VARIABLE`.
    """
    path = env.get(VARIABLE, "")
    if not path or _registered or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    try:
        if not str(Path(path).readlink()).startswith(f"/memfd:{FILE}"):
            return  # Another process may have this pid by now.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)
    _registered.append(descriptor)
    asker = Path(path).parts[2]
    if asker.isdecimal():
        let_trace(int(asker))


def let_trace(pid: int) -> None:
    """Lets a process and its children attach to this one, even if Yama allows that only to its parents."""
    try:
        restricted = _YAMA.read_text().strip() == "1"
    except OSError:
        return
    if restricted:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
