"""Attacks on the ports of the CPU communicator, and on the wire between its members."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from muster.certs.pki.authority import create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.store import load_credentials
from muster.certs.runtime.tls import client_ssl_context
from muster.communicators.membership import Membership, Peer
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.communicator import TcpCommunicator
from muster.communicators.tcp.frames import FRAME, MAGIC, FrameKind
from muster.communicators.tcp.handshake import PROOF, REPLY, Hello, group_label
from muster.errors import CommunicatorError, WorkerError
from tests.attacks.field import Field
from tests.attacks.on_one_job.test_transport import CLIENT_HELLO, PLAIN
from tests.attacks.proxy import Change, Proxy
from tests.communicators.tcp.world import Office, World, make_world, together
from tests.scheduler.processes import PASSWORD
from tests.waiting import wait_for

SHORT_S, LONG_S = 1.0, 20.0
PARKED_S = 60.0  # so long may one wait that has a place


@pytest.fixture(scope="module")
def ports(field: Field) -> list[int]:
    found = field.data_ports()
    assert len(found) >= 3
    return found


@contextlib.contextmanager
def connected(port: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Connects from one of the many addresses of loopback: each has its own share of the victims' logs."""
    with socket.create_connection(("127.0.0.1", port), LONG_S, source_address=(host, 0)) as sock:
        yield sock


def answer(
    sock: socket.socket | ssl.SSLSocket, data: bytes, size: int = 4096, wait_s: float = SHORT_S
) -> bytes:
    """Sends, and returns what comes at once; nothing if the other side hangs up or keeps silent."""
    with contextlib.suppress(OSError):
        sock.settimeout(wait_s)
        sock.sendall(data)
        return sock.recv(size)
    return b""


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_no_tls_gets_no_answer(field: Field, ports: list[int], name: str) -> None:
    for port in ports:
        with connected(port) as sock:
            assert answer(sock, PLAIN[name])[:1] in (b"", b"\x15")  # an alert at most


def test_half_handshakes_at_every_port(field: Field, ports: list[int]) -> None:
    before, sockets = field.steps(), []
    for port in ports:
        for index in range(100):
            sock = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
            sock.sendall(CLIENT_HELLO[: index % 40])
            sockets.append(sock)
    assert field.status().state == "running"
    assert field.steps() >= before
    for sock in sockets:
        sock.close()


def strange_context(field: Field, kind: str) -> ssl.SSLContext:
    """What a stranger shakes hands with."""
    if kind == "no certificate":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        directory = field.directory / "attacker" / "data"
        issued = create_authority(directory, PASSWORD, force=True).issue(Identity("default", "worker"))
        (directory / "x.p12").write_bytes(issued.p12(PASSWORD))
        context = client_ssl_context(load_credentials(directory / "x.p12", PASSWORD, directory / "ca.crt"))
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("kind", ["no certificate", "another authority"])
def test_strangers_fail_in_the_handshake(field: Field, ports: list[int], kind: str) -> None:
    context = strange_context(field, kind)
    for port in ports:
        with connected(port) as plain, contextlib.suppress(OSError), context.wrap_socket(plain) as sock:
            assert answer(sock, hello_of(field).encode()) == b""


def members_of(generation: int = 1) -> Membership:
    """The job's generation as an insider knows it; only the unique ids are missing."""
    peers = tuple(Peer(rank, f"victim-{rank}", 1, "h", "host", "") for rank in range(3))
    return Membership("default", generation, "world", 1, peers, (b"guessed" * 18,))


def hello_of(field: Field, generation: int = 1, from_rank: int = 1, to_rank: int = 0) -> Hello:
    label = group_label(members_of(generation), "world")
    return Hello(generation, from_rank, to_rank, label, os.urandom(32))


@pytest.mark.parametrize("name", ["operator", "server", "other-job", "node-7"])
def test_another_identity_gets_no_challenge(field: Field, ports: list[int], name: str) -> None:
    context = client_ssl_context(field.pki.credentials(name))
    for port in ports:
        for to_rank in range(3):
            hello = hello_of(field, from_rank=(to_rank + 1) % 3, to_rank=to_rank)
            with connected(port) as plain, contextlib.suppress(OSError), context.wrap_socket(plain) as sock:
                assert answer(sock, hello.encode()) == b""


