"""Sealed records open once, in order, unchanged, and with the right key; otherwise not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from muster.worker.communicators.tcp import seal as tcp_seal
from muster.worker.communicators.tcp.seal import BrokenSealError, Sealer, direction_secret

ONE, TWO = b"1" * 32, b"2" * 32
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
        assert Sealer(left, secret, TWO).write(memoryview(data)) == len(data)
        return right.recv(1 << 20)


def read_all(sealer: Sealer, size: int) -> bytes:
    buffer = bytearray(size)
    have = 0
    while have < size:
        have += sealer.read(memoryview(buffer)[have:])
    return bytes(buffer)


def test_data_of_all_sizes_comes_out_as_it_went_in(pair: Pair) -> None:
    left, right = Sealer(pair[0], ONE, TWO), Sealer(pair[1], TWO, ONE)
    for size in (1, 100, 16384, 60_000):
        data = os.urandom(size)
        assert left.write(memoryview(data)) == size
        assert read_all(right, size) == data
        assert right.write(memoryview(data)) == size
        assert read_all(left, size) == data


def test_a_record_larger_than_the_view_is_handed_out_in_parts(pair: Pair) -> None:
    left, right = Sealer(pair[0], ONE, TWO), Sealer(pair[1], TWO, ONE)
    data = os.urandom(1000)
    left.write(memoryview(data))
    found = b""
    while len(found) < 1000:
        view = memoryview(bytearray(300))
        found += view[: right.read(view)]
    assert found == data
    with pytest.raises(BlockingIOError):
        right.read(memoryview(bytearray(1)))


def test_a_record_that_does_not_go_out_whole_is_tried_again(pair: Pair) -> None:
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    left, right = Sealer(pair[0], ONE, TWO), Sealer(pair[1], TWO, ONE)
    data = os.urandom(tcp_seal.RECORD_BYTES)
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


def test_what_travels_is_not_the_data(pair: Pair) -> None:
    assert b"gradient" not in record_of(b"gradient" * 100)


@pytest.mark.parametrize("place", [0, 3, 4, 50, -1])
def test_a_changed_byte_is_noticed(pair: Pair, place: int) -> None:
    record = bytearray(record_of(b"d" * 100))
    record[place] ^= 1
    pair[0].send(record + bytes(tcp_seal.RECORD_BYTES))
    with pytest.raises(BrokenSealError):
        Sealer(pair[1], TWO, ONE).read(memoryview(bytearray(200)))


def test_a_repeated_record_is_noticed(pair: Pair) -> None:
    pair[0].send(2 * record_of(b"d" * 100))
    sealer = Sealer(pair[1], TWO, ONE)
    assert sealer.read(memoryview(bytearray(200))) == 100
    with pytest.raises(BrokenSealError):
        sealer.read(memoryview(bytearray(200)))


def test_a_record_of_the_other_direction_or_of_another_key_does_not_open(pair: Pair) -> None:
    pair[0].send(record_of(b"d" * 100, secret=TWO))
    with pytest.raises(BrokenSealError):
        Sealer(pair[1], TWO, ONE).read(memoryview(bytearray(200)))


def test_an_impossible_length_is_refused_before_memory_is_taken(pair: Pair) -> None:
    pair[0].send(b"\xff\xff\xff\xff")
    with pytest.raises(BrokenSealError):
        Sealer(pair[1], TWO, ONE).read(memoryview(bytearray(200)))


def test_keys_are_replaced_on_both_sides_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_seal, "RECORDS_PER_KEY", 2)
    left, right = Sealer(pair[0], ONE, TWO), Sealer(pair[1], TWO, ONE)
    seen = set()
    for number in range(7):
        data = bytes([number]) * 50
        left.write(memoryview(data))
        seen.add(pair[1].recv(4096, socket.MSG_PEEK))
        assert read_all(right, 50) == data
    assert len(seen) == 7


def test_the_end_of_the_stream_is_told(pair: Pair) -> None:
    pair[0].close()
    assert Sealer(pair[1], TWO, ONE).read(memoryview(bytearray(1))) == 0


def test_each_direction_has_its_own_secret() -> None:
    assert direction_secret(ONE, "dialer", b"c") != direction_secret(ONE, "acceptor", b"c")
    assert direction_secret(ONE, "dialer", b"c") != direction_secret(ONE, "dialer", b"d")
    assert direction_secret(ONE, "dialer", b"c") != direction_secret(TWO, "dialer", b"c")


def test_releases_without_calls_into_buffers_do_as_well(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_seal, "_seal", tcp_seal._seal_copy)
    monkeypatch.setattr(tcp_seal, "_open", tcp_seal._open_copy)
    Sealer(pair[0], ONE, TWO).write(memoryview(b"old release"))
    assert read_all(Sealer(pair[1], TWO, ONE), 11) == b"old release"
