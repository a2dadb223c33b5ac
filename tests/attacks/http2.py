"""HTTP/2 by hand over TLS: what no gRPC library would send."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from muster.certs.runtime.store import Credentials
from muster.certs.runtime.tls import client_ssl_context

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
MOST_IN_A_FRAME = 16_384
SESSION = "/rendezvous.v1.Rendezvous/Session"


@dataclass(frozen=True)
class Frame:
    """One frame that came."""

    kind: int
    flags: int
    stream: int
    body: bytes

    @property
    def ends_stream(self) -> bool:
        """Whether it is the last of its stream: a reset, or headers of the call's status."""
        return self.kind == RST_STREAM or (self.kind == HEADERS and bool(self.flags & END_STREAM))


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One frame's bytes."""
    return struct.pack("!I", len(body))[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + body


def request(stream: int, path: str = SESSION, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The headers that begin a gRPC call."""
    fields = (
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "127.0.0.1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *extra,
    )
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return frame(HEADERS, END_HEADERS, stream, block)


def message(stream: int, data: bytes, claimed: int | None = None, *, packed: bool = False) -> bytes:
    """A gRPC message; ``claimed`` is the length that it is said to have, ``packed``: it is compressed."""
    whole = bytes((packed,)) + struct.pack("!I", len(data) if claimed is None else claimed) + data
    parts = (whole[at : at + MOST_IN_A_FRAME] for at in range(0, len(whole), MOST_IN_A_FRAME))
    return b"".join(frame(DATA, 0, stream, part) for part in parts)


def _text(value: str) -> bytes:
    data = value.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, size = len(data) - 127, b"\x7f"
    while rest >= 128:
        size, rest = size + bytes((rest % 128 + 128,)), rest // 128
    return size + bytes((rest,)) + data


class Http2:
    """A connection that has shaken hands and sent its settings."""

    def __init__(self, port: int, credentials: Credentials) -> None:
        context = client_ssl_context(credentials)
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.sock = context.wrap_socket(plain)
        self.sock.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._buffer = b""

    def send(self, data: bytes) -> bool:
        """Sends; False if the server has hung up."""
        try:
            self.sock.sendall(data)
        except (OSError, ssl.SSLError):
            return False
        return True

    def frames(self, seconds: float) -> Iterator[Frame]:
        """What comes, until the server hangs up or for so long; settings and pings are answered."""
        until = time.monotonic() + seconds
        while True:
            while len(self._buffer) >= 9:
                size = int.from_bytes(self._buffer[:3], "big")
                if len(self._buffer) < 9 + size:
                    break
                head, body = self._buffer[:9], self._buffer[9 : 9 + size]
                self._buffer = self._buffer[9 + size :]
                found = Frame(head[3], head[4], int.from_bytes(head[5:], "big"), body)
                if found.kind in (SETTINGS, PING) and not found.flags & ACK:
                    self.send(frame(found.kind, ACK, 0, body if found.kind == PING else b""))
                yield found
            self.sock.settimeout(max(0.01, until - time.monotonic()))
            try:
                data = self.sock.recv(65_536)
            except (OSError, ssl.SSLError):
                return
            if not data or time.monotonic() > until:
                return
            self._buffer += data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()
