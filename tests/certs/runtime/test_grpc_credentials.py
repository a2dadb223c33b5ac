from __future__ import annotations

import dataclasses
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from muster.certs.pki.identity import Identity
from muster.certs.pki.peer import peer_of_pem
from muster.certs.runtime.grpc_credentials import RotatingServerCredentials, channel_credentials
from muster.certs.runtime.preflight import preflight
from muster.certs.runtime.store import Credentials, load_credentials
from muster.certs.runtime.tls import client_ssl_context
from muster.wire.settings import client_options, server_options
from tests.certs.making import PASSWORD, Pki


class Echo(grpc.GenericRpcHandler):
    """Streams back what it gets, after who the caller is."""

    def service(self, details: Any) -> Any:
        def echo(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            [text] = context.auth_context()["x509_pem_cert"]
            yield peer_of_pem(text).identity.uri().encode()
            yield from requests

        return grpc.stream_stream_rpc_method_handler(echo)


class Feed:
    """Requests of a stream that stays open until closed."""

    def __init__(self) -> None:
        self._more = threading.Semaphore(0)
        self._items: list[bytes | None] = []

    def put(self, item: bytes | None) -> None:
        self._items.append(item)
        self._more.release()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._more.acquire()
            item = self._items.pop(0)
            if item is None:
                return
            yield item


def open_channel(port: int, worker: Credentials) -> grpc.Channel:
    found = preflight("127.0.0.1", port, worker, job="job", timeout_s=60)
    return grpc.secure_channel(
        f"127.0.0.1:{port}", channel_credentials(worker, found.server_leaf_pem), list(client_options())
    )


@pytest.fixture
def rotating(server: Credentials) -> Iterator[tuple[int, RotatingServerCredentials]]:
    with ThreadPoolExecutor(4) as pool:
        running = grpc.server(pool, options=server_options(), handlers=[Echo()])
        credentials = RotatingServerCredentials(server)
        port = running.add_secure_port("127.0.0.1:0", credentials.credentials)
        running.start()
        yield port, credentials
        running.stop(0).wait(60)


def test_a_stream_lives_through_a_rotation_and_new_connections_see_the_new_certificate(
    rotating: tuple[int, RotatingServerCredentials], own_pki: Pki, pki: Pki, worker: Credentials
) -> None:
    port, credentials = rotating
    feed = Feed()
    with open_channel(port, worker) as channel:
        method: Any = channel.stream_stream("/echo/Echo")
        stream = method(iter(feed), timeout=60)
        assert next(stream) == b"muster://job/worker"
        # Another authority signs the new certificate, and old and new clients are trusted.
        fresh = load_credentials(own_pki.path("server.p12"), PASSWORD, own_pki.ca)
        credentials.update(dataclasses.replace(fresh, ca_pem=fresh.ca_pem + worker.ca_pem))
        theirs = dataclasses.replace(worker, ca_pem=fresh.ca_pem)
        found = preflight("127.0.0.1", port, theirs, job="job", timeout_s=60)
        assert found.server_leaf_pem == fresh.leaf_pem
        with open_channel(port, theirs) as second:
            other: Any = second.stream_stream("/echo/Echo")
            assert list(other(iter([b"new"]), timeout=60)) == [b"muster://job/worker", b"new"]
        feed.put(b"still here")
        assert next(stream) == b"still here"
        feed.put(None)
        assert list(stream) == []


def test_the_server_demands_a_certificate(
    rotating: tuple[int, RotatingServerCredentials], server: Credentials, foreign: Pki
) -> None:
    port, _ = rotating
    stranger = load_credentials(foreign.path("client.p12"), PASSWORD, foreign.ca)
    bare = grpc.ssl_channel_credentials(root_certificates=server.ca_pem)
    for credentials in (bare, channel_credentials(stranger, server.leaf_pem)):
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, list(client_options())) as channel:
            method: Any = channel.stream_stream("/echo/Echo")
            with pytest.raises(grpc.RpcError) as caught:
                next(method(iter([b"x"]), timeout=60))
            code: grpc.StatusCode = caught.value.code()
            assert code == grpc.StatusCode.UNAVAILABLE


def test_a_node_bound_worker_is_seen_as_such(
    rotating: tuple[int, RotatingServerCredentials], pki: Pki
) -> None:
    bound = load_credentials(pki.path("node7.p12"), PASSWORD, pki.ca)
    with open_channel(rotating[0], bound) as channel:
        method: Any = channel.stream_stream("/echo/Echo")
        assert next(method(iter([]), timeout=60)).decode() == Identity("job", "worker", "node7").uri()


SERVE = """
import os, sys
from muster.certs.config import apply_cipher_list, load_config
config = load_config(sys.argv[1])
apply_cipher_list(config)
from muster.certs.runtime.store import load_configured
from tests.certs.servers import grpc_server
with grpc_server(load_configured(config, "scheduler", os.environ)) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


def test_the_configured_ciphers_are_in_force_in_grpc(own_pki: Pki) -> None:
    """Also MindSpore's habit of naming suites that are not there; what is not named is not spoken."""
    names = {"server_cert_path": "server.p12", "client_cert_path": "client.p12", "ca_cert_path": "ca.crt"}
    listed = "ECDHE-ECDSA-AES256-GCM-SHA384:DHE-RSA-AES128-CCM:ECDHE-ECDSA-AES128-SHA"
    own_pki.path("config.json").write_text(json.dumps(names | {"cipher_list": listed}))
    worker = load_credentials(own_pki.path("client.p12"), PASSWORD, own_pki.ca)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(own_pki.path("config.json"))],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "MS_SERVER_PASSWORD": PASSWORD.decode()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def speaks(cipher: str) -> bool:
            context = client_ssl_context(dataclasses.replace(worker, cipher_list=(cipher,)))
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
                try:
                    context.wrap_socket(plain).close()
                except (ssl.SSLError, ConnectionError):
                    return False
            return True

        spoken = [
            speaks(f"ECDHE-ECDSA-{kind}") for kind in ("AES256-GCM-SHA384", "AES128-GCM-SHA256", "AES128-SHA")
        ]
        process.communicate("", timeout=60)
    assert spoken == [True, False, False]
    assert process.returncode == 0


def test_the_settings_that_were_learnt_the_hard_way() -> None:
    server, client = dict(server_options()), dict(client_options())
    assert server["grpc.so_reuseport"] == 0
    assert client["grpc.enable_http_proxy"] == 0
    assert client["grpc.http2.max_pings_without_data"] == 0
    # A client that pings without data as often as it does must not be ended for it.
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.server_handshake_timeout_ms"] <= 10_000


@pytest.mark.parametrize(
    ("node_timeout_s", "after_ms", "timeout_ms"),
    [(0.5, 5_000, 5_000), (5.0, 5_000, 10_000), (60.0, 36_000, 120_000)],
)
def test_no_ping_ends_a_connection_in_a_pause_that_costs_no_place(
    node_timeout_s: float, after_ms: int, timeout_ms: int
) -> None:
    server, client = dict(server_options(node_timeout_s)), dict(client_options(node_timeout_s))
    for options in (server, client):
        assert options["grpc.keepalive_time_ms"] == after_ms
        assert options["grpc.keepalive_timeout_ms"] == timeout_ms
    assert client["grpc.http2.ping_timeout_ms"] == timeout_ms
    # A flooded server reads answers late: it must not take that for a client that is gone.
    assert server["grpc.http2.ping_timeout_ms"] == max(60_000, timeout_ms)
