"""One connection to a peer: bytes in and out without waiting, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from muster.communicators.tcp.frames import GOODBYE_BYTES, MAGIC, Reason, goodbye, read_goodbye
from muster.communicators.tcp.records import RECORD_BYTES, RecordLayer, RecordLayerError
from muster.forking import not_for_children

RECORD = 16384
"""Maximum size of one TLS record, in bytes: reads and writes are in pieces of this size."""

_MOST_AHEAD = 64 << 20
_GOODBYE_TIMEOUT_S = 1.0
_PLAIN_PIECE = 262144
_WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


_BUSY_AT, _MICROSECONDS = 168, struct.Struct("=Q")
"""Offset of ``tcpi_busy_time`` (microseconds) in the kernel's ``tcp_info`` (linux/tcp.h)."""


class EndOfStreamError(Exception):
    """The peer's side of the connection has ended; ``farewell`` is its last message, if any."""

    def __init__(self, farewell: tuple[Reason, str] | None) -> None:
        super().__init__("the connection ended")
        self.farewell = farewell


class PeerConnection:
    """A connection to the process of rank ``peer`` after the handshakes; one thread reads, one writes.

    Args:
        sock: the socket, TLS or plain.
        peer: the rank at the other end.
        records: the record layer that carries the data instead of the socket's own TLS.

    Attributes:
        peer: the rank at the other end.
        in_payload: whether a payload is sent only in part, so that no goodbye can follow.
        ended: whether the peer has said goodbye; earlier data may still be read.
        duplex: whether one thread may read while another writes, which OpenSSL's own connections do not
            allow.
    """

    def __init__(self, sock: socket.socket, peer: int, records: RecordLayer | None = None) -> None:
        sock.setblocking(False)
        not_for_children(sock)
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self._records = records
        self.in_payload = False
        self.ended = False
        self.duplex = records is not None or not isinstance(sock, ssl.SSLSocket)
        self._ahead = bytearray()
        self._last_word = ""
        self._blocked: memoryview | None = None
        self._piece = _PLAIN_PIECE
        self._read: Callable[[memoryview], int] = sock.recv_into
        self._write: Callable[[memoryview], int] = sock.send
        if records is not None:
            self._piece, self._read, self._write = RECORD_BYTES, records.read, records.write
        elif isinstance(sock, ssl.SSLSocket):
            self._piece, self._read, self._write = RECORD, partial(_tls_read, sock), sock.write

    def read_into(self, view: memoryview) -> int:
        """Reads available bytes, at most one piece, into ``view``; returns 0 if there are none.

        Raises:
            EndOfStreamError: the stream has ended.
        """
        if self._ahead:
            count = min(len(view), len(self._ahead))
            view[:count] = self._ahead[:count]
            del self._ahead[:count]
            return count
        if self.ended:
            raise EndOfStreamError((Reason.DONE, self._last_word))
        try:
            count = self._read(view)
        except _WOULD_BLOCK:
            return 0
        except OSError:
            raise EndOfStreamError(None) from None
        except RecordLayerError as error:
            raise EndOfStreamError((Reason.LOST, str(error))) from None
        if count == 0:
            raise EndOfStreamError(None)
        return count

    def unread(self, data: memoryview) -> None:
        """Puts back bytes that were read beyond the wanted ones."""
        self._ahead[:0] = data

    def write(self, view: memoryview) -> int:
        """Writes what the socket accepts now, at most one piece; returns the number of bytes.

        After 0, a retry must pass the same bytes. Another thread may read at the same time.

        Raises:
            EndOfStreamError: the peer is gone; its last bytes may still be read, by :meth:`read_ahead`.
        """
        piece = view if len(view) <= self._piece else view[: self._piece]
        try:
            count = self._write(piece)
        except _WOULD_BLOCK:
            count = 0
        except OSError:
            raise EndOfStreamError(None) from None
        self._blocked = None if count else piece
        return count

    def read_ahead(self) -> tuple[Reason, str] | None:
        """Reads and keeps all that is left after the peer has hung up; returns its goodbye."""
        view = memoryview(bytearray(RECORD))
        with contextlib.suppress(OSError, RecordLayerError):
            while len(self._ahead) < _MOST_AHEAD:
                count = self._read(view)
                if not count:
                    break
                self._ahead += view[:count]
        farewell = read_goodbye(bytes(self._ahead[-GOODBYE_BYTES:]))
        if farewell is not None:
            del self._ahead[-GOODBYE_BYTES:]
            self.ended, self._last_word = farewell[0] is Reason.DONE, farewell[1]
        return farewell

    def goodbye_from(self, head: bytes) -> tuple[Reason, str] | None:
        """Reads the goodbye that begins with ``head``; returns None, and unreads the rest, if it is none."""
        if not head.startswith(MAGIC[: len(head)]):
            return None
        rest = memoryview(bytearray(GOODBYE_BYTES - len(head)))
        have = 0
        with contextlib.suppress(EndOfStreamError):
            while have < len(rest) and (count := self.read_into(rest[have:])):
                have += count
        farewell = read_goodbye(head + rest[:have])
        if farewell is None:
            self.unread(rest[:have])
        return farewell

    def sending_s(self) -> float | None:
        """Returns the total seconds for which written bytes were not acknowledged; None: not known."""
        try:
            told = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BUSY_AT + _MICROSECONDS.size)
        except OSError:  # it is closed, or not TCP
            return None
        if len(told) < _BUSY_AT + _MICROSECONDS.size:  # an older kernel
            return None
        return float(_MICROSECONDS.unpack_from(told, _BUSY_AT)[0]) / 1e6

    def close(self, reason: Reason, message: str = "") -> None:
        """Closes the connection; says goodbye first, if the stream is between two frames."""
        if not self.in_payload:
            self._say(memoryview(goodbye(reason, message)), time.monotonic() + _GOODBYE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR if self.in_payload else socket.SHUT_WR)
        self.sock.close()
        self._read = self._write = _closed
        self._ahead.clear()
        if self._records is not None:
            self._records.close()

    def _say(self, rest: memoryview, until: float) -> None:
        if self._blocked is not None:
            return  # a record is sent only in part, and its rest would not go out in time
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        try:
            while rest:
                count = self.write(rest)
                rest = rest[count:]
                if not count and (
                    time.monotonic() > until or not poll.poll(1000 * (until - time.monotonic()))
                ):
                    return
        except (EndOfStreamError, ValueError):
            return


def _closed(_: memoryview) -> int:
    raise OSError(errno.EBADF, "the connection is closed")


def _tls_read(sock: ssl.SSLSocket, view: memoryview) -> int:
    return cast("int", sock.read(len(view), view))
