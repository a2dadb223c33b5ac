"""The record protocol of TLS 1.3 on a bare socket, with larger records than Python's TLS makes.

Python's TLS moves 16 KiB at a time, which costs more than the encryption. So once TLS has authenticated the
two ends, both switch the connection to these records: RFC 8446, sections 5.2 to 5.5 (record protection) and
7.1 to 7.3 (key schedule) with TLS_AES_128_GCM_SHA256, and for records of more than 2^14 bytes the header of
draft-ietf-tls-super-jumbo-record-limit. Names are those of the RFC. docs/records.md says which code carries
out which section, and which parts of TLS are left out.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import socket
from collections.abc import Callable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

RECORD_BYTES = 524288
"""Maximum content of one record, in bytes: a chunk of a collective."""

LARGE_RECORD_SIZE_LIMIT = RECORD_BYTES + 1
"""Maximum size of a TLSInnerPlaintext that either side accepts, in bytes: the content and its type."""

TLS_RECORD_SIZE_LIMIT = (1 << 14) + 1
"""The same without the draft (RFC 8446, section 5.4); records then have RFC 8446's header."""

RECORDS_PER_KEY = 1 << 17
"""Records under one key, 64 GiB at most. RFC 8446 allows 2^24.5 of 2^14 bytes, which is 2^19.5 of ours."""

MAX_IDLE_RECORDS = 32
"""Maximum number of consecutive records without data: empty records and KeyUpdates."""

KEY_BYTES = 16
IV_BYTES = 12
TAG_BYTES = 16
HASH_BYTES = 32

_TLS_HEADER = b"\x17\x03\x03"
"""opaque_type application_data, legacy_record_version 0x0303."""

_DATA = 23
"""ContentType.APPLICATION_DATA, as a plain number for code that runs for each record."""

_ALERT_BYTES = 2
"""Size of an alert: one byte for its level, one for its description."""

_TLS_HEADER_BYTES = 5
_TLS_EXPANSION = 256
"""How many bytes longer than its content RFC 8446 lets a TLSCiphertext be."""


class ContentType(enum.IntEnum):
    """The type of a record's content (RFC 8446, section 5.1)."""

    CHANGE_CIPHER_SPEC = 20
    ALERT = 21
    HANDSHAKE = 22
    APPLICATION_DATA = 23


class AlertDescription(enum.IntEnum):
    """Why a connection ends (RFC 8446, section 6)."""

    CLOSE_NOTIFY = 0
    UNEXPECTED_MESSAGE = 10
    BAD_RECORD_MAC = 20
    RECORD_OVERFLOW = 22
    ILLEGAL_PARAMETER = 47
    DECODE_ERROR = 50


class KeyUpdateRequest(enum.IntEnum):
    """Whether the other side must replace its key, too (RFC 8446, section 4.6.3)."""

    UPDATE_NOT_REQUESTED = 0
    UPDATE_REQUESTED = 1


_KEY_UPDATE = b"\x18\x00\x00\x01"
"""The handshake message key_update (24) up to its one byte, the request."""

_SAYINGS = {
    AlertDescription.CLOSE_NOTIFY: "the other side has closed the connection",
    AlertDescription.UNEXPECTED_MESSAGE: "a record holds what has no place here",
    AlertDescription.BAD_RECORD_MAC: "a record does not open",
    AlertDescription.RECORD_OVERFLOW: "a record has an impossible length",
    AlertDescription.ILLEGAL_PARAMETER: "a KeyUpdate asks for what there is not",
    AlertDescription.DECODE_ERROR: "a record holds no whole message",
}


class RecordLayerError(Exception):
    """A record was altered, or is not allowed here. Nothing more is read.

    Attributes:
        description: the alert that RFC 8446 names for it.
    """

    def __init__(self, description: AlertDescription) -> None:
        self.description = description
        super().__init__(f"{_SAYINGS[description]} ({description.name.lower()})")


# ---------------------------------------------------------------- the key schedule


