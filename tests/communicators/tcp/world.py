"""Several backends in one process, the certificates for them, and sockets at their endpoints."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.certs.files import write_file
from muster.certs.pki.authority import Authority, create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.store import Credentials, load_credentials
from muster.certs.runtime.tls import client_ssl_context
from muster.communicators import create_backend
from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.backend import TcpBackend
from muster.communicators.tcp.endpoint import Endpoint
from muster.errors import WorkerError
from tests.waiting import LIMIT_S

JOB = "job-a"
PASSWORD = b"a test's password"


class Office:
    """An authority that hands out credentials."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority: Authority = create_authority(folder / "authority", PASSWORD)
        self._count = 0

    def credentials(self, role: str = "worker", job: str = JOB, node: str | None = None) -> Credentials:
        """Credentials of a new certificate."""
        self._count += 1
        path = self._folder / f"{self._count}.p12"
        write_file(path, self._authority.issue(Identity(job, role, node)).p12(PASSWORD))
        return load_credentials(path, PASSWORD, self._folder / "authority" / "ca.crt")


@dataclass
class World:
    """Backends of all ranks of a generation."""

    backends: list[TcpBackend]
    memberships: list[Membership]

    def connect(self, ranks: Sequence[int] | None = None, timeout_s: float = LIMIT_S) -> list[Any]:
        """Connects some ranks at once; returns each one's communicator or error."""
        chosen = range(len(self.backends)) if ranks is None else ranks
        return together(
            [
                lambda rank=rank: self.backends[rank].connect(  # type: ignore[misc]
                    self.memberships[rank], timeout_s=timeout_s, cancelled=lambda: None
                )
                for rank in chosen
            ]
        )

    def fail_to_connect(self) -> list[Any]:
        """Connects all ranks, which must fail; each one's error. The first ends the others' wait, too."""
        errors: list[Exception] = []

        def enter(rank: int) -> None:
            try:
                self.backends[rank].connect(
                    self.memberships[rank], timeout_s=LIMIT_S, cancelled=lambda: next(iter(errors), None)
                )
            except WorkerError as error:
                errors.append(error)
                raise

        return together([lambda rank=rank: enter(rank) for rank in range(len(self.backends))])  # type: ignore[misc]

    def next(self) -> None:
        """Enters the next generation, with a new unique id."""
        ids = self.backends[0].mint_unique_ids(1)
        self.memberships = [replace(m, generation=m.generation + 1, unique_ids=ids) for m in self.memberships]

    def close(self) -> None:
        """Closes all endpoints."""
        for backend in self.backends:
            backend.close()


def make_world(credentials: Sequence[Credentials | None], *, seal: bool = True) -> World:
    """Opens a backend for each rank."""
    backends = [create_backend("tcp", tls=each, job_id=JOB, seal=seal) for each in credentials]
    assert all(isinstance(backend, TcpBackend) for backend in backends)
    addresses = [backend.open_endpoint("127.0.0.1") for backend in backends]
    ids = backends[0].mint_unique_ids(1)
    peers = tuple(Peer(rank, f"n{rank}", rank, "h", "host", each) for rank, each in enumerate(addresses))
    memberships = [Membership(JOB, 5, "world", rank, peers, ids) for rank in range(len(backends))]
    return World(backends, memberships)  # type: ignore[arg-type]


def together(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs actions in threads; returns each one's result or exception."""
    results: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return results


def address_of(world: World, rank: int) -> tuple[str, int]:
    host, _, port = world.memberships[0].peers[rank].data_address.rpartition(":")
    return host, int(port)


def connect(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(address, LIMIT_S)
    sock.sendall(data)
    return sock


def hung_up(sock: socket.socket) -> bool:
    """Whether the other side ends the connection; it must not answer."""
    sock.settimeout(LIMIT_S)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def client_hello(office: Office) -> bytes:
    """A whole TLS hello."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        wrapped = client_ssl_context(office.credentials()).wrap_socket(near, do_handshake_on_connect=False)
        with contextlib.suppress(OSError), wrapped:
            wrapped.do_handshake()
        return far.recv(1 << 16)


@contextlib.contextmanager
def endpoint_of(world: World, **bounds: float) -> Iterator[tuple[str, int]]:
    """Another endpoint of rank 0, with other bounds; its address."""
    endpoint = Endpoint(world.backends[0].tls, handshake_timeout_s=600, **bounds)  # type: ignore[arg-type]
    host, _, port = endpoint.open("127.0.0.1").rpartition(":")
    with contextlib.closing(endpoint):
        yield host, int(port)


def shaken(address: tuple[str, int], office: Office, **identity: str) -> ssl.SSLSocket:
    """A connection with a certificate of this authority, TLS done and nothing said inside."""
    return client_ssl_context(office.credentials(**identity)).wrap_socket(connect(address))
