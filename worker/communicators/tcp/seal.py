"""Sealed records: what bulk data travels in once TLS has authenticated the two ends.

Python's TLS moves 16 KiB at a time, which costs more than the encryption. So each side draws a secret,
sends it inside the TLS session, and both switch the connection to records of up to 128 KiB under
AES-128-GCM of the ``cryptography`` package. A direction's key comes from both secrets, the TLS session
and the generation's unique ids; the nonce is the record's number, so that a record repeated, left out,
reordered or changed does not open. Keys are replaced long before GCM's limits.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Callable
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

RECORD_BYTES = 131072
"""Most bytes of plaintext in one record."""

RECORDS_PER_KEY = 1 << 19
"""Records (64 GiB at most) after which a direction's key is replaced by one derived from it."""

_HEAD = struct.Struct("!I")
_TAG_BYTES = 16
_ROOM = 4 * (RECORD_BYTES + _HEAD.size + _TAG_BYTES)


class BrokenSealError(Exception):
    """A record does not open: it was changed on the way, or is none."""


class _Key:
    """The key of one direction, and the number of the next record."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._number = 0
        self._cipher: Any = _cipher(secret)

    def next(self) -> tuple[Any, bytes]:
        """The cipher and the nonce of the next record."""
        if self._number == RECORDS_PER_KEY:
            self._secret = hmac.new(self._secret, b"muster next key", hashlib.sha256).digest()
            self._cipher, self._number = _cipher(self._secret), 0
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return self._cipher, nonce


def _cipher(secret: bytes) -> Any:
    return AESGCM(hmac.new(secret, b"muster key", hashlib.sha256).digest()[:16])


class Sealer:
    """Writes and reads sealed records on a non-blocking socket.

    Args:
        sock: the connection's TCP socket.
        send_secret: 32 bytes, key of what goes out.
        receive_secret: 32 bytes, key of what comes in.
    """

    def __init__(self, sock: socket.socket, send_secret: bytes, receive_secret: bytes) -> None:
        self._sock = sock
        self._send_key = _Key(send_secret)
        self._receive_key = _Key(receive_secret)
        self._out = memoryview(bytearray(_HEAD.size + RECORD_BYTES + _TAG_BYTES))
        self._unsent = self._out[:0]
        self._in = memoryview(bytearray(_ROOM))
        self._start = 0
        self._end = 0
        self._plain = memoryview(b"")

    def write(self, piece: memoryview) -> int:
        """Sends one record; returns the size of the piece, or 0 if it did not go out whole.

        After 0, the next call must be given the same piece again.

        Raises:
            OSError: the connection is broken.
        """
        if not self._unsent:
            size = len(piece)
            head = self._out[: _HEAD.size]
            _HEAD.pack_into(head, 0, size)
            cipher, nonce = self._send_key.next()
            end = _HEAD.size + size + _TAG_BYTES
            _seal(cipher, nonce, piece, head, self._out[_HEAD.size : end])
            self._unsent = self._out[:end]
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return 0
        return 0 if self._unsent else len(piece)

    def read(self, view: memoryview) -> int:
        """Fills the view from the next record, or what is left of the last; 0 at the end of the stream.

        Raises:
            BlockingIOError: no whole record is there.
            BrokenSealError: the record does not open.
            OSError: the connection is broken.
        """
        if not self._plain:
            record = self._record()
            if record is None:
                return 0
            head, sealed = record
            cipher, nonce = self._receive_key.next()
            size = len(sealed) - _TAG_BYTES
            try:
                if size <= len(view):
                    _open(cipher, nonce, sealed, head, view[:size])
                    return size
                self._plain = memoryview(cipher.decrypt(nonce, sealed, head))
            except InvalidTag:
                raise BrokenSealError("a record does not open") from None
        count = min(len(view), len(self._plain))
        view[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _record(self) -> tuple[memoryview, memoryview] | None:
        while True:
            have = self._end - self._start
            if have >= _HEAD.size:
                size = _HEAD.unpack_from(self._in, self._start)[0]
                if not 0 < size <= RECORD_BYTES:
                    raise BrokenSealError("a record has an impossible length")
                end = self._start + _HEAD.size + size + _TAG_BYTES
                if end <= self._end:
                    body = self._start + _HEAD.size
                    record = self._in[self._start : body], self._in[body:end]
                    self._start = end
                    return record
            if not self._fill(have):
                return None

    def _fill(self, have: int) -> bool:
        if have == 0:
            self._start = self._end = 0
        elif _ROOM - self._start < _HEAD.size + RECORD_BYTES + _TAG_BYTES:
            self._in[:have] = bytes(self._in[self._start : self._end])
            self._start, self._end = 0, have
        count = self._sock.recv_into(self._in[self._end :])
        self._end += count
        return count > 0


def _seal_copy(cipher: Any, nonce: bytes, data: memoryview, head: memoryview, out: memoryview) -> None:
    out[:] = cipher.encrypt(nonce, data, head)


def _seal_into(cipher: Any, nonce: bytes, data: memoryview, head: memoryview, out: memoryview) -> None:
    cipher.encrypt_into(nonce, data, head, out)


def _open_copy(cipher: Any, nonce: bytes, data: memoryview, head: memoryview, out: memoryview) -> None:
    out[:] = cipher.decrypt(nonce, data, head)


def _open_into(cipher: Any, nonce: bytes, data: memoryview, head: memoryview, out: memoryview) -> None:
    cipher.decrypt_into(nonce, data, head, out)


_Step = Callable[[Any, bytes, memoryview, memoryview, memoryview], None]
# Older releases of ``cryptography`` lack the calls that write into a buffer.
_seal: _Step = _seal_into if hasattr(AESGCM, "encrypt_into") else _seal_copy
_open: _Step = _open_into if hasattr(AESGCM, "decrypt_into") else _open_copy


def direction_secret(key: bytes, side: str, context: bytes) -> bytes:
    """The secret of what one side ("dialer" or "acceptor") sends.

    Args:
        key: what only members know.
        side: whose direction.
        context: both sides' secrets, and what ties them to this connection.
    """
    return hmac.new(key, b"muster-tcp-1 seal " + side.encode() + b"\0" + context, hashlib.sha256).digest()
