"""Attacks on the CPU communicator's connections: by somebody in the middle, and by members."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, modes

from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp import frames, handshake, records
from muster.communicators.tcp.connection import EndOfStreamError, PeerConnection
from muster.communicators.tcp.frames import Reason, frame, goodbye, read_frame
from muster.communicators.tcp.handshake import (
    HELLO,
    PROOF,
    REPLY,
    Hello,
    accept,
    group_label,
    handshake_context,
    proof,
)
from muster.communicators.tcp.pending_group import PendingGroup
from muster.communicators.tcp.records import RecordLayer, RecordLayerError, TrafficKey, varuint
from muster.errors import CommunicatorError, WorkerError
from tests.attacks.defences.attack import Attack, check
from tests.fuzzing.records import PlainKey, plain_record

ONE, TWO = b"1" * 32, b"2" * 32
GRADIENT = b"gradient" * 8


# ---------------------------------------------------------------- in the middle


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def sent(*pieces: bytes, secret: bytes = ONE) -> list[bytes]:
    """The records of these pieces, as they pass somebody in the middle."""
    with pair() as (near, far):
        layer = RecordLayer(near, secret, TWO)
        found: list[bytes] = []
        for piece in pieces:
            layer.write(memoryview(piece))
            found.append(far.recv(1 << 16))
        return found


def taken(wire: bytes, secret: bytes = ONE) -> bytes:
    """What a victim takes out of these bytes."""
    with pair() as (near, far):
        far.send(wire)
        layer, view, found = RecordLayer(near, TWO, secret), memoryview(bytearray(1000)), b""
        with suppress(BlockingIOError, RecordLayerError):
            while count := layer.read(view):
                found += view[:count]
        return found


def decrypt_without_tag(key: TrafficKey, data: memoryview, header: memoryview, content: memoryview) -> int:
    """AES-GCM that decrypts without looking at the tag."""
    counter = Cipher(key.cipher, modes.CTR(key.nonce() + b"\0\0\0\2"))
    inner = counter.decryptor().update(bytes(data[: -records.TAG_BYTES]))
    content[:] = inner[:-1]
    return inner[-1]


def without_tags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "decrypt", decrypt_without_tag)


def without_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrafficKey, "nonce", lambda self: self._iv.to_bytes(12, "big"))


def alter(_: Path) -> bool:
    (record,) = sent(GRADIENT)
    return taken(record[:20] + bytes((record[20] ^ 8,)) + record[21:]) not in (b"", GRADIENT)


def repeat(_: Path) -> bool:
    (record,) = sent(GRADIENT)
    return taken(2 * record) == 2 * GRADIENT


def leave_out(_: Path) -> bool:
    second = sent(b"first", b"second")[1]
    return taken(second) == b"second"


def swap(_: Path) -> bool:
    first, second = sent(b"first", b"second")
    return taken(second + first) == b"secondfirst"


def reflect(_: Path) -> bool:
    """Sends a side what it has sent itself."""
    ours, theirs = records.application_traffic_secrets(ONE, TWO, ONE)
    (record,) = sent(GRADIENT, secret=ours)
    return taken(record, secret=theirs) == GRADIENT


def replay_a_recording(_: Path) -> bool:
    """Plays a connection's records to the next connection of the same two, under the same unique ids."""
    earlier = records.application_traffic_secrets(ONE, b"drawn for one connection", ONE)[0]
    later = records.application_traffic_secrets(ONE, b"drawn for the next", ONE)[0]
    return taken(sent(GRADIENT, secret=earlier)[0], secret=later) == GRADIENT


def one_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "derive_secret", lambda secret, label, transcript: ONE)


def announce_and_send_nothing(_: Path) -> bool:
    """Makes a worker wait, and make room, for a record of a gigabyte."""
    with pair() as (near, far):
        far.send(varuint(1 << 29))
        try:
            RecordLayer(near, TWO, ONE).read(memoryview(bytearray(10)))
        except BlockingIOError:
            return True
        except RecordLayerError:
            return False
        raise AssertionError("nothing was sent")


