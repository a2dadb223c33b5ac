"""Attacks on the encrypted records between ranks, by one in the middle who knows where each record begins.

What is cut or put in at an arbitrary byte is tried in ``on_one_job``. Here each attack is carried out
twice: with its defence the victim's collective ends with an error that says so, and without it there is a
wrong number, or another error.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag

from muster.certs.runtime.store import Credentials
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp import records
from muster.communicators.tcp.communicator import SMALL_BYTES, TcpCommunicator
from muster.communicators.tcp.connection import EndOfStreamError
from muster.communicators.tcp.frames import MAGIC, Reason
from muster.communicators.tcp.records import RECORD_BYTES, TrafficKey
from muster.errors import PeerLostError, WorkerError
from tests.attacks.defences.attack import Without
from tests.attacks.defences.test_connections import one_secret, without_numbers, without_tags
from tests.communicators.tcp.world import Office, World, make_world, together

TIMEOUT_S = 5.0

CALL, FIRST = 1, 2
"""Records of data on a connection: 0 is that of connecting, then the first collective's call and numbers."""

ELEMENTS = 4 * RECORD_BYTES // 8
"""Of an array whose all-reduce by two sends four records of numbers each way."""

Records = Iterator[bytes]
Attack = Callable[[Records], Records]
Try = Callable[[list[Credentials]], list[Any]]


# ---------------------------------------------------------------- in the middle


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def tls_and_data(source: socket.socket, attack: Attack) -> Records:
    """All records of a direction: TLS's as they come, then what the attack makes of those of the data."""
    first = _exactly(source, 1)
    while first[0] in range(20, 24):  # no frame is so short that its record begins like this
        head = first + _exactly(source, 4)
        yield head + _exactly(source, int.from_bytes(head[3:], "big"))
        first = _exactly(source, 1)
    yield from attack(_data(source, first))


def _data(source: socket.socket, first: bytes) -> Records:
    with contextlib.suppress(EOFError):
        while True:
            header = first + _exactly(source, (1 << (first[0] >> 6)) - 1)
            length = int.from_bytes(header, "big") & ((1 << (8 * len(header) - 2)) - 1)
            yield header + _exactly(source, length)
            first = _exactly(source, 1)


