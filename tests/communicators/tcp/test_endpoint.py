"""The endpoint's thread: hostile connections do not end it, and should it fail, it starts over."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from muster.certs.runtime.store import Credentials
from muster.certs.runtime.tls import client_ssl_context
from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.endpoint import Endpoint
from muster.communicators.tcp.handshake import (
    HELLO,
    PROOF,
    REPLY,
    WELCOME,
    Hello,
    group_label,
    handshake_context,
    proof,
)
from muster.communicators.tcp.pending_group import PendingGroup
from tests.communicators.tcp.world import (
    JOB,
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
from tests.logs import said
from tests.scheduler.processes import environment
from tests.waiting import LIMIT_S, wait_for


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


def check_forms(world: World) -> None:
    communicators = world.connect()
    assert all(not isinstance(each, Exception) for each in communicators), communicators
    for each in communicators:
        each.close()


class Gated:
    """Gives credentials; while it is armed, every caller waits."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.armed = False
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self) -> Credentials:
        if self.armed:
            self.armed = False
            self.entered.set()
            assert self.released.wait(LIMIT_S)
        return self._credentials


def test_a_dialer_that_is_not_welcomed_dials_again() -> None:
    """The other side may drop a connection after the dialer's last word; both must know the same."""
    dialer = Endpoint(None)
    with contextlib.closing(dialer), socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        there, group = groups([f"127.0.0.1:{listener.getsockname()[1]}", dialer.open("127.0.0.1")], 1)
        dialer.gather(group)
        dialer.dial(group, 0, time.monotonic() + LIMIT_S)
        for welcome in (False, True):
            sock, _ = listener.accept()
            with sock, sock.makefile("rb") as heard:
                hello = Hello.decode(heard.read(HELLO.size))
                context = handshake_context(there.membership, b"", hello, b"n" * 32)
                sock.sendall(REPLY.pack(b"n" * 32, proof(there.membership, "acceptor", context), b"s" * 32))
                assert len(heard.read(PROOF.size)) == PROOF.size
                assert not group.arrived
                if welcome:
                    sock.sendall(WELCOME)
                    wait_for(lambda: group.arrived)
        group.arrived[0].sock.close()


def test_a_handshake_that_lost_its_place_is_not_touched_again(office: Office) -> None:
    """In one turn there are newcomers, which push out the oldest, and an event of the oldest."""
    gated = Gated(office.credentials(node="n0"))
    world = make_world([gated, office.credentials(node="n1")])  # type: ignore[list-item]
    there = address_of(world, 0)
    with contextlib.ExitStack() as stack:
        stack.callback(world.close)
        oldest = stack.enter_context(connect(there))
        for _ in range(400):
            stack.enter_context(connect(there))
        with connect(there, b"GET / HTTP/1.1\r\n\r\n") as last:
            assert hung_up(last)  # who came before is in the table by now
        gated.armed = True
        stack.enter_context(connect(there, client_hello(office)))
        assert gated.entered.wait(LIMIT_S)
        for _ in range(200):
            stack.enter_context(connect(there))
        oldest.sendall(b"GET / HTTP/1.1\r\n\r\n")
        gated.released.set()
        check_forms(world)


def groups(
    addresses: list[str], generation: int, kind: type[PendingGroup] = PendingGroup
) -> list[PendingGroup]:
    peers = tuple(Peer(rank, f"n{rank}", 1, "h", "host", each) for rank, each in enumerate(addresses))
    memberships = [Membership(JOB, generation, "world", rank, peers, (b"u" * 128,)) for rank in range(2)]
    label = group_label(memberships[0], "world")
    return [kind(memberships[0], label), PendingGroup(memberships[1], label)]


