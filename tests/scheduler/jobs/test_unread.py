"""Bytes that wait unread, as the kernel reports them of real connections."""

from __future__ import annotations

import contextlib
import socket

import pytest

from muster.scheduler.jobs.unread import unread_peers
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("listens", "connects"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")]
)
def test_a_connection_whose_bytes_nobody_has_read_is_found(listens: str, connects: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::")
    except (OSError, ValueError):
        pytest.skip("no IPv6 here")
    with listener:
        port = listener.getsockname()[1]
        with (
            socket.create_connection((connects, port)) as talks,
            socket.create_connection((connects, port)) as idle,
        ):
            ends = [listener.accept()[0] for _ in range(2)]
            show = f"[{connects}]" if ":" in connects else connects
            talker, idler = (f"{show}:{sock.getsockname()[1]}" for sock in (talks, idle))
            peers = [idler, talker, "unix:", "10.1.2.3:4"]
            assert unread_peers(peers) == []
            talks.sendall(b"heartbeat")
            wait_for(lambda: unread_peers(peers) == [talker])
            assert ends[0].recv(100) == b"heartbeat"
            assert unread_peers(peers) == []
            for end in ends:
                end.close()


def test_of_thousands_of_connections_all_that_are_unread_are_found() -> None:
    """The kernel's answer comes in many pieces."""
    with contextlib.ExitStack() as at_end, socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        talkers = []
        for number in range(600):
            ours = at_end.enter_context(socket.create_connection(listener.getsockname()))
            at_end.enter_context(listener.accept()[0])
            if number % 2:
                ours.sendall(b"heartbeat")
                talkers.append(f"127.0.0.1:{ours.getsockname()[1]}")
        wait_for(lambda: unread_peers(talkers) == talkers)


def test_where_the_system_does_not_tell_nothing_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "AF_NETLINK", 255)  # no such family
    assert unread_peers(["127.0.0.1:5"]) == []
