"""sd_notify against a real datagram socket, as systemd would hold it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.scheduler import systemd
from tests.ports import free_port
from tests.scheduler.processes import environment
from tests.waiting import LIMIT_S


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


SCHEDULER = "import runpy; runpy.run_module('scheduler', run_name='__main__')"
NO_SPACE = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); {SCHEDULER}"


@contextlib.contextmanager
def starting(program: str, notify: str, port: int, journal: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler that is being started, and is killed at the end."""
    env = {"MS_WORKER_NUM": "2", "MS_ROLE": "MS_SCHED", "MS_ENABLE_RECOVERY": "1"}
    env |= {"NOTIFY_SOCKET": notify, "MS_RECOVERY_PATH": str(journal)}
    with subprocess.Popen(
        [sys.executable, "-c", program, "--port", str(port)],
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_scheduler_that_is_ready_has_its_port_open(
    manager: tuple[socket.socket, str], tmp_path: Path
) -> None:
    channel, name = manager
    channel.settimeout(LIMIT_S)
    port = free_port()
    with starting(SCHEDULER, name, port, tmp_path / "journal"):
        assert channel.recv(64) == b"READY=1"
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()


def test_one_that_waits_for_space_is_ready_all_the_same(tmp_path: Path) -> None:
    """Systemd would end it otherwise, which makes no space."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(LIMIT_S)
        with starting(NO_SPACE, str(tmp_path / "notify"), free_port(), tmp_path / "journal"):
            assert channel.recv(64) == b"READY=1"


@pytest.mark.parametrize(
    ("value", "interval_s"), [("30000000", 15.0), ("", None), ("0", None), ("-5", None), ("soon", None)]
)
def test_the_watchdog_is_fed_twice_per_interval(value: str, interval_s: float | None) -> None:
    assert systemd.watchdog_interval_s({"WATCHDOG_USEC": value}) == interval_s


@pytest.mark.parametrize(
    ("level", "prefix"),
    [
        (logging.CRITICAL, "<2>"),
        (logging.ERROR, "<3>"),
        (logging.WARNING, "<4>"),
        (logging.INFO, "<6>"),
        (logging.DEBUG, "<7>"),
    ],
)
def test_a_line_has_the_priority_that_the_journal_knows(level: int, prefix: str) -> None:
    assert systemd.priority_prefix(level) == prefix


@pytest.mark.parametrize(("to_journal", "begin"), [(True, "<4>2"), (False, "2")])
def test_only_in_the_journal_lines_tell_their_priority(tmp_path: Path, to_journal: bool, begin: str) -> None:
    with (tmp_path / "stderr").open("w+") as stderr:
        found = os.fstat(stderr.fileno())
        stream = f"{found.st_dev}:{found.st_ino if to_journal else found.st_ino + 1}"
        code = (
            "from muster.scheduler.audit import logs; import os\n"
            "logs.set_up('INFO', os.environ); logs.LOG.warning('w')"
        )
        env = environment(JOURNAL_STREAM=stream)
        subprocess.run([sys.executable, "-c", code], env=env, stderr=stderr, check=True)
        stderr.seek(0)
        assert stderr.read().startswith(begin)