def hkdf_extract(salt: bytes, input_keying_material: bytes) -> bytes:
    """HKDF-Extract of RFC 5869 with SHA-256."""
    return hmac.digest(salt, input_keying_material, "sha256")


def hkdf_expand_label(secret: bytes, label: str, context: bytes, length: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446, section 7.1: ``length`` bytes made of a secret of 32."""
    name = b"tls13 " + label.encode()
    hkdf_label = length.to_bytes(2, "big") + bytes((len(name),)) + name + bytes((len(context),)) + context
    return HKDFExpand(SHA256(), length, hkdf_label).derive(secret)


def derive_secret(secret: bytes, label: str, transcript_hash: bytes) -> bytes:
    """Derive-Secret of RFC 8446, section 7.1, given Transcript-Hash(Messages)."""
    return hkdf_expand_label(secret, label, transcript_hash, HASH_BYTES)


def application_traffic_secrets(
    psk: bytes, shared_secret: bytes, transcript_hash: bytes
) -> tuple[bytes, bytes]:
    """The key schedule of RFC 8446, section 7.1, from its inputs to the secrets of the two directions.

    Args:
        psk: the pre-shared key.
        shared_secret: takes the place of (EC)DHE's result.
        transcript_hash: the transcript hash of the handshake, up to the point to which the secrets belong.

    Returns:
        client_application_traffic_secret_0 and server_application_traffic_secret_0, 32 bytes each.
    """
    empty = hashlib.sha256().digest()
    early_secret = hkdf_extract(bytes(HASH_BYTES), psk)
    handshake_secret = hkdf_extract(derive_secret(early_secret, "derived", empty), shared_secret)
    master_secret = hkdf_extract(derive_secret(handshake_secret, "derived", empty), bytes(HASH_BYTES))
    client = derive_secret(master_secret, "c ap traffic", transcript_hash)
    return client, derive_secret(master_secret, "s ap traffic", transcript_hash)


class TrafficKey:
    """The key of one direction, made of its traffic secret, and the number of the next record.

    Args:
        traffic_secret: application_traffic_secret_N, 32 bytes.

    Attributes:
        cipher: AES under [sender]_write_key, used with GCM.
        sequence_number: the sequence number of the next record under this key.
    """

    def __init__(self, traffic_secret: bytes) -> None:
        self._install(traffic_secret)

    def _install(self, traffic_secret: bytes) -> None:
        self._secret = traffic_secret
        self.cipher = algorithms.AES128(hkdf_expand_label(traffic_secret, "key", b"", KEY_BYTES))
        self._iv = int.from_bytes(hkdf_expand_label(traffic_secret, "iv", b"", IV_BYTES), "big")
        self.sequence_number = 0

    def nonce(self) -> bytes:
        """Returns the next record's nonce (write_iv XOR its sequence number, section 5.3); counts it."""
        number = self.sequence_number
        self.sequence_number = number + 1
        return (self._iv ^ number).to_bytes(IV_BYTES, "big")

    def update(self) -> None:
        """Switches to application_traffic_secret_N+1 (section 7.2), and counts from 0 again (section 5.3)."""
        self._install(hkdf_expand_label(self._secret, "traffic upd", b"", HASH_BYTES))


# ---------------------------------------------------------------- headers


def varuint(length: int) -> bytes:
    """Packs a length as TLSLargeCiphertext does, in the fewest of 1, 2 or 4 bytes; two bits say how many."""
    if length < 1 << 6:
        return bytes((length,))
    if length < 1 << 14:
        return (1 << 14 | length).to_bytes(2, "big")
    return (2 << 30 | length).to_bytes(4, "big")


def from_varuint(data: memoryview) -> int:
    """Reads a length from a varuint of 1, 2 or 4 bytes.

    Raises:
        RecordLayerError: the varuint is longer than its value needs.
    """
    size = len(data)
    length = int.from_bytes(data, "big") & ((1 << (8 * size - 2)) - 1)
    if size > 1 and length < 1 << (4 * size - 2):
        raise RecordLayerError(AlertDescription.RECORD_OVERFLOW)
    return length


def _room(size: int) -> memoryview:
    """Allocates memory that costs nothing until written: zeroing megabytes takes as long as a handshake."""
    return np.empty(size, np.uint8).data


class RecordLayer:
    """Writes and reads records on a non-blocking socket; one thread may write while another reads.

    Args:
        sock: the connection's TCP socket.
        send_secret: application_traffic_secret_0 of outgoing records, 32 bytes.
        receive_secret: application_traffic_secret_0 of incoming records, 32 bytes.
        record_size_limit: most bytes of a TLSInnerPlaintext, both ways. Above RFC 8446's 2^14 + 1 the
            records are TLSLargeCiphertext, else TLSCiphertext.
    """

    def __init__(
        self,
        sock: socket.socket,
        send_secret: bytes,
        receive_secret: bytes,
        record_size_limit: int = LARGE_RECORD_SIZE_LIMIT,
    ) -> None:
        self._sock = sock
        self._send_key = TrafficKey(send_secret)
        self._receive_key = TrafficKey(receive_secret)
        self._large = record_size_limit > TLS_RECORD_SIZE_LIMIT
        self._most_encrypted = record_size_limit + (TAG_BYTES if self._large else _TLS_EXPANSION - 1)
        record = 5 + self._most_encrypted
        self._out = _room(record + 5 + len(_KEY_UPDATE) + 2 + TAG_BYTES)
        self._unsent = self._out[:0]
        self._answer_key_update = False
        self._in = _room(record)  # not larger: data must still be in the cache when it is decrypted
        self._record_room = record
        self._start = 0
        self._end = 0
        self._content_in = _room(self._most_encrypted)
        self._plain = memoryview(b"")
        self._idle_records = 0
        self._failure: AlertDescription | None = None

    def close(self) -> None:
        """Drops the buffers; nothing is read or written any more.

        A broken communicator and its error refer to each other through the traceback. Otherwise, megabytes of
        buffers would stay allocated until the garbage collector runs, which so few objects do not trigger.
        """
        self._in = self._out = self._content_in = self._plain = self._unsent = memoryview(b"")

    # ------------------------------------------------------------ writing

    def write(self, piece: memoryview) -> int:
        """Sends a record of data; returns the size of the piece, or 0 if it was not sent completely.

        After 0, the next call must be given the same piece again.

        Args:
            piece: at most the limit less the byte of its type.

        Raises:
            OSError: the connection is broken.
        """
        if not self._unsent:
            end = self._key_update() if self._key_update_is_due() else 0
            end = self._protect(_DATA, piece, end)
            self._unsent = self._out[:end]
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return 0
        return 0 if self._unsent else len(piece)

    def _key_update_is_due(self) -> bool:
        return self._answer_key_update or self._send_key.sequence_number >= RECORDS_PER_KEY

    def _key_update(self) -> int:
        """Sends a KeyUpdate before the next record, and replaces the key after it."""
        self._answer_key_update = False  # first: the peer may ask again while this thread writes
        message = _KEY_UPDATE + bytes((KeyUpdateRequest.UPDATE_NOT_REQUESTED,))
        end = self._protect(ContentType.HANDSHAKE, memoryview(message), 0)
        self._send_key.update()
        return end

    def _protect(self, content_type: int, content: memoryview, start: int) -> int:
        """Writes one record to the output buffer; returns the offset of its end (section 5.2)."""
        length = len(content) + 1 + TAG_BYTES
        header = varuint(length) if self._large else _TLS_HEADER + length.to_bytes(2, "big")
        body = start + len(header)
        end = body + length
        self._out[start:body] = header
        encrypt(self._send_key, content, content_type, header, self._out[body:end])
        return end

    # ------------------------------------------------------------ reading

    def read(self, view: memoryview) -> int:
        """Fills the view from the next record, or the rest of the last one; 0 at the end of the stream.

        Further bytes of the view may have been overwritten, also if decryption fails.

        Raises:
            BlockingIOError: no complete record has arrived.
            RecordLayerError: this record or an earlier one cannot be decrypted, or is not allowed here.
            OSError: the connection is broken.
        """
        if self._failure is not None:  # otherwise the next record would pass, as if this one were never sent
            raise RecordLayerError(self._failure)
        try:
            return self._read(view)
        except RecordLayerError as error:
            self._failure = error.description
            raise

    def _read(self, view: memoryview) -> int:
        while not self._plain:
            record = self._next_record()
            if record is None:
                return 0
            header, encrypted = record
            end, room = len(encrypted) - TAG_BYTES - 1, len(view)
            content = (view if end <= room else self._content_in)[:end]
            try:
                content_type = decrypt(self._receive_key, encrypted, header, content)
            except InvalidTag:
                raise RecordLayerError(AlertDescription.BAD_RECORD_MAC) from None
            if content_type == _DATA and 0 < end <= room:
                self._idle_records = 0
                return end
            self._plain = memoryview(self._content(bytes((*content, content_type))))
        count = min(len(view), len(self._plain))
        view[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _content(self, inner: bytes) -> bytes:
        """Returns the data of a TLSInnerPlaintext without padding (section 5.4); b"" if it has none.

        Handles content of other types.
        """
        content = inner.rstrip(b"\0")
        if not content:
            raise RecordLayerError(AlertDescription.UNEXPECTED_MESSAGE)
        content_type, content = content[-1], content[:-1]
        if content_type == _DATA and content:
            self._idle_records = 0
            return content
        self._idle_records += 1
        if self._idle_records > MAX_IDLE_RECORDS:
            raise RecordLayerError(AlertDescription.UNEXPECTED_MESSAGE)
        if content_type == ContentType.ALERT and content:
            whole = len(content) == _ALERT_BYTES
            raise RecordLayerError(AlertDescription.CLOSE_NOTIFY if whole else AlertDescription.DECODE_ERROR)
        if content_type == ContentType.HANDSHAKE and content:
            self._handshake(content)
        elif content_type != _DATA:
            raise RecordLayerError(AlertDescription.UNEXPECTED_MESSAGE)
        return b""

    def _handshake(self, message: bytes) -> None:
        """Handles a KeyUpdate, the only handshake message that is allowed here; it has its own record."""
        if message[0] != _KEY_UPDATE[0]:
            raise RecordLayerError(AlertDescription.UNEXPECTED_MESSAGE)
        if len(message) != len(_KEY_UPDATE) + 1 or not message.startswith(_KEY_UPDATE):
            raise RecordLayerError(AlertDescription.DECODE_ERROR)
        request = message[-1]
        if request not in (KeyUpdateRequest.UPDATE_NOT_REQUESTED, KeyUpdateRequest.UPDATE_REQUESTED):
            raise RecordLayerError(AlertDescription.ILLEGAL_PARAMETER)
        self._receive_key.update()
        if request == KeyUpdateRequest.UPDATE_REQUESTED:
            self._answer_key_update = True

    def _next_record(self) -> tuple[memoryview, memoryview] | None:
        """Returns header and encrypted_record of the next record; None at the end of the stream."""
        while True:
            start, end = self._start, self._end
            found = self._header(start, end) if start < end else None
            if found is not None:
                body, length = found
                if not TAG_BYTES < length <= self._most_encrypted:
                    raise RecordLayerError(AlertDescription.RECORD_OVERFLOW)
                after = body + length
                if after <= end:
                    self._start = after
                    return self._in[start:body], self._in[body:after]
            if not self._fill(end - start):
                return None

    def _header(self, start: int, end: int) -> tuple[int, int] | None:
        """Returns the offset of the encrypted_record and its length; None if the header is incomplete."""
        if self._large:
            size = 1 << (self._in[start] >> 6)
            if size > 4:
                raise RecordLayerError(AlertDescription.RECORD_OVERFLOW)
            if end - start < size:
                return None
            return start + size, from_varuint(self._in[start : start + size])
        there = self._in[start : min(end, start + _TLS_HEADER_BYTES)]
        if there[: len(_TLS_HEADER)] != _TLS_HEADER[: len(there)]:
            raise RecordLayerError(AlertDescription.UNEXPECTED_MESSAGE)
        if len(there) < _TLS_HEADER_BYTES:
            return None
        return start + _TLS_HEADER_BYTES, int.from_bytes(there[len(_TLS_HEADER) :], "big")

    def _fill(self, have: int) -> bool:
        if have == 0:
            self._start = self._end = 0
        elif len(self._in) - self._start < self._record_room:
            self._in[:have] = self._in[self._start : self._end]
            self._start, self._end = 0, have
        count = self._sock.recv_into(self._in[self._end :])
        self._end += count
        return count > 0


# ---------------------------------------------------------------- sealing and opening

# The content and the byte of its type are sealed one after the other, so that neither is copied beside it.


def encrypt_copy(
    key: TrafficKey, content: memoryview, content_type: int, header: bytes, out: memoryview
) -> None:
    """Encrypts as ``encrypt`` does, through a copy, for releases of ``cryptography`` that need spare room."""
    gcm = Cipher(key.cipher, modes.GCM(key.nonce())).encryptor()
    gcm.authenticate_additional_data(header)
    out[:] = gcm.update(content) + gcm.update(bytes((content_type,))) + gcm.finalize() + gcm.tag


def _encrypt_into(
    key: TrafficKey, content: memoryview, content_type: int, header: bytes, out: memoryview
) -> None:
    size = len(content)
    gcm = Cipher(key.cipher, modes.GCM(key.nonce())).encryptor()
    gcm.authenticate_additional_data(header)
    gcm.update_into(content, out[:size])
    gcm.update_into(bytes((content_type,)), out[size : size + 1])
    gcm.finalize()
    out[size + 1 :] = gcm.tag


def decrypt_copy(key: TrafficKey, data: memoryview, header: memoryview, content: memoryview) -> int:
    """Decrypts as ``decrypt`` does, through a copy, for older releases of ``cryptography``."""
    gcm = Cipher(key.cipher, modes.GCM(key.nonce(), bytes(data[-TAG_BYTES:]))).decryptor()
    gcm.authenticate_additional_data(header)
    inner = gcm.update(data[:-TAG_BYTES]) + gcm.finalize()
    content[:] = inner[:-1]
    return inner[-1]


def _decrypt_into(key: TrafficKey, data: memoryview, header: memoryview, content: memoryview) -> int:
    size, content_type = len(content), memoryview(bytearray(1))
    gcm = Cipher(key.cipher, modes.GCM(key.nonce(), bytes(data[-TAG_BYTES:]))).decryptor()
    gcm.authenticate_additional_data(header)
    gcm.update_into(data[:size], content)
    gcm.update_into(data[size:-TAG_BYTES], content_type)
    gcm.finalize()
    return content_type[0]


def _fills_buffers() -> bool:
    """Whether the installed ``cryptography`` can fill an output buffer to its last byte."""
    try:
        Cipher(algorithms.AES128(bytes(KEY_BYTES)), modes.GCM(bytes(IV_BYTES))).encryptor().update_into(
            b"\0", memoryview(bytearray(1))
        )
    except ValueError:
        return False
    return True


_IN_PLACE = _fills_buffers()
encrypt: Callable[[TrafficKey, memoryview, int, bytes, memoryview], None] = (
    _encrypt_into if _IN_PLACE else encrypt_copy
)
decrypt: Callable[[TrafficKey, memoryview, memoryview, memoryview], int] = (
    _decrypt_into if _IN_PLACE else decrypt_copy
)
