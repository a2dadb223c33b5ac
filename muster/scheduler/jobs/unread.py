"""Finds connections with bytes that the kernel has received and this process has not read yet.

Under a flood of TLS handshakes, gRPC's threads read the workers' streams seconds late, although the event
loop is on time. Only the kernel then knows that a worker has sent something. It is queried over netlink, as
``ss`` does (see sock_diag(7)), which needs no privileges. A few calls are enough for thousands of
connections; querying each descriptor would acquire the interpreter's lock each time.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301
_ERROR, _DONE = 2, 3
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states; zeros select all sockets
_ANSWER = struct.Struct("=4x2x2s16x16s4x8x4xI")  # Port and address of the other end, number of unread bytes.
_RECEIVE_BYTES = 1 << 17
_TIMEOUT_S = 1.0


def unread_peers(peers: Collection[str]) -> list[str]:
    """Returns the peers whose connections have unread bytes; none if the system does not tell.

    Args:
        peers: addresses of the other ends, ``1.2.3.4:5`` or ``[::1]:5``.
    """
    waiting: set[bytes] = set()
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            waiting.update(_with_unread(family))
    except OSError:
        pass
    return [peer for peer in peers if _packed(peer) in waiting]


def _with_unread(family: int) -> Iterator[bytes]:
    """Yields the other end's address and port of each connection that has unread bytes."""
    states = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, states)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(header + request)
        while True:
            data = kernel.recv(_RECEIVE_BYTES)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind in (_ERROR, _DONE) or length < _HEADER.size:
                    return
                port, address, unread = _ANSWER.unpack_from(data, at + _HEADER.size)
                if unread:
                    yield _plain(address if family == socket.AF_INET6 else address[:4]) + port
                at += (length + 3) & ~3


def _plain(address: bytes) -> bytes:
    """Converts an IPv4-mapped IPv6 address to its IPv4 form."""
    return address[12:] if len(address) == 16 and address.startswith(bytes(10) + b"\xff\xff") else address


def _packed(peer: str) -> bytes | None:
    host, _, port = peer.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        return _plain(address.packed) + int(port).to_bytes(2, "big")
    except (ValueError, OverflowError):
        return None