def gather(endpoints: list[Endpoint], both: list[PendingGroup]) -> None:
    """Has rank 1 dial rank 0."""
    for endpoint, group in zip(endpoints, both, strict=True):
        endpoint.gather(group)
    endpoints[1].dial(both[1], 0, time.monotonic() + LIMIT_S)


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    made = [Endpoint(None), Endpoint(None)]
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("error", [RuntimeError("a fault"), SystemExit(1)])
def test_a_thread_that_fails_is_reported_and_begins_again_on_its_port(
    endpoints: list[Endpoint], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:

    class Broken(PendingGroup):
        def arrive(self, connection: PeerConnection) -> None:
            connection.sock.close()
            raise error

    addresses = [each.open("127.0.0.1") for each in endpoints]
    caplog.set_level(logging.ERROR, "muster.tcp")
    broken = groups(addresses, 1, Broken)
    gather(endpoints, broken)
    wait_for(lambda: "opened again" in caplog.text)
    for endpoint, group in zip(endpoints, broken, strict=True):
        endpoint.forget(group)
    whole = groups(addresses, 2)
    gather(endpoints, whole)
    wait_for(lambda: all(group.arrived for group in whole), lambda: caplog.text)
    for group in (*broken, *whole):
        for connection in group.arrived.values():
            connection.sock.close()
    assert type(error).__name__ in caplog.text


@pytest.fixture
def world(office: Office) -> Iterator[World]:
    made = make_world([office.credentials(node=f"n{rank}") for rank in range(2)])
    yield made
    made.close()


def future_hello(world: World) -> bytes:
    mine = world.memberships[1]
    return Hello(mine.generation + 1, 1, 0, b"l" * 32, b"n" * 32).encode()


def stays(sock: socket.socket) -> bool:
    """Whether the other side has not hung up."""
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


def says_hello(address: tuple[str, int], office: Office, host: str, wait_s: float) -> bool:
    """Whether the TLS hello of a stranger or member at ``host`` is answered in that time."""
    with socket.create_connection(address, LIMIT_S, source_address=(host, 0)) as sock:
        sock.sendall(client_hello(office))
        sock.settimeout(wait_s)
        try:
            return sock.recv(1) == b"\x16"
        except TimeoutError:
            return False


def test_members_do_not_wait_for_the_sessions_of_strangers(world: World, office: Office) -> None:
    endpoint = Endpoint(world.backends[0].tls, handshake_timeout_s=600, max_strangers_per_s=1e-6)
    host, _, port = endpoint.open("127.0.0.1").rpartition(":")
    address = host, int(port)
    with contextlib.closing(endpoint):
        assert says_hello(address, office, "127.9.9.9", LIMIT_S)  # there is a turn to begin with
        assert not says_hello(address, office, "127.9.9.9", 0.2)
        assert not says_hello(address, office, "127.0.0.1", 0.2)  # nobody knows yet that it is a member's
        with socket.create_connection(address) as early:
            early.sendall(client_hello(office))
            endpoint.gather(PendingGroup(world.memberships[0], group_label(world.memberships[0], "world")))
            early.settimeout(LIMIT_S)
            assert early.recv(1) == b"\x16"
        assert says_hello(address, office, "127.0.0.1", LIMIT_S)
        assert not says_hello(address, office, "127.9.9.9", 0.2)


def test_strangers_get_their_turn(world: World, office: Office) -> None:
    with endpoint_of(world, max_strangers_per_s=10) as address:
        assert all(says_hello(address, office, "127.9.9.9", LIMIT_S) for _ in range(15))


def test_one_certificate_parks_no_more_than_its_share_and_displaces_nobody(
    world: World, office: Office
) -> None:
    context = client_ssl_context(office.credentials())
    with endpoint_of(world, max_handshakes=400, max_parked=8) as address, contextlib.ExitStack() as stack:

        def shake() -> ssl.SSLSocket:
            return stack.enter_context(context.wrap_socket(connect(address)))

        under_way = shake()  # it has not said hello yet
        parked = []
        for _ in range(20):
            parked.append(shake())
            parked[-1].sendall(future_hello(world))
        wait_for(lambda: sum(map(stays, parked)) == 2)
        assert stays(under_way)
        under_way.setblocking(True)
        under_way.sendall(b"x" * len(future_hello(world)))
        assert hung_up(under_way)  # it was heard, and is no hello


def test_who_is_under_way_keeps_its_place_however_many_wait(world: World, office: Office) -> None:
    """There is room for two under way, and four wait already."""
    with (
        endpoint_of(world, max_handshakes=2, max_parked=1000) as address,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(4):
            waiting = stack.enter_context(shaken(address, office))
            waiting.sendall(future_hello(world))
            waiting.settimeout(0.2)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
        under_way = stack.enter_context(shaken(address, office))
        stack.enter_context(connect(address))
        with connect(address, b"GET / HTTP/1.1\r\n\r\n") as last:
            assert hung_up(last)
        assert stays(under_way)


def test_a_parked_connection_that_hangs_up_frees_its_place(world: World, office: Office) -> None:
    context = client_ssl_context(office.credentials())
    with endpoint_of(world, max_parked=4) as address:
        for _ in range(5):
            with context.wrap_socket(connect(address)) as sock:
                sock.sendall(future_hello(world))
                sock.settimeout(0.2)
                with pytest.raises(TimeoutError):  # it is kept: no goodbye comes
                    sock.recv(1)


def test_a_flood_of_refusals_does_not_flood_the_log(
    world: World, office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "muster.tcp")
    begun = time.monotonic()
    for _ in range(50):
        with connect(address_of(world, 0), b"GET / HTTP/1.1\r\n\r\n") as sock:
            assert hung_up(sock)
    for _ in range(20):
        with contextlib.suppress(ConnectionError), shaken(address_of(world, 0), office, job="job-b") as sock:
            assert hung_up(sock)
    lines = said(caplog, "muster.tcp")
    windows = 1 + (time.monotonic() - begun) // 10  # of each kind there may be so many lines in ten seconds
    assert 2 <= len(lines) <= 8 * windows
    assert all(len(line) < 300 for line in lines)


def test_a_process_without_descriptors_waits_and_then_goes_on() -> None:
    """It must not turn in circles, nor fail: room comes when others hang up."""
    script = """
import os, resource, socket, time
from muster.communicators.tcp.endpoint import Endpoint
endpoint = Endpoint(None, handshake_timeout_s=60)
host, _, port = endpoint.open("127.0.0.1").rpartition(":")
clients = [socket.socket() for _ in range(40)]
lowest = os.open("/dev/null", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
for client in clients:
    client.connect((host, int(port)))
before = time.process_time()
time.sleep(0.5)  # in which it would turn
assert time.process_time() - before < 0.25, "it turns in circles"
os.close(lowest)
for client in clients[:-1]:
    client.close()
clients[-1].sendall(b"x" * 84)
clients[-1].settimeout(60)
assert clients[-1].recv(1) == b""
endpoint.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_credentials_that_cannot_be_used_are_told_once(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    """They are asked for at each connection, and strangers make as many as they like."""
    broken = threading.Event()
    credentials = office.credentials()

    def renewed() -> Credentials:
        if broken.is_set():
            raise ValueError("half written")
        return credentials

    world = make_world([renewed, office.credentials()])  # type: ignore[list-item]
    with contextlib.closing(world):
        broken.set()
        for _ in range(5):
            assert says_hello(address_of(world, 0), office, "127.9.9.9", LIMIT_S)
        check_forms(world)
    assert caplog.text.count("the old one stays in force") == 1
