"""Attacks by members of a torch process group on the others: messages, and what each says of itself."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp import messages
from muster.communicators.tcp.backend import TcpBackend
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.frames import DTYPES
from muster.communicators.tcp.handshake import group_label
from muster.communicators.tcp.messages import SMALL_BYTES, Message, Messages
from muster.communicators.tcp.pending_group import PendingGroup
from muster.errors import CommunicatorError, WorkerError
from muster.programs.addresses import PeerListener, exchange_addresses
from muster.programs.assignment import Handover, HeldPlace
from tests.attacks.defences.attack import Attack, check

HEADER = struct.Struct("!4sBBBxiIQ")
OFFER, SMALL, ACCEPT, DATA, TAKEN, REFUSED = range(1, 7)
LAST_TAG = 99
FORGED = b"x\n2026-01-01 ERROR forged\x1b[2J"


class Field:
    """A victim, rank 0, and the connection by which rank 1 attacks it."""

    def __init__(self, victim: Messages, connection: PeerConnection) -> None:
        self.victim = victim
        self._connection = connection
        self._heard = b""

    def say(self, kind: int, number: int = 0, content: bytes = b"", *, size: int = -1, tag: int = 0) -> None:
        """Says a header, and what follows it."""
        size = len(content) if size < 0 else size
        self.put(HEADER.pack(b"MusM", kind, DTYPES.index("uint8"), 0, tag, number, size) + content)

    def put(self, data: bytes) -> None:
        """Sends bytes as they are, as far as the victim takes them."""
        view, until = memoryview(data), time.monotonic() + 60
        with contextlib.suppress(Exception):
            while view and time.monotonic() < until:
                view = view[self._connection.write(view) :]

    def heard(self, kind: int) -> int:
        """Reads until the victim has said this; returns the number that it is about."""
        buffer = memoryview(bytearray(1))
        while True:
            if self._connection.read_into(buffer):
                self._heard += bytes(buffer)
            if len(self._heard) == HEADER.size:
                _, said, _, _, _, number, _ = HEADER.unpack(self._heard)
                self._heard = b""
                if said == kind:
                    return int(number)

    def last_arrives(self) -> bool:
        """Whether the victim still takes a message of this member's, after all that it was sent."""
        got = self.victim.receive(memoryview(bytearray(4)), 1, LAST_TAG, "uint8")
        self.say(SMALL, 1 << 30, b"last", tag=LAST_TAG)
        assert got.wait(30)
        return got.error is None


def membership(rank: int, addresses: tuple[str, str]) -> Membership:
    peers = tuple(
        Peer(each, f"node-{each}", 10 + each, "h", "h", address) for each, address in enumerate(addresses)
    )
    return Membership("job", 3, "world", rank, peers, (b"u" * 128,))


@contextlib.contextmanager
def field() -> Iterator[Field]:
    backends = [TcpBackend(tls=None), TcpBackend(tls=None)]
    addresses = tuple(backend.open_endpoint("127.0.0.1") for backend in backends)
    both = [membership(rank, addresses) for rank in range(2)]  # type: ignore[arg-type]
    victim = Messages(both[0], backends[0].endpoint, path="p", timeout_s=60, others=dict)
    group = PendingGroup(both[1], group_label(both[1], "p/messages"))
    try:
        backends[1].endpoint.dial(group, 0, time.monotonic() + 30)
        with group.changed:
            assert group.changed.wait_for(lambda: 0 in group.arrived, 30)
        yield Field(victim, group.arrived[0])
    finally:
        victim.close()
        for connection in group.arrived.values():
            connection.sock.close()
        for backend in backends:
            backend.close()


def fill_by_small_messages(_: Path) -> bool:
    """Sends 8 MiB that nobody has called for, in messages that need not be called for."""
    with field() as here:
        waiting = here.victim.receive(memoryview(bytearray(1)), 1, 1, "uint8")
        for number in range(256):
            here.say(SMALL, number, bytes(SMALL_BYTES))
        assert not waiting.done() or waiting.error is not None
        return here.last_arrives()


def fill_by_offers(_: Path) -> bool:
    """Offers 70,000 messages, each of which costs the victim a place in a list."""
    with field() as here:
        here.victim.receive(memoryview(bytearray(1)), 1, 1, "uint8")
        offer = HEADER.pack(b"MusM", OFFER, DTYPES.index("uint8"), 0, 0, 0, 1)
        here.put(70_000 * offer)
        return here.last_arrives()


def forge_a_line_by_a_refusal(_: Path) -> bool:
    """Refuses a message with a sentence that writes a line of its own into the victim's log and terminal."""
    with field() as here:
        sent = here.victim.send(memoryview(b"hello"), 1, 0, "uint8")
        here.say(REFUSED, here.heard(SMALL), FORGED)
        assert sent.wait(30)
        return "\n" in str(sent.error)


def send_another_size(_: Path) -> bool:
    """Sends more than it had offered, so that what it says next is taken out of its own data."""
    with field() as here:
        got = here.victim.receive(memoryview(bytearray(4)), 1, 0, "uint8")
        here.say(OFFER, 0, size=4)
        here.heard(ACCEPT)
        here.say(DATA, 0, b"good" + HEADER.pack(b"MusM", SMALL, 0, 0, LAST_TAG, 7, 4) + b"evil")
        assert got.wait(30)
        return got.error is None


