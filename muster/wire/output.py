"""What the ends of a command's output, and of its disk, mean for the command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

PIPE_EXIT_CODE = 141
"""What a shell shows of a program that SIGPIPE has ended."""

_PLACES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG})


def to_its_end(run: Callable[[], int]) -> int:
    """Runs a command and writes all its output; what the machine refuses it is said in one sentence.

    A reader that has seen enough, as ``| head``, ends it quietly.

    Args:
        run: the command. In a process that it has forked, its exceptions are passed on.

    Returns:
        The exit code.
    """
    process = os.getpid()
    try:
        try:
            return run()
        finally:
            if os.getpid() == process:
                sys.stdout.flush()
    except OSError as error:
        if os.getpid() != process or not (error.errno in _PLACES or isinstance(error, BrokenPipeError)):
            raise
        _drop_output()
        if isinstance(error, BrokenPipeError):
            return PIPE_EXIT_CODE
        where = repr(str(error.filename)) if error.filename else "the output"
        print(f"muster: {where} cannot be written or read: {error.strerror}.", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Has the interpreter flush nowhere at its end what could not be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