def without_record_limit(patch: pytest.MonkeyPatch) -> None:
    made = RecordLayer.__init__

    def unlimited(self: RecordLayer, *arguments: object) -> None:
        made(self, *arguments)  # type: ignore[arg-type]
        self._most_encrypted = 1 << 30

    patch.setattr(RecordLayer, "__init__", unlimited)


def end_it_politely(_: Path) -> bool:
    """Cuts a connection, with a goodbye of one's own, so that its loss looks like an end as planned."""
    with pair() as (near, far):
        far.send(goodbye(Reason.DONE, ""))
        far.close()
        connection = PeerConnection(near, 1, SEALED(near))
        return connection.read_ahead() == (Reason.DONE, "")


def SEALED(sock: socket.socket) -> RecordLayer | None:
    return RecordLayer(sock, TWO, ONE)


def without_records(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "SEALED", lambda sock: None)


def keep_busy(_: Path) -> bool:
    """A member that sends nothing but KeyUpdates, each of which costs the other a key."""
    key, wire = PlainKey(ONE), b""
    for _number in range(100):
        wire += plain_record(key, records.LARGE_RECORD_SIZE_LIMIT, b"\x18\0\0\1\0", 22)
        key = key.updated()
    return taken(wire + plain_record(key, records.LARGE_RECORD_SIZE_LIMIT, b"data")) == b"data"


# ---------------------------------------------------------------- members


def membership(rank: int, unique_id: bytes = b"u" * 128, generation: int = 3) -> Membership:
    peers = tuple(Peer(each, f"node-{each}", 10 + each, "h", "h", "") for each in range(2))
    return Membership("job", generation, "world", rank, peers, (unique_id,))


class OpenGate:
    """Bounds nothing."""

    def hello_arrived(self) -> None:
        pass

    def may_begin(self) -> bool:
        return True

    def certificate_shown(self, certificate: bytes) -> None:
        pass


class Listening:
    """A victim that takes connections as rank 0, one step at a time."""

    def __init__(self, victim: Membership) -> None:
        self.group = PendingGroup(victim, group_label(victim, ""))
        self.near, far = tcp_pair()
        self.near.settimeout(10)
        self._steps = accept(far, None, self._find, "somewhere", OpenGate())
        self.let_in = False

    def _find(self, label: bytes, generation: int) -> PendingGroup | None:
        if generation != self.group.membership.generation or label != self.group.label:
            raise CommunicatorError("no such group")
        return self.group

    def turn(self) -> None:
        """Lets the victim do what it can."""
        try:
            for _ in range(10):
                next(self._steps)
                time.sleep(0.001)
        except StopIteration as done:
            self.let_in = True
            done.value[1].sock.close()
        except WorkerError:
            self.near.close()

    def close(self) -> None:
        self._steps.close()
        self.near.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def come_in(victim: Membership, answer: Callable[[Hello, bytes], bytes], hello: Hello | None = None) -> bool:
    """Says hello, and answers what the victim replies; whether it lets us in."""
    listening = Listening(victim)
    try:
        said = hello or Hello(3, 1, 0, group_label(victim, ""), b"n" * 32)
        listening.near.sendall(said.encode())
        listening.turn()
        reply = b""
        with suppress(OSError):
            while len(reply) < REPLY.size and (piece := listening.near.recv(REPLY.size - len(reply))):
                reply += piece
        if len(reply) == REPLY.size:
            listening.near.sendall(answer(said, reply))
            listening.turn()
        return listening.let_in
    finally:
        listening.close()


def answer_as(member: Membership) -> Callable[[Hello, bytes], bytes]:
    def answer(hello: Hello, reply: bytes) -> bytes:
        context = handshake_context(member, b"", hello, REPLY.unpack(reply)[0])
        return PROOF.pack(proof(member, "dialer", context), b"s" * 32)

    return answer


def another_unique_id(_: Path) -> bool:
    """Rank 0 has given one member another unique id, to have it alone in a group of its own making."""
    assert come_in(membership(0), answer_as(membership(1)))
    return come_in(membership(0), answer_as(membership(1, b"w" * 128)))


def an_older_generations_id(_: Path) -> bool:
    """Who was a member once, and knows that generation's unique id, comes in again."""
    old = replace(membership(1, b"o" * 128), generation=2)
    return come_in(membership(0), answer_as(old))


