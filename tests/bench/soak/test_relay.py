"""The relay of the soak and of the attacks: it does to connections what it is asked to."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from muster.bench.soak.relay import Relay, Trouble
from tests.waiting import LIMIT_S


@contextlib.contextmanager
def connected(trouble: Trouble) -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """A relay, and both ends of a connection through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener.getsockname()[1], trouble)
        try:
            with socket.create_connection(("127.0.0.1", relay.port), timeout=LIMIT_S) as near:
                far, _ = listener.accept()
                with far:
                    far.settimeout(LIMIT_S)
                    yield relay, near, far
        finally:
            relay.close()


@pytest.mark.parametrize(
    ("trouble", "name"),
    [(Trouble(delay_s=0.2), "delay"), (Trouble(stall=1.0, stall_s=0.2), "stall")],
    ids=["delay", "stall"],
)
def test_what_is_late_comes_whole(trouble: Trouble, name: str) -> None:
    with connected(trouble) as (relay, near, far):
        began = time.monotonic()
        near.sendall(b"one")
        assert far.recv(10) == b"one"
        assert relay.done == {name: 1}
        assert name == "delay" or time.monotonic() >= began + 0.2
        relay.trouble = Trouble()
        near.sendall(b"two")
        assert far.recv(10) == b"two"
        assert relay.done == {name: 1}


def test_a_reset_reaches_both_ends() -> None:
    with connected(Trouble(reset=1.0)) as (relay, near, far):
        near.sendall(b"lost")
        for each in (near, far):
            with pytest.raises(ConnectionResetError):
                each.recv(10)
        assert relay.done == {"reset": 1}


def test_a_half_closed_connection_goes_on_the_other_way() -> None:
    with connected(Trouble(half_close=1.0)) as (relay, near, far):
        near.sendall(b"lost")
        assert far.recv(10) == b""
        relay.trouble = Trouble()
        far.sendall(b"still heard")
        assert near.recv(20) == b"still heard"
        assert relay.done == {"half-close": 1}


def test_connections_stall_apart_from_each_other() -> None:
    with connected(Trouble(stall=1.0, stall_s=LIMIT_S / 2)) as (relay, near, far):
        near.sendall(b"held back")
        while not relay.done:
            time.sleep(0.005)
        relay.trouble = Trouble()
        far.sendall(b"overtakes")
        assert near.recv(20) == b"overtakes"
        far.settimeout(0.05)
        with pytest.raises(TimeoutError):
            far.recv(10)


def test_a_relay_passes_on_until_it_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port), timeout=LIMIT_S) as near:
            far, _ = listener.accept()
            near.sendall(b"hello")
            assert far.recv(10) == b"hello"
            relay.cut(60.0)
            assert near.recv(10) == b""
            assert far.recv(10) == b""
            far.close()
        with socket.create_connection(("127.0.0.1", relay.port), timeout=LIMIT_S) as barred:
            assert barred.recv(10) == b""
        relay.close()
