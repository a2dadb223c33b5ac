"""sd_notify against a real datagram socket, as systemd would hold it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler import systemd


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path / "notify")
    address, name = (path, path) if request.param == "path" else ("\0" + path, "@" + path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address)
        channel.settimeout(5)
        yield channel, name


def test_ready_reaches_the_service_manager(manager: tuple[socket.socket, str]) -> None:
    channel, name = manager
    assert systemd.notify(systemd.READY, {"NOTIFY_SOCKET": name})
    assert channel.recv(64) == b"READY=1"


def test_outside_systemd_nothing_is_sent() -> None:
    assert not systemd.notify(systemd.READY, {})


def test_a_deaf_manager_is_no_error(tmp_path: Path) -> None:
    assert not systemd.notify(systemd.ALIVE, {"NOTIFY_SOCKET": str(tmp_path / "nobody")})


@pytest.mark.parametrize(
    ("value", "interval_s"), [("30000000", 15.0), ("", None), ("0", None), ("-5", None), ("soon", None)]
)
def test_the_watchdog_is_fed_twice_per_interval(value: str, interval_s: float | None) -> None:
    assert systemd.watchdog_interval_s({"WATCHDOG_USEC": value}) == interval_s
