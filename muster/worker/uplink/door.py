"""The door of a host's uplink: the inherited socket through which workers pass their streams to it.

The door is a pair of connected sockets without a name, so that only processes that have inherited an end can
use it. The uplink holds the inner end, and all workers of a launch hold the outer end. For a stream, a worker
creates a socket pair and sends one end of it through the door; the uplink's first frame on that end is its
answer. The launcher keeps both ends of the door, so that it can replace an uplink that has died. Streams that
are sent before the new uplink starts wait in the door's buffer.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

DOOR_VARIABLES = OUTER, INNER = ("MS_UPLINK", "MS_UPLINK_DOOR")
"""The variables that name the workers' end and the uplink's end, by descriptor number and inode."""


def make_door() -> tuple[socket.socket, socket.socket]:
    """Creates a door; returns its inner and its outer end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def named(end: socket.socket) -> str:
    """Returns the value with which a variable names an inherited end.

    It includes the inode, because the descriptor number may later refer to another file.
    """
    return f"{end.fileno()}:{os.fstat(end.fileno()).st_ino}"


def inherited(env: Mapping[str, str], variable: str) -> socket.socket | None:
    """Returns the end that a variable names, as a socket of this process; None if there is none.

    Programs started by this process do not inherit it.
    """
    number, _, inode = env.get(variable, "").partition(":")
    if not all(each.isascii() and each.isdigit() and len(each) < 21 for each in (number, inode)):
        return None
    with contextlib.suppress(OSError, OverflowError):
        if os.fstat(int(number)).st_ino != int(inode):
            return None
        os.set_inheritable(int(number), False)
        end = socket.socket(fileno=os.dup(int(number)))
        if (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            return end
        end.close()
    return None