class Relay:
    """Stands before the port of a rank; what those who dial it send is attacked, record by record.

    Args:
        port: that rank's.
        attacks: for one connection after the other, in the order in which they come.

    Attributes:
        answers: all that the rank has sent on each connection.
        played: whether a recording was asked for, and somebody has dialed and got it.
    """

    def __init__(self, port: int, attacks: Sequence[Attack]) -> None:
        self._port = port
        self._attacks = list(attacks)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._recording = b""
        self.answers: list[bytearray] = []
        self.played = False
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def play(self, recording: bytes) -> None:
        """Answers the next who dials with this, and lets nothing through to the rank."""
        self._recording = recording

    def close(self) -> None:
        """Ends the port and all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._recording:
                    with client, contextlib.suppress(OSError):
                        client.sendall(self._recording)
                    self._recording, self.played = b"", True
                    continue
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += (client, server)
                attack = self._attacks.pop(0) if self._attacks else untouched
                self.answers.append(kept := bytearray())
                threading.Thread(target=_attacked, args=(client, server, attack), daemon=True).start()
                threading.Thread(target=_passed_on, args=(server, client, kept), daemon=True).start()


def _attacked(source: socket.socket, target: socket.socket, attack: Attack) -> None:
    with contextlib.suppress(OSError, EOFError):
        for record in tls_and_data(source, attack):
            target.sendall(record)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        while source.recv(1 << 18):  # who sends notices nothing
            pass


def _passed_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            kept += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# ---------------------------------------------------------------- what is done to the records


def untouched(data: Records) -> Records:
    yield from data


def altered(record: bytes) -> bytes:
    """One bit of the last number in it is another."""
    return record[:-20] + bytes((record[-20] ^ 1,)) + record[-19:]


def flip(place: int) -> Attack:
    def attack(data: Records) -> Records:
        yield from islice(data, place)
        yield altered(next(data))
        yield from data

    return attack


def replay(data: Records) -> Records:
    """A record once more, in the place of the next."""
    yield from islice(data, FIRST)
    record = next(data)
    yield from (record, record)
    next(data)
    yield from data


def reorder(data: Records) -> Records:
    yield from islice(data, FIRST)
    first, second = islice(data, 2)
    yield from (second, first)
    yield from data


def truncate(data: Records) -> Records:
    yield from islice(data, FIRST + 1)
    record = next(data)
    yield record[: len(record) // 2]


def close_between(data: Records) -> Records:
    yield from islice(data, FIRST + 1)


def write_plainly(data: Records) -> Records:
    """Numbers of one's own, in a record that nobody has sealed."""
    yield from islice(data, FIRST)
    header, encrypted = (record := next(data))[:4], record[4:]
    yield header + np.full(RECORD_BYTES // 8, 1e6).tobytes().ljust(len(encrypted), b"\x17")
    yield from data


class Splice:
    """Takes one record out of a connection, and puts it into another in the place of that of its number."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._taken = queue.SimpleQueue[bytes]()

    def source(self, data: Records) -> Records:
        """Passes all on, and keeps the record."""
        for number, record in enumerate(data):
            if number == self._place:
                self._taken.put(record)
            yield record

    def target(self, data: Records) -> Records:
        """Puts it in."""
        yield from islice(data, self._place)
        next(data)
        yield self._taken.get(timeout=60)
        yield from data


# ---------------------------------------------------------------- the victims


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> list[Credentials]:
    office = Office(tmp_path_factory.mktemp("office"))
    return [office.credentials(node=f"n{rank}") for rank in range(3)]


@contextlib.contextmanager
def ranks(credentials: list[Credentials], *attacks: Sequence[Attack]) -> Iterator[tuple[World, list[Relay]]]:
    """As many ranks as there are lists of attacks, each behind a relay for the connections to it."""
    world = make_world(credentials[: len(attacks)])
    peers = world.memberships[0].peers
    relays = [
        Relay(int(peer.data_address.rpartition(":")[2]), mine)
        for peer, mine in zip(peers, attacks, strict=True)
    ]
    there = tuple(
        replace(peer, data_address=f"127.0.0.1:{relay.port}")
        for peer, relay in zip(peers, relays, strict=True)
    )
    world.memberships = [replace(each, peers=there) for each in world.memberships]
    try:
        yield world, relays
    finally:
        world.close()
        for relay in relays:
            relay.close()


def numbers(rank: int, seed: int, count: int) -> Any:
    return np.random.default_rng(10 * seed + rank).integers(0, 1000, count).astype(np.float64)


def each(communicators: Sequence[TcpCommunicator], action: Callable[[TcpCommunicator], Any]) -> list[Any]:
    """Does the same on all ranks at once."""
    return together([lambda c=c: action(c) for c in communicators])  # type: ignore[misc]


def reduced(communicators: Sequence[TcpCommunicator], seed: int = 0, count: int = ELEMENTS) -> list[Any]:
    """All-reduces; returns of each rank its error, or whether its sums are right. Closes."""
    right = sum(numbers(rank, seed, count) for rank in range(len(communicators)))

    def run(communicator: TcpCommunicator) -> bool:
        array = numbers(communicator.rank, seed, count)
        communicator.timeout_s = TIMEOUT_S
        communicator.all_reduce(array, array, ReduceOp.SUM)
        return bool((array == right).all())

    outcomes = each(communicators, run)
    each(communicators, lambda communicator: communicator.close())
    return outcomes


def held(outcomes: Sequence[Any], saying: str) -> bool:
    """Whether the victim, rank 0, has lost its peer in these words, and the others have no wrong number."""
    victim, *others = outcomes
    lost = isinstance(victim, PeerLostError) and saying in str(victim)
    return lost and all(other is True or isinstance(other, WorkerError) for other in others)


# ---------------------------------------------------------------- the attacks

DOES_NOT_OPEN, BROKE = "broke: a record does not open", "broke: the process ended or the network failed"


def in_one_connection(attack: Attack) -> Try:
    def outcomes(credentials: list[Credentials]) -> list[Any]:
        with ranks(credentials, [attack], []) as (world, _):
            return reduced(world.connect())

    return outcomes


def from_another_pair(credentials: list[Credentials]) -> list[Any]:
    """What rank 2 tells rank 1 goes to rank 0, as if rank 1 had said it."""
    splice = Splice(CALL)
    with ranks(credentials, [splice.target], [splice.source], []) as (world, _):
        return reduced(world.connect(), count=100)


def from_another_lane(credentials: list[Credentials]) -> list[Any]:
    """Two groups of the same two ranks, as the program and the autograd engine have them."""
    splice = Splice(FIRST)
    with ranks(credentials, [untouched, splice.source, splice.target], []) as (world, _):
        whole = world.connect()
        lanes = [each(whole, lambda c, name=name: c.split(name, [0, 1])) for name in "ab"]  # type: ignore[misc]
        assert reduced(lanes[0], seed=1) == [True, True]
        outcomes = reduced(lanes[1], seed=2)
        each(whole, lambda communicator: communicator.close())
        return outcomes


def from_an_older_generation(credentials: list[Credentials]) -> list[Any]:
    splice = Splice(FIRST)
    with ranks(credentials, [splice.source, splice.target], []) as (world, _):
        assert reduced(world.connect(), seed=1) == [True, True]
        world.next()
        return reduced(world.connect(), seed=2)


def takes_what_does_not_open(patch: pytest.MonkeyPatch) -> None:
    """A record without a good tag is plaintext."""
    decrypt = records.decrypt

    def lenient(key: TrafficKey, data: memoryview, header: memoryview, content: memoryview) -> int:
        kept = bytes(data)
        try:
            return decrypt(key, data, header, content)
        except InvalidTag:
            content[:] = kept[: len(content)]
            return kept[len(content)]

    patch.setattr(records, "decrypt", lenient)


def takes_each_end_for_a_goodbye(patch: pytest.MonkeyPatch) -> None:
    made = EndOfStreamError.__init__
    orderly = (Reason.DONE, "")
    patch.setattr(EndOfStreamError, "__init__", lambda self, farewell: made(self, farewell or orderly))


@pytest.mark.parametrize(
    ("outcomes", "saying", "without"),
    [
        pytest.param(in_one_connection(flip(CALL)), DOES_NOT_OPEN, without_tags, id="flip a call's bit"),
        pytest.param(in_one_connection(flip(FIRST)), DOES_NOT_OPEN, without_tags, id="flip a number's bit"),
        pytest.param(in_one_connection(replay), DOES_NOT_OPEN, without_numbers, id="replay"),
        pytest.param(in_one_connection(reorder), DOES_NOT_OPEN, without_numbers, id="reorder"),
        pytest.param(in_one_connection(truncate), BROKE, takes_each_end_for_a_goodbye, id="truncate"),
        pytest.param(in_one_connection(close_between), BROKE, takes_each_end_for_a_goodbye, id="close"),
        pytest.param(
            in_one_connection(write_plainly), DOES_NOT_OPEN, takes_what_does_not_open, id="write plainly"
        ),
        pytest.param(from_another_pair, DOES_NOT_OPEN, one_secret, id="splice from another pair"),
        pytest.param(from_another_lane, DOES_NOT_OPEN, one_secret, id="splice from another lane"),
        pytest.param(from_an_older_generation, DOES_NOT_OPEN, one_secret, id="splice from an old generation"),
    ],
)
def test_the_victim_is_told_and_nobody_has_a_wrong_number(
    credentials: list[Credentials], outcomes: Try, saying: str, without: Without
) -> None:
    assert held(found := outcomes(credentials), saying), found
    with pytest.MonkeyPatch.context() as patch:
        without(patch)
        assert not held(found := outcomes(credentials), saying), f"another defence stops it: {found}"


def exchange_bytes(communicator: TcpCommunicator) -> None:
    """Receives what might begin a goodbye, and so looks at what follows it."""
    for _ in range(2):
        pieces = [np.frombuffer(MAGIC[:1], np.uint8).copy() for _ in range(4)]
        communicator.all_to_all_pieces(pieces[:2], pieces[2:], "uint8")


def exchange_numbers(communicator: TcpCommunicator) -> None:
    """When the peer is lost, looks whether its call has come nevertheless."""
    array = np.ones(SMALL_BYTES // 8 + 1)
    communicator.all_reduce(array, array, ReduceOp.SUM)


def together_with_those_beside_it(begin: int, bad: int, count: int) -> Attack:
    """Alters a record, which arrives in one piece with others."""

    def attack(data: Records) -> Records:
        yield from islice(data, begin)
        several = list(islice(data, count))
        several[bad - begin] = altered(several[bad - begin])
        yield b"".join(several)
        yield from data

    return attack


@pytest.mark.parametrize(
    ("exchange", "attack"),
    [
        (exchange_bytes, together_with_those_beside_it(CALL + 1, CALL + 2, 2)),
        (exchange_numbers, together_with_those_beside_it(CALL, CALL, 2)),
    ],
)
def test_nothing_is_read_behind_a_record_that_does_not_open(
    credentials: list[Credentials], exchange: Callable[[TcpCommunicator], None], attack: Attack
) -> None:
    with ranks(credentials, [attack], []) as (world, _):
        communicators = world.connect()
        for communicator in communicators:
            communicator.timeout_s = 1.0
        outcomes = each(communicators, exchange)
        each(communicators, lambda communicator: communicator.close())
    assert held(outcomes, DOES_NOT_OPEN), outcomes


def test_a_recording_that_is_played_to_who_dials_costs_it_one_more_dial(
    credentials: list[Credentials],
) -> None:
    with ranks(credentials, [], []) as (world, [relay, _]):
        assert reduced(world.connect(), seed=1) == [True, True]
        relay.play(bytes(relay.answers[0]))
        world.next()
        assert reduced(world.connect(), seed=2) == [True, True]
        assert relay.played and len(relay.answers) == 2
