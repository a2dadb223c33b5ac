"""The door of a host's uplink: the inherited socket by which workers hand it their streams.

A pair of connected sockets without a name: only who has inherited an end can use it. The uplink holds the
inner end, all workers of a launch the outer one. A worker makes a pair of its own and sends one end of that
through the door; the uplink's answer is the first frame on it. The launcher keeps both ends of the door, so
that another uplink can take the place of one that has died; what is handed in until then waits in the door.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

DOOR_VARIABLES = OUTER, INNER = ("MS_UPLINK", "MS_UPLINK_DOOR")
"""The variables that name a worker's end, and the uplink's: descriptor number and inode."""


def make_door() -> tuple[socket.socket, socket.socket]:
    """A new door: its inner end and its outer end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def named(end: socket.socket) -> str:
    """How a variable names an end that is inherited: a number alone might be another file by then."""
    return f"{end.fileno()}:{os.fstat(end.fileno()).st_ino}"


def inherited(env: Mapping[str, str], variable: str) -> socket.socket | None:
    """The end that a variable names, as a descriptor of this process's own; None: there is none.

    Programs that this process starts do not inherit it.
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