def same_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handshake, "membership_key", lambda members: ONE)


RECORDED: list[bytes] = []


def replay_a_proof(_: Path) -> bool:
    """Plays what a member has said in one handshake in the next one."""

    def record(hello: Hello, reply: bytes) -> bytes:
        RECORDED.append(answer_as(membership(1))(hello, reply))
        return RECORDED[-1]

    assert come_in(membership(0), record)
    return come_in(membership(0), lambda hello, reply: RECORDED[-1])


def same_nonce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "urandom", lambda count: b"r" * count)


def send_its_proof_back(_: Path) -> bool:
    """Answers a victim with the victim's own proof."""
    return come_in(membership(0), lambda hello, reply: PROOF.pack(REPLY.unpack(reply)[1], b"s" * 32))


def same_sides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handshake, "proof", lambda member, side, context: proof(member, "either", context))


def announce_a_huge_frame(_: Path) -> bool:
    """A member announces a frame of a terabyte, for which the other would make room."""
    try:
        return read_frame(frame(frames.FrameKind.CALLS, 1, 1 << 40))[2] == 1 << 40
    except CommunicatorError:
        return False


def forge_a_line_in_a_goodbye(_: Path) -> bool:
    """A member's last word writes a line of its own into the others' logs."""
    with pair() as (near, far):
        far.send(goodbye(Reason.FAILED, "x\n2026-01-01 ERROR forged"))
        far.close()
        farewell = PeerConnection(near, 1).read_ahead()
        return farewell is not None and "\n" in farewell[1]


def cut_short(_: Path) -> bool:
    """Ends a connection during its data without a word, so that half an array is taken for whole."""
    with pair() as (near, far):
        far.send(sent(GRADIENT)[0][:-1])
        far.close()
        connection = PeerConnection(near, 1, RecordLayer(near, TWO, ONE))
        try:
            return connection.read_into(memoryview(bytearray(100))) > 0
        except EndOfStreamError:
            return False


def whole_records_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordLayer, "read", lambda self, view: self._sock.recv_into(view))


MIDDLE, MEMBER = "in the middle, without a certificate", "a member of the job"
ATTACKS = (
    Attack("alter a byte", "gradients", MIDDLE, alter, without_tags),
    Attack("repeat a record", "gradients", MIDDLE, repeat, without_numbers),
    Attack("leave a record out", "gradients", MIDDLE, leave_out, without_numbers),
    Attack("swap two records", "gradients", MIDDLE, swap, without_numbers),
    Attack("send a side its own records", "gradients", MIDDLE, reflect, one_secret),
    Attack("replay a recording", "gradients", MIDDLE, replay_a_recording, one_secret),
    Attack(
        "announce a size, send nothing", "memory", MIDDLE, announce_and_send_nothing, without_record_limit
    ),
    Attack("end a connection politely", "membership", MIDDLE, end_it_politely, without_records),
    Attack("cut a record short", "gradients", MIDDLE, cut_short, whole_records_only),
    Attack(
        "send KeyUpdates for ever",
        "processor time",
        MEMBER,
        keep_busy,
        lambda patch: patch.setattr(records, "MAX_IDLE_RECORDS", 1000),
    ),
    Attack("come in with another unique id", "the group", MEMBER, another_unique_id, same_key),
    Attack(
        "come in with an old unique id", "the group", "a former member", an_older_generations_id, same_key
    ),
    Attack("replay a proof", "the group", MIDDLE, replay_a_proof, same_nonce),
    Attack("send a proof back", "the group", "a certificate, no unique id", send_its_proof_back, same_sides),
    Attack(
        "announce a huge frame",
        "memory",
        MEMBER,
        announce_a_huge_frame,
        lambda patch: patch.setattr(frames, "MAX_FRAME", 1 << 41),
    ),
    Attack(
        "forge a line in a goodbye",
        "the log",
        MEMBER,
        forge_a_line_in_a_goodbye,
        lambda patch: patch.setattr(frames, "one_line", str),
    ),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)


def test_hellos_have_the_size_that_is_read() -> None:
    assert len(Hello(3, 1, 0, b"l" * 32, b"n" * 32).encode()) == HELLO.size
