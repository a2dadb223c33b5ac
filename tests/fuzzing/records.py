"""The record layer against a second, plain implementation of the standard.

A script of bytes says which records come, right or wrong, and what somebody on the way does to them. Both
implementations must take the same data out of them, and end for the same reason.
"""

from __future__ import annotations

import socket

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from muster.communicators.tcp.records import (
    LARGE_RECORD_SIZE_LIMIT,
    MAX_IDLE_RECORDS,
    TLS_RECORD_SIZE_LIMIT,
    AlertDescription,
    RecordLayer,
    RecordLayerError,
    hkdf_expand_label,
)

OURS, THEIRS = b"1" * 32, b"2" * 32
LIMITS = (TLS_RECORD_SIZE_LIMIT, 20_000, LARGE_RECORD_SIZE_LIMIT)
_WIRE_BYTES = 1 << 17
_FEW = 3  # of the largest records go over the wire in one script
_CONTROL = (21, 22)


class PlainKey:
    """One direction's key, by the letter of RFC 8446, section 5.3."""

    def __init__(self, secret: bytes) -> None:
        self.secret, self.number = secret, 0
        self.cipher = AESGCM(hkdf_expand_label(secret, "key", b"", 16))
        self.iv = hkdf_expand_label(secret, "iv", b"", 12)

    def nonce(self) -> bytes:
        """Of the next record."""
        number = self.number.to_bytes(12, "big")
        self.number += 1
        return bytes(a ^ b for a, b in zip(self.iv, number, strict=True))

    def updated(self) -> PlainKey:
        """The next key."""
        return PlainKey(hkdf_expand_label(self.secret, "traffic upd", b"", 32))


def plain_header(length: int, limit: int) -> bytes:
    """In front of so many encrypted bytes: RFC 8446's up to its limit, above it the draft's."""
    if limit <= TLS_RECORD_SIZE_LIMIT:
        return b"\x17\x03\x03" + length.to_bytes(2, "big")
    size, mark = (1, 0) if length < 64 else (2, 1) if length < 16384 else (4, 2)
    return (mark << (8 * size - 2) | length).to_bytes(size, "big")


def plain_record(
    key: PlainKey, limit: int, content: bytes, content_type: int = 23, padding: int = 0
) -> bytes:
    """One record, of any content, type and padding."""
    inner = content + bytes((content_type,)) + bytes(padding)
    header = plain_header(len(inner) + 16, limit)
    return header + key.cipher.encrypt(key.nonce(), inner, header)


def _cut(wire: bytes, limit: int) -> tuple[int, int] | AlertDescription | None:
    """Sizes of header and body of the first record; why it is none; or None: it is not all there."""
    if limit <= TLS_RECORD_SIZE_LIMIT:
        if wire[:3] != b"\x17\x03\x03"[: len(wire)]:
            return AlertDescription.UNEXPECTED_MESSAGE
        size, most = 5, (1 << 14) + 256
        length = int.from_bytes(wire[3:5], "big")
    else:
        size, most = {0: 1, 1: 2, 2: 4, 3: 0}[wire[0] >> 6], limit + 16
        length = int.from_bytes(wire[:size], "big") % (1 << max(0, 8 * size - 2))
        if not size or (len(wire) >= size and plain_header(length, limit) != wire[:size]):
            return AlertDescription.RECORD_OVERFLOW
    if len(wire) < size:
        return None
    if not 17 <= length <= most:
        return AlertDescription.RECORD_OVERFLOW
    return (size, length) if len(wire) >= size + length else None


def _control(content: bytes, content_type: int) -> AlertDescription | None:
    """Why a record that carries no data ends the connection; None: it does not."""
    if content_type not in _CONTROL or not content:
        return AlertDescription.UNEXPECTED_MESSAGE
    if content_type == 21:
        return AlertDescription.CLOSE_NOTIFY if len(content) == 2 else AlertDescription.DECODE_ERROR
    if content[0] != 24:
        return AlertDescription.UNEXPECTED_MESSAGE
    if len(content) != 5 or content[1:4] != b"\0\0\1":
        return AlertDescription.DECODE_ERROR
    return AlertDescription.ILLEGAL_PARAMETER if content[4] > 1 else None


