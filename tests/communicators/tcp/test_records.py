"""Records open once, in order, unchanged, and with the right key; and are those of the standard."""

from __future__ import annotations

import hashlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.communicators.tcp import records as tcp_records
from muster.communicators.tcp.records import (
    MAX_IDLE_RECORDS,
    TLS_RECORD_SIZE_LIMIT,
    AlertDescription,
    RecordLayer,
    RecordLayerError,
    application_traffic_secrets,
    derive_secret,
    from_varuint,
    hkdf_expand_label,
    hkdf_extract,
    varuint,
)
from tests.fuzzing.records import PlainKey, plain_record, talk_in_records

ONE, TWO = b"1" * 32, b"2" * 32
DATA_TYPES = (20, 24, 0, 255)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


def record_of(data: bytes, secret: bytes = ONE) -> bytes:
    """The bytes of the first record of a direction."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        assert RecordLayer(left, secret, TWO).write(memoryview(data)) == len(data)
        return right.recv(1 << 20)


def read_all(layer: RecordLayer, size: int) -> bytes:
    buffer = bytearray(size)
    have = 0
    while have < size:
        have += layer.read(memoryview(buffer)[have:])
    return bytes(buffer)


def refusal_of(pair: Pair, wire: bytes, limit: int = tcp_records.LARGE_RECORD_SIZE_LIMIT) -> str:
    """The alert with which reading these bytes ends."""
    pair[0].send(wire)
    layer, view = RecordLayer(pair[1], TWO, ONE, limit), memoryview(bytearray(200))
    with pytest.raises(RecordLayerError) as refused:
        for _ in range(1000):
            layer.read(view)
    return refused.value.description.name


# ---------------------------------------------------------------- the standard's own values


def octets(text: str) -> bytes:
    return bytes.fromhex(text)


# RFC 8448, section 3: a simple 1-RTT handshake with TLS_AES_128_GCM_SHA256.
SHARED_SECRET = octets("8bd4054fb55b9d63fdfbacf9f04b9f0d35e6d63f537563efd46272900f89492d")
EARLY_SECRET = octets("33ad0a1c607ec03b09e6cd9893680ce210adf300aa1f2660e1b22e10f170f92a")
HANDSHAKE_SECRET = octets("1dc826e93606aa6fdc0aadc12f741b01046aa6b99f691ed221a9f0ca043fbeac")
MASTER_SECRET = octets("18df06843d13a08bf2a449844c5f8a478001bc4d4c627984d5a41da8d0402919")
TRANSCRIPT_HASH = octets("9608102a0f1ccc6db6250b7b7e417b1a000eaada3daae4777a7686c9ff83df13")
CLIENT_SECRET = octets("9e40646ce79a7f9dc05af8889bce6552875afa0b06df0087f792ebb7c17504a5")
SERVER_SECRET = octets("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643")
CLIENT_KEY, CLIENT_IV = octets("17422dda596ed5d9acd890e3c63f5051"), octets("5b78923dee08579033e523d9")
SERVER_KEY, SERVER_IV = octets("9f02283b6c9c07efc26bb9f2ac92e356"), octets("cf782b88dd83549aadf1e984")
PAYLOAD = bytes(range(50))
CLIENT_RECORD = octets(
    "1703030043a23f7054b62c94d0affafe8228ba55cbefacea42f914aa66bcab3f2b9819a8a5b46b395bd54a9a20441e2b"
    "62974e1f5a6292a2977014bd1e3deae63aeebb21694915e4"
)
SERVER_RECORD = octets(
    "17030300432e937e11ef4ac740e538ad36005fc4a46932fc3225d05f82aa1b36e30efaf97d90e6dffc602dcb501a59a8"
    "fcc49c4bf2e5f0a21c0047c2abf332540dd032e167c2955d"
)
CLIENT_ALERT = octets("1703030013c9872760655666b74d7ff1153efd6db6d0b0e3")


def test_the_key_schedule_is_that_of_the_standard() -> None:
    empty = hashlib.sha256().digest()
    assert hkdf_extract(bytes(32), bytes(32)) == EARLY_SECRET
    assert hkdf_extract(derive_secret(EARLY_SECRET, "derived", empty), SHARED_SECRET) == HANDSHAKE_SECRET
    assert hkdf_extract(derive_secret(HANDSHAKE_SECRET, "derived", empty), bytes(32)) == MASTER_SECRET
    secrets = application_traffic_secrets(bytes(32), SHARED_SECRET, TRANSCRIPT_HASH)
    assert secrets == (CLIENT_SECRET, SERVER_SECRET)
    assert hkdf_expand_label(CLIENT_SECRET, "key", b"", 16) == CLIENT_KEY
    assert hkdf_expand_label(CLIENT_SECRET, "iv", b"", 12) == CLIENT_IV
    assert hkdf_expand_label(SERVER_SECRET, "key", b"", 16) == SERVER_KEY
    assert hkdf_expand_label(SERVER_SECRET, "iv", b"", 12) == SERVER_IV


def test_records_with_the_standards_header_are_those_of_its_traces(pair: Pair) -> None:
    client = RecordLayer(pair[0], CLIENT_SECRET, SERVER_SECRET, TLS_RECORD_SIZE_LIMIT)
    client.write(memoryview(PAYLOAD))
    assert pair[1].recv(1000) == CLIENT_RECORD
    server = RecordLayer(pair[0], SERVER_SECRET, CLIENT_SECRET, TLS_RECORD_SIZE_LIMIT)
    server.write(memoryview(b"where the trace has a NewSessionTicket"))
    pair[1].recv(1000)
    server.write(memoryview(PAYLOAD))
    assert pair[1].recv(1000) == SERVER_RECORD


def test_the_traces_records_open(pair: Pair) -> None:
    pair[0].send(CLIENT_RECORD + CLIENT_ALERT)
    server = RecordLayer(pair[1], SERVER_SECRET, CLIENT_SECRET, TLS_RECORD_SIZE_LIMIT)
    view = memoryview(bytearray(50))
    assert server.read(view) == 50
    assert view == PAYLOAD
    with pytest.raises(RecordLayerError, match="close_notify"):
        server.read(view)


@pytest.mark.parametrize(
    ("length", "header"),
    [(0, "00"), (63, "3f"), (64, "4040"), (16383, "7fff"), (16384, "80004000"), ((1 << 30) - 1, "bfffffff")],
)
def test_lengths_are_those_of_the_draft(length: int, header: str) -> None:
    assert varuint(length) == octets(header)
    assert from_varuint(memoryview(octets(header))) == length


@pytest.mark.parametrize("header", ["4000", "403f", "80000000", "80003fff"])
def test_a_length_in_more_bytes_than_needed_is_refused(pair: Pair, header: str) -> None:
    assert refusal_of(pair, octets(header) + bytes(100)) == "RECORD_OVERFLOW"


def test_a_record_of_ours_is_one_of_the_draft() -> None:
    wanted = plain_record(PlainKey(ONE), tcp_records.LARGE_RECORD_SIZE_LIMIT, b"d" * 60_000)
    assert wanted[:4] == varuint(60_017)
    assert record_of(b"d" * 60_000) == wanted


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("limit", [TLS_RECORD_SIZE_LIMIT, tcp_records.LARGE_RECORD_SIZE_LIMIT])
def test_data_of_all_sizes_comes_out_as_it_went_in(pair: Pair, limit: int) -> None:
    left, right = RecordLayer(pair[0], ONE, TWO, limit), RecordLayer(pair[1], TWO, ONE, limit)
    for size in (1, 40, 47, 48, 100, 16366, 16367, 16384, 60_000):
        data = os.urandom(min(size, limit - 1))
        assert left.write(memoryview(data)) == len(data)
        assert read_all(right, len(data)) == data
        assert right.write(memoryview(data)) == len(data)
        assert read_all(left, len(data)) == data


def test_a_record_larger_than_the_view_is_handed_out_in_parts(pair: Pair) -> None:
    left, right = RecordLayer(pair[0], ONE, TWO), RecordLayer(pair[1], TWO, ONE)
    data = os.urandom(1000)
    left.write(memoryview(data))
    found = b""
    while len(found) < 1000:
        view = memoryview(bytearray(300))
        found += view[: right.read(view)]
    assert found == data
    with pytest.raises(BlockingIOError):
        right.read(memoryview(bytearray(1)))


def test_nothing_is_written_behind_the_view(pair: Pair) -> None:
    left, right = RecordLayer(pair[0], ONE, TWO), RecordLayer(pair[1], TWO, ONE)
    left.write(memoryview(b"d" * 100))
    buffer = bytearray(b"." * 200)
    assert right.read(memoryview(buffer)[:100]) == 100
    assert buffer == b"d" * 100 + b"." * 100


def test_a_record_that_does_not_go_out_whole_is_tried_again(pair: Pair) -> None:
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    left, right = RecordLayer(pair[0], ONE, TWO), RecordLayer(pair[1], TWO, ONE)
    data = os.urandom(tcp_records.RECORD_BYTES)
    buffer, have, tries = memoryview(bytearray(len(data))), 0, 0
    sent = left.write(memoryview(data))
    while have < len(data):
        tries += 1
        try:
            have += right.read(buffer[have:])
        except BlockingIOError:
            sent = sent or left.write(memoryview(data))
    assert sent == len(data)
    assert tries > 1
    assert bytes(buffer) == data


def test_one_thread_may_write_while_another_reads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = RecordLayer(pair[0], ONE, TWO), RecordLayer(pair[1], TWO, ONE)
    seal, unseal, found = tcp_records.encrypt, tcp_records.decrypt, []

    def seal_late(*record: Any) -> None:
        """What is to be sealed is in place, and the other thread reads now."""
        monkeypatch.undo()
        found.append(read_all(left, 1000))
        seal(*record)

    def unseal_early(*record: Any) -> int:
        """What has been opened is in place, and the other thread writes now."""
        content_type = unseal(*record)
        monkeypatch.undo()
        left.write(memoryview(b"2" * 1000))
        return content_type

    right.write(memoryview(b"a" * 1000))
    right.write(memoryview(b"b" * 1000))
    monkeypatch.setattr(tcp_records, "encrypt", seal_late)
    left.write(memoryview(b"1" * 1000))
    monkeypatch.setattr(tcp_records, "decrypt", unseal_early)
    found.append(read_all(left, 1000))
    assert found == [b"a" * 1000, b"b" * 1000]
    assert read_all(right, 2000) == b"1" * 1000 + b"2" * 1000


def test_what_travels_is_not_the_data() -> None:
    assert b"gradient" not in record_of(b"gradient" * 100)


def test_padding_and_empty_records_carry_nothing(pair: Pair) -> None:
    key, limit = PlainKey(ONE), tcp_records.LARGE_RECORD_SIZE_LIMIT
    parts = [(b"a", 23, 1000), (b"", 23, 0), (b"", 23, 50), (b"b\0", 23, 0)]
    pair[0].send(b"".join(plain_record(key, limit, *part) for part in parts))
    assert read_all(RecordLayer(pair[1], TWO, ONE), 3) == b"ab\0"


# ---------------------------------------------------------------- what may not come


@pytest.mark.parametrize("place", [0, 3, 50, -1])
def test_a_changed_byte_is_noticed(pair: Pair, place: int) -> None:
    record = bytearray(record_of(b"d" * 100))
    record[place] ^= 1
    assert refusal_of(pair, bytes(record) + bytes(60_000)) in ("BAD_RECORD_MAC", "RECORD_OVERFLOW")


def test_a_repeated_record_is_noticed(pair: Pair) -> None:
    assert refusal_of(pair, 2 * record_of(b"d" * 100)) == "BAD_RECORD_MAC"


def test_a_record_of_the_other_direction_or_of_another_key_does_not_open(pair: Pair) -> None:
    assert refusal_of(pair, record_of(b"d" * 100, secret=TWO)) == "BAD_RECORD_MAC"


@pytest.mark.parametrize("wire", [b"\xff\xff\xff\xff", varuint(tcp_records.LARGE_RECORD_SIZE_LIMIT + 17)])
def test_an_impossible_length_is_refused_before_it_is_there(pair: Pair, wire: bytes) -> None:
    assert refusal_of(pair, wire) == "RECORD_OVERFLOW"


@pytest.mark.parametrize("content_type", DATA_TYPES)
def test_a_record_of_another_type_is_refused(pair: Pair, content_type: int) -> None:
    record = plain_record(PlainKey(ONE), tcp_records.LARGE_RECORD_SIZE_LIMIT, b"x", content_type)
    # A type of 0 is padding, and leaves the letter for the type.
    assert refusal_of(pair, record) == "UNEXPECTED_MESSAGE"


@pytest.mark.parametrize(
    ("message", "alert"),
    [
        (b"\x18\0\0\1\2", "ILLEGAL_PARAMETER"),
        (b"\x18\0\0\1", "DECODE_ERROR"),
        (b"\x18\0\0\2\0\0", "DECODE_ERROR"),
        (b"\x04\0\0\1\0", "UNEXPECTED_MESSAGE"),
        (b"", "UNEXPECTED_MESSAGE"),
    ],
)
def test_no_handshake_message_but_a_key_update_is_taken(pair: Pair, message: bytes, alert: str) -> None:
    record = plain_record(PlainKey(ONE), tcp_records.LARGE_RECORD_SIZE_LIMIT, message, 22)
    assert refusal_of(pair, record) == alert


def test_a_peer_that_sends_no_data_is_not_listened_to_for_ever(pair: Pair) -> None:
    key, limit = PlainKey(ONE), tcp_records.LARGE_RECORD_SIZE_LIMIT
    wire = b"".join(plain_record(key, limit, b"") for _ in range(MAX_IDLE_RECORDS + 1))
    assert refusal_of(pair, wire) == "UNEXPECTED_MESSAGE"


def test_the_end_of_the_stream_is_seen(pair: Pair) -> None:
    pair[0].close()
    assert RecordLayer(pair[1], TWO, ONE).read(memoryview(bytearray(1))) == 0


# ---------------------------------------------------------------- keys


def test_keys_are_replaced_by_a_key_update(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_records, "RECORDS_PER_KEY", 2)
    left, right = RecordLayer(pair[0], ONE, TWO), RecordLayer(pair[1], TWO, ONE)
    key, limit = PlainKey(ONE), tcp_records.LARGE_RECORD_SIZE_LIMIT
    for number in range(7):
        data, wanted = bytes([number]) * 50, b""
        if number and number % 2 == 0:
            wanted = plain_record(key, limit, b"\x18\0\0\1\0", 22)
            key = key.updated()
        left.write(memoryview(data))
        assert pair[1].recv(4096, socket.MSG_PEEK) == wanted + plain_record(key, limit, data)
        assert read_all(right, 50) == data


def test_a_key_update_that_is_asked_for_is_made(pair: Pair) -> None:
    limit = tcp_records.LARGE_RECORD_SIZE_LIMIT
    theirs, ours = PlainKey(ONE), PlainKey(TWO)
    pair[0].send(plain_record(theirs, limit, b"\x18\0\0\1\1", 22))
    pair[0].send(plain_record(theirs.updated(), limit, b"under the next key"))
    layer = RecordLayer(pair[1], TWO, ONE)
    assert read_all(layer, 18) == b"under the next key"
    layer.write(memoryview(b"answer"))
    update = plain_record(ours, limit, b"\x18\0\0\1\0", 22)
    assert pair[0].recv(1000) == update + plain_record(ours.updated(), limit, b"answer")


def test_a_key_is_replaced_well_before_the_limit_of_the_draft() -> None:
    """RFC 8446, section 5.5, has 2^24.5 records of 2^14 bytes; of larger ones there may be fewer."""
    allowed = 2**24.5 * 2**14 / tcp_records.RECORD_BYTES
    assert allowed / 4 >= tcp_records.RECORDS_PER_KEY


def test_each_direction_has_its_own_secret_from_every_input() -> None:
    made = [
        application_traffic_secrets(*inputs)
        for inputs in ((ONE, ONE, ONE), (TWO, ONE, ONE), (ONE, TWO, ONE), (ONE, ONE, TWO))
    ]
    assert len({secret for pair in made for secret in pair}) == 8


def test_releases_without_calls_into_buffers_do_as_well(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_records, "encrypt", tcp_records.encrypt_copy)
    monkeypatch.setattr(tcp_records, "decrypt", tcp_records.decrypt_copy)
    RecordLayer(pair[0], ONE, TWO).write(memoryview(b"old release"))
    assert read_all(RecordLayer(pair[1], TWO, ONE), 11) == b"old release"


# ---------------------------------------------------------------- all states


def test_whatever_comes_is_read_as_the_plain_implementation_reads_it() -> None:
    ends: set[AlertDescription | None] = set()
    for seed in range(120):
        try:
            talk_in_records(random.Random(seed).randbytes(1 + seed % 90))
        except RecordLayerError as error:
            ends.add(error.description)
        else:
            ends.add(None)
    assert ends >= {None, *AlertDescription} - {AlertDescription.ILLEGAL_PARAMETER}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_connection_that_carries_little_takes_little_memory(pair: Pair) -> None:
    """Memory that is touched at its beginning has to be zeroed, while a job waits for its connections."""
    layers = []
    before = resident_bytes()
    for _ in range(64):
        sending, receiving = RecordLayer(pair[0], ONE, TWO), RecordLayer(pair[1], TWO, ONE)
        assert sending.write(memoryview(b"word")) == 4
        assert read_all(receiving, 4) == b"word"
        layers += [sending, receiving]
    assert resident_bytes() - before < len(layers) * tcp_records.RECORD_BYTES / 8
