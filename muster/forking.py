"""Closes, in a forked child of a worker, the sockets by which others see that the worker is alive.

A forked child holds copies of all descriptors. While it lives, the kernel does not end the connections of a
killed worker, and the scheduler and the peers would notice the loss only by a long silence. A launcher kills
the children of a dead worker. But there may be no launcher, and killing takes time, so children close these
sockets as soon as they start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from weakref import WeakSet

_sockets: WeakSet[socket.socket] = WeakSet()
_schedulers: set[tuple[str, int]] = set()


def not_for_children(sock: socket.socket) -> None:
    """Makes forked children of this process close a socket."""
    _watch_forks()
    _sockets.add(sock)


def not_for_children_to(host: str, port: int) -> None:
    """Makes forked children of this process close gRPC's connections to a scheduler."""
    _watch_forks()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        _schedulers.update((_plain(str(address[0])), port) for *_, address in found)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Replaces the sockets by /dev/null in a forked child.

    The descriptors stay in use, so that closing the child's socket objects does not close another file. The
    sockets are not shut down, because this would end the parent's connections.
    """
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in {*(each.fileno() for each in _sockets), *_to_schedulers()}:
            with contextlib.suppress(OSError):  # The socket is closed already.
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _to_schedulers() -> Iterator[int]:
    """Yields the descriptors of connections to a scheduler."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _peer(descriptor) in _schedulers:
                yield descriptor


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Returns the address at the other end of a TCP connection; None if the descriptor is not one."""
    sock = socket.socket(fileno=descriptor)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host, port = sock.getpeername()[:2]
        return _plain(host), port
    finally:
        sock.detach()


def _plain(host: str) -> str:
    """Returns an address in the form for comparisons, because gRPC uses IPv6 sockets also for IPv4."""
    with contextlib.suppress(ValueError):
        address = ip_address(host.partition("%")[0])
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return str(address)
    return host