def plain_read(wire: bytes, limit: int) -> tuple[bytes, AlertDescription | None, bool]:
    """The data in these records, why reading ends before their end, and whether a KeyUpdate is asked for."""
    key, data, idle, asked = PlainKey(THEIRS), b"", 0, False
    while wire:
        cut = _cut(wire, limit)
        if not isinstance(cut, tuple):
            return data, cut, asked
        header, body, wire = wire[: cut[0]], wire[cut[0] : sum(cut)], wire[sum(cut) :]
        try:
            inner = key.cipher.decrypt(key.nonce(), body, header).rstrip(b"\0")
        except InvalidTag:
            return data, AlertDescription.BAD_RECORD_MAC, asked
        if not inner:
            return data, AlertDescription.UNEXPECTED_MESSAGE, asked
        content, content_type = inner[:-1], inner[-1]
        data += content if content_type == 23 else b""
        idle = 0 if content_type == 23 and content else idle + 1
        alert = None if content_type == 23 else _control(content, content_type)
        if idle > MAX_IDLE_RECORDS:
            alert = AlertDescription.UNEXPECTED_MESSAGE
        if alert is not None:
            return data, alert, asked
        if content_type == 22:
            key, asked = key.updated(), asked or content[4] == 1
    return data, None, asked


def wire_bytes(limit: int) -> int:
    """How much a script may send in records of this limit."""
    return max(_WIRE_BYTES, _FEW * limit + limit // 2)


def written(script: bytes) -> tuple[bytes, int]:
    """The records that a script makes, and the limit that they are made for."""
    steps = iter(script)
    limit = LIMITS[next(steps, 0) % len(LIMITS)]
    key, wire = PlainKey(THEIRS), b""
    for step in steps:
        what, size, detail = step % 12, next(steps, 0), next(steps, 0)
        content, content_type, padding = bytes((detail,)) * size, 23, detail % 3
        if what == 1:
            content = bytes((detail,)) * (limit - 1 - size % 4)
        elif what in (2, 3):
            content, content_type = bytes((24, 0, 0, 1, size % 2)), 22
        elif what == 4:
            content, content_type = bytes((24, 0, 0, 1, detail, 0))[: size % 7], 22
        elif what == 5:
            content, content_type = bytes((1, detail, 0))[: size % 4], 21
        elif what == 6:
            content_type = detail
        elif what == 7:
            padding = limit - size
        record = plain_record(key, limit, content, content_type, padding)
        if what == 8:
            place = detail % len(record)
            record = record[:place] + bytes((record[place] ^ 1 << size % 8,)) + record[place + 1 :]
        elif what == 9:
            record = (record + record, b"", record[: size % 40])[detail % 3]
        if what in (2, 3):
            key = key.updated()
        if len(wire) + len(record) > wire_bytes(limit):
            break
        wire += record
    return wire, limit


def talk_in_records(script: bytes) -> None:
    """Plays a script to the record layer.

    Raises:
        RecordLayerError: where the plain implementation ends for that reason, too.
    """
    wire, limit = written(script)
    data, alert, asked = plain_read(wire, limit)
    near, far = socket.socketpair()
    with near, far:
        for each in (near, far):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _WIRE_BYTES)
            each.setblocking(False)
        layer = RecordLayer(near, OURS, THEIRS, limit)
        found, error = b"", None
        scale = 1 + limit // 4096
        views = [memoryview(bytearray(1 + size * scale)) for size in script[1:16] or b"\x64"]
        piece = 5000 if limit < _WIRE_BYTES else 50_000
        for start in range(0, len(wire), piece):
            far.send(wire[start : start + piece])
            found, error = _read_all(layer, views, found)
            if error is not None:
                break
        assert found == data, "other data came out"
        assert (error and error.description) == alert, f"ended for {error}, not for {alert!r}"
        _check_answer(layer, far, limit, asked)
    if error is not None:
        raise error


def _read_all(
    layer: RecordLayer, views: list[memoryview], found: bytes
) -> tuple[bytes, RecordLayerError | None]:
    for turn in range(64 * _WIRE_BYTES):
        view = views[turn % len(views)]
        try:
            found += view[: layer.read(view)]
        except BlockingIOError:
            return found, None
        except RecordLayerError as error:
            return found, error
    raise AssertionError("reading does not end")


def _check_answer(layer: RecordLayer, far: socket.socket, limit: int, asked: bool) -> None:
    """What we send next begins with a KeyUpdate if one was asked for, and is under the next key then."""
    key, wanted = PlainKey(OURS), b""
    if asked:
        wanted = plain_record(key, limit, b"\x18\0\0\1\0", 22)
        key = key.updated()
    wanted += plain_record(key, limit, b"data")
    assert layer.write(memoryview(b"data")) == 4
    assert far.recv(1 << 16) == wanted
