"""The door of a host's uplink: the inherited socket through which workers pass their streams to it.

It is a pair of connected sockets without a name, so that only processes that have inherited an end can use
it. The uplink holds the inner end, and all workers of a launch hold the outer one. A worker creates a socket
pair and sends one end of it through the door; the uplink's answer is the first frame on it. The launcher
keeps both ends of the door, so that another uplink can replace one that has died. Streams that are passed in
until then wait in the door.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

DOOR_VARIABLES = OUTER, INNER = ("MS_UPLINK", "MS_UPLINK_DOOR")
"""The variables that name a worker's end and the uplink's end: descriptor number and inode."""


def make_door() -> tuple[socket.socket, socket.socket]:
    """Creates a door; returns its inner and its outer end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def named(end: socket.socket) -> str:
    """The value with which a variable names an inherited end.

    It includes the inode, because the number may refer to another file by then.
    """
    return f"{end.fileno()}:{os.fstat(end.fileno()).st_ino}"


def inherited(env: Mapping[str, str], variable: str) -> socket.socket | None:
    """The end that a variable names, as a descriptor of this process; None if there is none.

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
