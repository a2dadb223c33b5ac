"""Bytes that wait unread: what the kernel says of real connections, and how it writes that down."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from scheduler.unread import unread_peers
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


def test_where_the_system_does_not_tell_nothing_is_unread(tmp_path: Path) -> None:
    assert unread_peers(["127.0.0.1:5"], [tmp_path / "none"]) == []
