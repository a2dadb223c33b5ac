"""Ends a command with one sentence if its output is closed or a disk is full."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

PIPE_EXIT_CODE = 141
"""The exit code that a shell reports for a program ended by SIGPIPE."""

_PLACES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG})


def to_its_end(run: Callable[[], int]) -> int:
    """Runs a command and flushes its output; if writing fails, ends the command with one sentence.

    If a reader such as ``| head`` closes the pipe, the command ends without a message.

    Args:
        run: the command. Its exceptions are passed on in a process that it has forked.

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
    """Points standard output at /dev/null, so that the interpreter's last flush cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
