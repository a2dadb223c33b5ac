"""Who a peer is: proofs, and what the acceptor hears before it answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.handshake import Hello, group_label, handshake_context, proof
from tests.communicators.tcp.world import (
    Office,
    World,
    address_of,
    client_hello,
    connect,
    endpoint_of,
    hung_up,
    make_world,
    shaken,
)

PEERS = tuple(Peer(rank, f"n{rank}", 10 + rank, "h", "host", "127.0.0.1:1") for rank in range(3))
MEMBERSHIP = Membership("job", 7, "world", 0, PEERS, (b"u" * 128,))
HELLO = Hello(7, 0, 1, b"l" * 32, b"n" * 32)


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@pytest.fixture
def world(office: Office) -> Iterator[World]:
    made = make_world([office.credentials(node=f"n{rank}") for rank in range(2)])
    yield made
    made.close()


def test_a_proof_is_good_for_one_side_one_handshake_and_one_generation() -> None:
    context = handshake_context(MEMBERSHIP, b"tls", HELLO, b"a" * 32)
    good = proof(MEMBERSHIP, "dialer", context)
    others = [
        proof(MEMBERSHIP, "acceptor", context),
        proof(replace(MEMBERSHIP, unique_ids=(b"v" * 128,)), "dialer", context),
        proof(MEMBERSHIP, "dialer", handshake_context(MEMBERSHIP, b"other", HELLO, b"a" * 32)),
        proof(MEMBERSHIP, "dialer", handshake_context(MEMBERSHIP, b"tls", HELLO, b"b" * 32)),
        proof(
            MEMBERSHIP,
            "dialer",
            handshake_context(MEMBERSHIP, b"tls", replace(HELLO, to_rank=2), b"a" * 32),
        ),
    ]
    assert good == proof(MEMBERSHIP, "dialer", context)
    assert good not in others
    assert len(set(others)) == len(others)


def test_a_restarted_peer_changes_the_proof() -> None:
    peers = (PEERS[0], replace(PEERS[1], incarnation=99), PEERS[2])
    before = handshake_context(MEMBERSHIP, b"", HELLO, b"a" * 32)
    assert before != handshake_context(replace(MEMBERSHIP, peers=peers), b"", HELLO, b"a" * 32)


def test_labels_tell_groups_and_generations_apart() -> None:
    labels = {
        group_label(MEMBERSHIP, "world"),
        group_label(MEMBERSHIP, "world/0:tp"),
        group_label(replace(MEMBERSHIP, generation=8), "world"),
        group_label(replace(MEMBERSHIP, job_id="other"), "world"),
    }
    assert len(labels) == 4


@pytest.mark.parametrize(
    "identity", [{"job": "job-b"}, {"role": "operator"}, {"role": "scheduler"}], ids=lambda each: str(each)
)
def test_the_wrong_certificate_is_shown_out_before_it_says_hello(
    world: World, office: Office, identity: dict[str, str]
) -> None:
    with (
        endpoint_of(world) as address,
        contextlib.suppress(ConnectionError),
        shaken(address, office, **identity) as sock,
    ):
        assert hung_up(sock)


@pytest.mark.parametrize("data", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01half of a hello"])
def test_who_hangs_up_amid_the_tls_hello_is_dropped_at_once(world: World, data: bytes) -> None:
    with connect(address_of(world, 0), data) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)


def test_a_hello_that_comes_byte_by_byte_is_heard(world: World, office: Office) -> None:
    with connect(address_of(world, 0)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in client_hello(office):
            sock.sendall(bytes((byte,)))
        assert sock.recv(1) == b"\x16"
