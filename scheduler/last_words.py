"""Passes on what a scheduler that crashed in C code had still to say.

A process that aborts has written why to descriptor 2. Where that is a pipe to the process itself, its reader
dies with it. So a second process holds the pipe as well, reads nothing while the first one lives, and then
whatever is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from scheduler.handshakes import TraceReader

_ALL_DESCRIPTORS = 1 << 20


def write_all(fd: int, data: bytes) -> None:
    """Writes all of it, or gives up: that nobody reads our errors is no reason to stop."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def stand_by(pipe: int, real: int) -> int:
    """Forks the process that waits. No other thread may run yet, and no key be loaded: it gets a copy.

    Args:
        pipe: the end to read; when its last writer is gone, what is left in it is passed on.
        real: the descriptor that it is passed on to.

    Returns:
        The process id.
    """
    waiting = os.fork()
    if waiting:
        return waiting
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # meant for the scheduler, whose end is what counts here
        os.dup2(real, 2)
        os.dup2(pipe, 0)
        os.closerange(3, _ALL_DESCRIPTORS)  # the writing end of the pipe above all
        os.close(1)
        write_all(2, _left_over(0))
    finally:
        os._exit(0)


def dismiss(waiting: int) -> None:
    """Ends that process; the pipe is ours alone again."""
    with contextlib.suppress(OSError):
        os.kill(waiting, signal.SIGKILL)
        os.waitpid(waiting, 0)


def _left_over(pipe: int) -> bytes:
    """Waits for the end of all writers; returns what they left that is not gRPC's trace."""
    poll = select.poll()
    poll.register(pipe, 0)  # neither data nor room: only the end
    poll.poll()
    reader, others = TraceReader(), b""
    while data := os.read(pipe, 1 << 16):
        others += reader.feed(data)[1]
    return others + reader.rest()