@pytest.mark.parametrize("generation", [0, 2**63])
def test_a_hello_of_another_generation_gets_no_answer(
    field: Field, ports: list[int], generation: int
) -> None:
    context = client_ssl_context(field.pki.credentials("client"))
    for port in ports[:2]:
        with connected(port) as plain, context.wrap_socket(plain) as sock:
            assert answer(sock, hello_of(field, generation).encode(), wait_s=0.3) == b""


def endpoints(field: Field, ports: list[int]) -> list[int]:
    """The ports at which the communicators' TLS answers; the others are proxies'."""
    context, found = client_ssl_context(field.pki.credentials("client")), []
    for port in ports:
        with connected(port) as plain, contextlib.suppress(OSError), context.wrap_socket(plain):
            found.append(port)
    assert len(found) >= 3
    return found


def hangs_up(sock: ssl.SSLSocket, wait_s: float) -> bool:
    """Whether the other side ends the connection meanwhile; it must not say anything."""
    sock.settimeout(wait_s)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("name", ["operator", "server", "other-job"])
def test_another_identity_is_shown_out_before_it_says_anything(
    field: Field, ports: list[int], name: str
) -> None:
    """Inside TLS nothing is read of it, and it holds no place: half of the time of a handshake is enough."""
    context = client_ssl_context(field.pki.credentials(name))
    for port in endpoints(field, ports):
        with (
            connected(port, "127.4.1.1") as plain,
            contextlib.suppress(ConnectionError),
            context.wrap_socket(plain) as sock,
        ):
            assert hangs_up(sock, 5.0)


def test_one_certificate_cannot_fill_the_endpoint_by_waiting(field: Field, ports: list[int]) -> None:
    """Hellos of a generation to come are kept, but of one certificate only so many."""
    context = client_ssl_context(field.pki.credentials("client"))
    port = endpoints(field, ports)[0]
    with contextlib.ExitStack() as stack:
        waiting = []
        for index in range(100):
            plain = stack.enter_context(connected(port, f"127.4.2.{index + 1}"))
            waiting.append(stack.enter_context(context.wrap_socket(plain)))
            waiting[-1].sendall(hello_of(field, 2**40).encode())
        until = time.monotonic() + PARKED_S / 2
        while (kept := sum(not hangs_up(sock, 0.001) for sock in waiting)) > 64:
            assert time.monotonic() < until, f"{kept} are kept"
        assert kept > 0


@pytest.mark.parametrize("kind", ["guessed", "reflected", "empty"])
def test_an_insider_without_the_unique_id_is_challenged_and_never_let_in(
    field: Field, ports: list[int], kind: str
) -> None:
    """The certificate is a member's own: only the unique id is missing."""
    context = client_ssl_context(field.pki.credentials("client"))
    challenged, before = 0, refusals(field)
    for port in ports:
        for to_rank in range(3):
            with connected(port, f"127.4.0.{len(kind)}") as plain, context.wrap_socket(plain) as sock:
                hello = hello_of(field, from_rank=(to_rank + 1) % 3, to_rank=to_rank)
                reply = answer(sock, hello.encode(), REPLY.size)
                if len(reply) < REPLY.size:
                    continue  # this port is another rank's
                challenged += 1
                _, theirs, _ = REPLY.unpack(reply)
                proof = {"guessed": os.urandom(32), "reflected": theirs, "empty": bytes(32)}[kind]
                assert answer(sock, PROOF.pack(proof, bytes(32))) == b""
    assert challenged >= 3
    # The place is taken as well, so only the log says why.
    wait_for(lambda: refusals(field) >= before + challenged)


def refusals(field: Field) -> int:
    """How often the workers have said that somebody does not know the unique id."""
    logs = [(field.directory / f"victim-{rank}.log").read_text() for rank in range(3)]
    return sum(log.count("does not know the unique id of generation 1") for log in logs)


# ---------------------------------------------------------------- between the members


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@contextlib.contextmanager
def pair(office: Office, change: Change | None = None) -> Iterator[tuple[World, list[Proxy]]]:
    """Two members with a proxy before each one's port."""
    world = make_world([office.credentials(node=f"n{rank}") for rank in range(2)])
    peers = world.memberships[0].peers
    proxies = [Proxy(int(peer.data_address.rpartition(":")[2]), change) for peer in peers]
    there = tuple(
        replace(peer, data_address=f"127.0.0.1:{proxy.port}")
        for peer, proxy in zip(peers, proxies, strict=True)
    )
    world.memberships = [replace(membership, peers=there) for membership in world.memberships]
    try:
        yield world, proxies
    finally:
        world.close()
        for proxy in proxies:
            proxy.close()


