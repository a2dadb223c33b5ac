"""What the log says of handshakes that fail, with real TLS: gRPC's own format is what is tried here."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.certs.runtime.preflight import preflight
from muster.certs.runtime.tls import client_ssl_context
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.certs.making import DAY, NOW, certificate, key_pem, pem
from tests.ports import free_port
from tests.scheduler.processes import Pki, Scheduler, channel, environment, run_scheduler, scheduler
from tests.scheduler.serve.test_metrics import read
from tests.waiting import LIMIT_S, wait_for

FLOOD = 300
URI = ("muster://default/worker",)


@pytest.fixture(scope="module")
def audit_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def running(pki: Pki, audit_path: Path) -> Iterator[Scheduler]:
    with scheduler(**pki.env(), MS_AUDIT_LOG=str(audit_path)) as process:
        yield process


def connect(port: int, host: str) -> socket.socket:
    """Connects from one of the many addresses of loopback: each gets its line at once."""
    return socket.create_connection(("127.0.0.1", port), LIMIT_S, source_address=(host, 0))


def name_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()
    return f"{host}:{port}"


def refused_bytes(port: int, host: str, data: bytes) -> str:
    """Sends bytes and waits until the scheduler hangs up; returns the own address."""
    with connect(port, host) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            while sock.recv(4096):
                pass
        return name_of(sock)


def context(pki: Pki, shown: tuple[bytes, bytes] | None, directory: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(pki.directory / "ca.crt")
    made.set_alpn_protocols(["h2"])
    if shown is not None:
        (directory / "shown.pem").write_bytes(shown[0] + shown[1])
        made.load_cert_chain(directory / "shown.pem")
    return made


def refused_tls(port: int, host: str, using: ssl.SSLContext) -> str:
    """Shakes hands, which must fail; returns the own address."""
    with connect(port, host) as sock:
        mine = name_of(sock)
        with contextlib.suppress(OSError), using.wrap_socket(sock) as wrapped:
            assert wrapped.recv(1) == b""
        return mine


def dated(pki: Pki, first_day: int, last_day: int) -> tuple[bytes, bytes]:
    made = certificate(pki.authority, uris=URI, start=NOW + first_day * DAY, end=NOW + last_day * DAY)
    return pem(made), key_pem()


CERTIFICATES: dict[str, Callable[[Pki, Pki], tuple[bytes, bytes] | None]] = {
    "unknown_ca": lambda _, foreign: (
        foreign.credentials("client").cert_chain_pem,
        foreign.credentials("client").key_pem,
    ),
    "expired": lambda pki, _: dated(pki, -2, -1),
    "not_yet_valid": lambda pki, _: dated(pki, 1, 2),
    "no_certificate": lambda _, __: None,
}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("reason", CERTIFICATES)
def test_a_bad_certificate_is_told_with_reason_and_address(
    running: Scheduler, pki: Pki, foreign: Pki, reason: str, version: ssl.TLSVersion, tmp_path: Path
) -> None:
    using = context(pki, CERTIFICATES[reason](pki, foreign), tmp_path)
    using.minimum_version = using.maximum_version = version
    host = f"127.0.{version - ssl.TLSVersion.TLSv1_2 + 1}.{10 + list(CERTIFICATES).index(reason)}"
    mine = refused_tls(running.port, host, using)
    line = running.await_log(f"peer={mine} ")
    assert f"WARNING denied code={reason} call=handshake " in line
    assert f"The TLS handshake with {mine} failed: it" in line


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "plaintext_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "no_tls"),
        (b"\xa9\x1b\n\x00 WARNING forged" * 64, "no_tls"),
    ],
)
def test_what_is_no_tls_is_told_with_reason_and_address(running: Scheduler, data: bytes, reason: str) -> None:
    mine = refused_bytes(running.port, f"127.0.3.{data[0]}", data)
    assert f"denied code={reason} call=handshake " in running.await_log(f"peer={mine} ")
    assert "forged" not in running.log


def test_a_worker_that_trusts_another_authority_is_told(
    running: Scheduler, pki: Pki, foreign: Pki, tmp_path: Path
) -> None:
    own = pki.credentials("client")
    using = context(foreign, (own.cert_chain_pem, own.key_pem), tmp_path)
    mine = refused_tls(running.port, "127.0.4.1", using)
    assert "code=refused_us" in running.await_log(f"peer={mine} ")


def test_who_speaks_tls_but_no_grpc_is_told(running: Scheduler, pki: Pki) -> None:
    with client_ssl_context(pki.credentials("client")).wrap_socket(
        connect(running.port, "127.0.4.2")
    ) as sock:
        assert "code=no_grpc" in running.await_log(f"peer={name_of(sock)} ")


def test_a_handshake_that_takes_too_long_is_told(running: Scheduler) -> None:
    mine = refused_bytes(running.port, "127.0.5.1", b"\x16\x03\x01\x00\xc8\x01")
    assert "code=timed_out" in running.await_log(f"peer={mine} ")


def test_the_audit_log_has_it_too(running: Scheduler, audit_path: Path) -> None:
    mine = refused_bytes(running.port, "127.0.6.1", b"GET / HTTP/1.1\r\n\r\n")
    wait_for(lambda: mine in audit_path.read_text())
    [entry] = [json.loads(line) for line in audit_path.read_text().splitlines() if mine in line]
    assert (entry["event"], entry["code"], entry["call"]) == ("denied", "plaintext_http", "handshake")
    assert entry["peer"] == mine
    assert mine in entry["text"]


def test_healthy_connections_probes_and_preflights_say_nothing(pki: Pki) -> None:
    mine = pki.credentials("client")
    with scheduler(**pki.env()) as running:
        preflight("127.0.0.1", running.port, mine, job="default", timeout_s=LIMIT_S)
        with channel(running.target, mine) as over:
            pb_grpc.RendezvousStub(over).Status(pb.StatusRequest(), timeout=LIMIT_S)
        using = client_ssl_context(mine)
        using.set_alpn_protocols(["h2"])
        using.wrap_socket(connect(running.port, "127.0.0.1")).close()
        connect(running.port, "127.0.0.1").close()  # as a probe of the port
        last = refused_bytes(running.port, "127.0.7.1", b"GET / HTTP/1.1\r\n\r\n")
        running.await_log(f"peer={last} ")
        running.signal(15)
        assert running.wait() == 143
    lines = [line for line in running.log.splitlines() if "call=handshake" in line or "handshaker" in line]
    assert len(lines) == 1, lines


def test_a_flood_is_counted_and_not_written(pki: Pki, tmp_path: Path) -> None:
    metrics, audit, begun = free_port(), tmp_path / "audit.jsonl", time.monotonic()
    with scheduler(**pki.env(), MS_AUDIT_LOG=str(audit), MS_METRICS_PORT=str(metrics)) as running:
        for _ in range(FLOOD):
            refused_bytes(running.port, "127.0.0.1", b"GET / HTTP/1.1\r\n\r\n")
        refused_bytes(running.port, "127.0.8.1", b"GET / HTTP/1.1\r\n\r\n")
        running.await_log("peer=127.0.8.1:")
        counted = read(metrics)['muster_failed_handshakes_total{reason="plaintext_http"}']
        running.signal(15)
        assert running.wait() == 143
    assert counted == FLOOD + 1
    lines = [line for line in running.log.splitlines() if "call=handshake" in line]
    assert 3 <= len(lines) <= 3 + (time.monotonic() - begun) / 10
    assert all(len(line) < 500 for line in lines)
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert len(entries) == 1 + len(lines)
    assert sum(entry.get("count", 1) for entry in entries[1:]) == FLOOD + 1
    assert not re.search(r"handshaker|\.cc:\d+", running.log)


def test_a_scheduler_that_cannot_start_says_so_on_its_own_standard_error(own_pki: Pki) -> None:
    own_pki.write_config(server_cert_path="missing.p12")
    done = run_scheduler("--port", "0", env=environment(**own_pki.env(), MS_WORKER_NUM="2"))
    assert done.returncode == 1
    assert "missing.p12" in done.stderr
