"""A worker that knows several schedulers: which it tries, in which order, for how long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from muster.wire.patience import TRY_S
from muster.worker.config import Settings
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.schedulers import Schedulers
from muster.worker.session.streams import DeniedError

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def settings(port: int = 6667) -> Settings:
    return Settings(worker_num=1, worker_min=1, scheduler_hosts=HOSTS, scheduler_port=port)


class Tried:
    """Attempts, of which those with the hosts in ``up`` succeed."""

    def __init__(self, *up: str) -> None:
        self.up = set(up)
        self.hosts: list[str] = []
        self.error: Exception = ConnectionRefusedError("refused")

    def __call__(self, one: Settings) -> str:
        (host,) = one.scheduler_hosts
        self.hosts.append(host)
        if host not in self.up:
            raise self.error
        return host


def test_the_first_that_takes_it_is_found() -> None:
    tried = Tried(HOSTS[1])
    assert Schedulers(settings()).first(tried) == HOSTS[1]
    assert tried.hosts == list(HOSTS[:2])


def test_whoever_has_broken_off_comes_last() -> None:
    schedulers = Schedulers(settings())
    schedulers.first(Tried(HOSTS[1]))
    again = Tried(HOSTS[1])
    assert schedulers.first(again) == HOSTS[1]
    assert again.hosts == [HOSTS[2], HOSTS[0], HOSTS[1]]


def test_a_denial_is_told_and_not_that_another_stands_by() -> None:
    class Denying(Tried):
        def __call__(self, one: Settings) -> str:
            if one.scheduler_hosts == (HOSTS[1],):
                raise DeniedError("no certificate of this job", by_scheduler=True)
            return super().__call__(one)

    with pytest.raises(DeniedError, match="no certificate"):
        Schedulers(settings()).first(Denying())
    with pytest.raises(ConnectionRefusedError):
        Schedulers(settings()).first(Tried())


@contextmanager
def listener(host: str, port: int, *, hangs: bool) -> Iterator[socket.socket]:
    """A port that takes connections; one that hangs says nothing, another sends HTTP/2 settings."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        accepted: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                accepted.append(connection)
                if not hangs:
                    with suppress(OSError):  # the test may be over
                        connection.sendall(b"\0\0\0\4\0\0\0\0\0")

        threading.Thread(target=serve, daemon=True).start()
        yield server
        server.shutdown(socket.SHUT_RDWR)
        for connection in accepted:
            connection.close()


def test_one_that_hangs_costs_a_second_and_the_next_is_tried() -> None:
    with listener(HOSTS[0], 0, hangs=True) as stuck:
        port = stuck.getsockname()[1]
        with listener(HOSTS[2], port, hangs=False):
            began = time.monotonic()
            _, end = grpc_dial(settings(port), None)(SimpleQueue())
            taken_s = time.monotonic() - began
            end()
    assert taken_s >= TRY_S