def reduced(world: World, size: int, timeout_s: float = 5.0) -> list[Any]:
    """All-reduces once; returns each rank's array, or its error."""
    communicators = world.connect(timeout_s=timeout_s)
    errors = [each for each in communicators if isinstance(each, Exception)]
    if errors:
        for each in communicators:
            if isinstance(each, TcpCommunicator):
                each.close()
        return errors

    def run(communicator: TcpCommunicator) -> Any:
        array = np.full(size, communicator.rank + 1.0)
        communicator.timeout_s = 5.0
        communicator.all_reduce(array, array, ReduceOp.SUM)
        return array

    results = together([lambda c=c: run(c) for c in communicators])  # type: ignore[misc]
    together([c.close for c in communicators])
    return results


@pytest.mark.parametrize("size", [4, 100_000])
def test_nothing_of_the_data_can_be_read_on_the_wire(office: Office, size: int) -> None:
    with pair(office) as (world, proxies):
        results = reduced(world, size)
        assert all((result == 3.0).all() for result in results)
        seen = b"".join(proxy.seen for proxy in proxies)
        unique_id = world.memberships[0].unique_ids[0]
    assert len(seen) > 8 * size
    for number in (1.0, 2.0, 3.0):
        assert np.full(4, number).tobytes() not in seen
    assert unique_id[:16] not in seen
    assert FRAME.pack(MAGIC, FrameKind.CALLS, 0, 0)[:6] not in seen  # four bytes turn up by chance
    assert b"job-a" not in seen


@pytest.mark.parametrize("place", [100, 5_000, 200_000, 700_000])
@pytest.mark.parametrize("how", ["flipped", "cut", "repeated", "left out", "inserted"])
def test_a_wire_that_is_tampered_with_gives_an_error_and_never_a_wrong_number(
    office: Office, how: str, place: int
) -> None:
    def change(before: int, data: bytes) -> bytes:
        at = place - before
        if not 0 <= at < len(data):
            return data
        if how == "flipped":
            return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
        if how == "cut":
            return b""
        if how == "repeated":
            return data + data
        if how == "left out":
            return data[:at] + data[at + 1 :]
        return data[:at] + b"\0" + data[at:]

    with pair(office, change) as (world, _):
        results = reduced(world, 100_000, timeout_s=SHORT_S if place < 1000 else 5.0)
    errors = [result for result in results if isinstance(result, Exception)]
    assert all(isinstance(error, WorkerError) for error in errors), errors
    assert all((r == 3.0).all() for r in results if not isinstance(r, Exception))
    assert errors or how == "repeated"  # what is repeated behind the last byte is never read


def test_a_recorded_connection_opens_nothing_when_it_is_played_again(office: Office) -> None:
    with pair(office) as (world, proxies):
        assert not [r for r in reduced(world, 1000) if isinstance(r, Exception)]
        recorded = [bytes(kept) for proxy in proxies for kept in proxy.kept]
        world.next()
        communicators = world.connect(timeout_s=5.0)
        for proxy in proxies:
            for data in recorded:
                with connected(proxy.target[1]) as sock:
                    reply = answer(sock, data)
                    assert reply[:1] in (b"", b"\x15", b"\x16")  # no more than the begin of a TLS handshake
        arrays = [np.ones(1000), np.ones(1000)]
        ranks = zip(communicators, arrays, strict=True)
        together([lambda c=c, a=a: c.all_reduce(a, a, ReduceOp.SUM) for c, a in ranks])  # type: ignore[misc]
        assert all((array == 2.0).all() for array in arrays)
        together([c.close for c in communicators])


def test_a_member_of_the_last_generation_stays_in_it(office: Office) -> None:
    """Its address is known, its certificate is good, its unique id is that of before."""
    with pair(office) as (world, _):
        assert not [r for r in reduced(world, 10) if isinstance(r, Exception)]
        old = world.memberships[1]
        world.next()
        now = world.memberships[0]
        world.memberships[1] = replace(old, generation=now.generation)  # it lies about the generation
        results = world.connect(timeout_s=4.0)
    assert all(isinstance(result, (CommunicatorError, WorkerError)) for result in results)
    assert any("unique id" in str(result) for result in results)