def without_bounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(messages, "MOST_ARRIVED", 1 << 40)
    patch.setattr(messages, "MOST_WAITING_BYTES", 1 << 40)


def take_any_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(messages, "fills", lambda view, size: True)


MEMBER = "a member of the process group"
ATTACKS = (
    Attack("fill the memory by messages", "memory", MEMBER, fill_by_small_messages, without_bounds),
    Attack("fill the memory by offers", "memory", MEMBER, fill_by_offers, without_bounds),
    Attack(
        "forge a line by a refusal",
        "the log",
        MEMBER,
        forge_a_line_by_a_refusal,
        lambda patch: patch.setattr(messages, "one_line", str),
    ),
    Attack("send another size than offered", "tensors", MEMBER, send_another_size, take_any_size),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)


@pytest.mark.parametrize("wrong", ["taken of what was offered", "accepted what was sent", "no such message"])
def test_who_answers_out_of_step_is_named_and_alone_lost(wrong: str) -> None:
    with field() as here:
        small = wrong == "accepted what was sent"
        sent = here.victim.send(memoryview(bytes(4 if small else SMALL_BYTES + 1)), 1, 0, "uint8")
        number = here.heard(SMALL if small else OFFER)
        here.say(ACCEPT if small else TAKEN, number + (wrong == "no such message"), size=7)
        assert sent.wait(30)
        assert isinstance(sent.error, CommunicatorError)
        assert "rank 1 (node node-1" in str(sent.error) and "out of step" in str(sent.error)


# ---------------------------------------------------------------- what each says of itself


class Said:
    """A store in which the others have said what the test wants."""

    def __init__(self, other: bytes) -> None:
        self._held = {"muster/1": other}

    def set(self, key: str, value: str) -> None:
        self._held[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._held.get(key, self._held["muster/1"])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


ROW = [3, 1, "127.0.0.1:5", 11]
LIES = {
    "no JSON": b"\xff{",
    "endless depth": b"[" * 200_000,
    "an object": b"{}",
    "a number": b"7",
    "too few": json.dumps(ROW[:3]).encode(),
    "too many": json.dumps([*ROW, 1]).encode(),
    "a generation to come": json.dumps([4, *ROW[1:]]).encode(),
    "a generation of text": json.dumps(["x\n\x1b[2J" * 1000, *ROW[1:]]).encode(),
    "a member that is not": json.dumps([3, 2, *ROW[2:]]).encode(),
    "a member before all": json.dumps([3, -1, *ROW[2:]]).encode(),
    "half a member": json.dumps([3, 0.5, *ROW[2:]]).encode(),
    "an address that is a list": json.dumps([3, 1, ["127.0.0.1", 5], 11]).encode(),
    "an address without a port": json.dumps([3, 1, "127.0.0.1", 11]).encode(),
    "a port beyond all": json.dumps([3, 1, "127.0.0.1:99999", 11]).encode(),
    "a terminal's command": json.dumps([3, 1, "\x1b[2J:5", 11]).encode(),
    "no incarnation": json.dumps([*ROW[:3], 0]).encode(),
    "half an incarnation": json.dumps([*ROW[:3], 1.5]).encode(),
    "an incarnation of text": json.dumps([*ROW[:3], "x"]).encode(),
    "an incarnation beyond all": json.dumps([*ROW[:3], 1 << 64]).encode(),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_lies_about_itself_is_refused_in_words(lie: str, rank: int) -> None:
    """Rank 0 reads what each says; the others read what rank 0 makes of it, which may be a lie as well."""
    places = tuple(HeldPlace(f"node-{each}", "h", "h") for each in range(2))
    handover = Handover("job", 3, 0, places, "127.0.0.1", "", False, (b"u" * 128,))
    listener = PeerListener(1, TcpBackend(tls=None), "127.0.0.1:4", 10)
    said = LIES[lie] if rank == 0 else b"[" + json.dumps(ROW).encode() + b"," + LIES[lie] + b"]"
    store = Said(said)
    if rank == 1:  # its own key does not count: the table is rank 0's
        store.set("muster/all", "")
        store._held["muster/all"] = said
    with pytest.raises(WorkerError) as error:
        exchange_addresses(store, handover, listener, "world", rank, 2)
    assert str(error.value).isprintable() and len(str(error.value)) < 500


def test_a_member_that_tells_the_truth_is_met() -> None:
    places = tuple(HeldPlace(f"node-{each}", "h", "h") for each in range(2))
    handover = Handover("job", 3, 0, places, "127.0.0.1", "", False, (b"u" * 128,))
    listener = PeerListener(1, TcpBackend(tls=None), "127.0.0.1:4", 10)
    met, _ = exchange_addresses(Said(json.dumps(ROW).encode()), handover, listener, "world", 0, 2)
    assert [(peer.node_id, peer.incarnation) for peer in met.peers] == [("node-0", 10), ("node-1", 11)]


def test_messages_of_good_members_pass() -> None:
    """The bounds are those that senders keep to."""
    with field() as here:
        sent: list[Message] = [here.victim.send(memoryview(bytes(100)), 1, 0, "uint8") for _ in range(3)]
        for message in sent:
            here.say(TAKEN, here.heard(SMALL), size=100)
            here._connection.read_into(memoryview(bytearray(100)))
            assert message.wait(30) and message.error is None
