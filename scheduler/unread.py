"""Which connections hold bytes that the kernel has received and this process has not read yet.

Under a flood of TLS handshakes gRPC's threads read the streams of workers seconds late, while the event loop
is on time: only the kernel knows then that a worker has spoken.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Collection, Iterable
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_UNREAD = re.compile(  # the other end's address and port, the state, how much is unsent and unread
    rb" ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) [0-9A-F]{2} [0-9A-F]{8}:(?!0{8})[0-9A-F]{8} "
)


def unread_peers(peers: Collection[str], tables: Iterable[Path] = _TABLES) -> list[str]:
    """Those of ``peers`` on whose connections unread bytes wait; none where the system does not tell.

    Args:
        peers: addresses of the other ends, ``1.2.3.4:5`` or ``[::1]:5``.
        tables: the kernel's lists of TCP connections, as of ``/proc/net``.
    """
    waiting: set[tuple[bytes, int]] = set()
    for table in tables:
        try:
            text = table.read_bytes()
        except OSError:
            continue
        waiting.update((_plain(_of_kernel(host)), int(port, 16)) for host, port in _UNREAD.findall(text))
    return [peer for peer in peers if _parsed(peer) in waiting]


def _of_kernel(digits: bytes) -> bytes:
    """An address as the kernel shows it: words of 32 bits, each in the machine's order of bytes."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    return struct.pack(f"={len(words)}I", *words)


def _plain(address: bytes) -> bytes:
    """IPv4 inside IPv6 is IPv4."""
    return address[12:] if address.startswith(bytes(10) + b"\xff\xff") and len(address) == 16 else address


def _parsed(peer: str) -> tuple[bytes, int] | None:
    host, _, port = peer.rpartition(":")
    try:
        return _plain(ipaddress.ip_address(host.strip("[]").partition("%")[0]).packed), int(port)
    except ValueError:
        return None
