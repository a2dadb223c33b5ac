from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from muster.certs import errors
from muster.certs.pki.authority import create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.store import Credentials, load_credentials
from muster.certs.runtime.tls import client_ssl_context, peer_pem, server_ssl_context
from tests.certs.making import DAY, NOW, PASSWORD, Pki, certificate, key_pem, pem


def handshake(
    client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[ssl.SSLSocket, ssl.SSLSocket, Exception | None]:
    """Both ends of a handshake over a socket pair, and what went wrong at the server's."""
    left, right = socket.socketpair()
    left.settimeout(60)
    right.settimeout(60)
    far = server.wrap_socket(right, server_side=True, do_handshake_on_connect=False)
    failures: list[Exception] = []

    def serve() -> None:
        try:
            far.do_handshake()
        except OSError as error:
            failures.append(error)
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    near = client.wrap_socket(left, do_handshake_on_connect=False)
    try:
        near.do_handshake()
    except OSError:
        near.close()
        raise
    finally:
        thread.join(60)
        if near.fileno() == -1:
            far.close()
    return near, far, failures[0] if failures else None


def test_both_sides_learn_who_the_other_is(server: Credentials, worker: Credentials) -> None:
    near, far, failure = handshake(client_ssl_context(worker), server_ssl_context(server))
    with near, far:
        assert failure is None
        assert worker.peer(peer_pem(near)).identity == Identity("job", "scheduler")
        assert server.peer(peer_pem(far)).identity == Identity("job", "worker")
        far.sendall(b"data")
        assert near.recv(4) == b"data"
        assert near.version() == "TLSv1.3"


def test_a_context_serves_many_connections_without_tickets(worker: Credentials) -> None:
    client, server = client_ssl_context(worker), server_ssl_context(worker)
    for _ in range(3):
        near, far, failure = handshake(client, server)
        with near, far:
            assert failure is None and not near.session_reused
            far.sendall(b"x")
            assert near.recv(1) == b"x"
            assert near.session is None or not near.session.has_ticket


def test_tls_1_2_with_the_configured_ciphers_only(worker: Credentials) -> None:
    narrow = dataclasses.replace(worker, cipher_list=("ECDHE-ECDSA-AES256-GCM-SHA384",))
    client = client_ssl_context(worker)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    near, far, failure = handshake(client, server_ssl_context(narrow))
    with near, far:
        assert failure is None
        assert near.cipher() == ("ECDHE-ECDSA-AES256-GCM-SHA384", "TLSv1.2", 256)


def test_older_versions_are_refused(worker: Credentials) -> None:
    for context in (client_ssl_context(worker), server_ssl_context(worker)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_a_foreign_server_is_refused_by_the_client(worker: Credentials, foreign: Pki) -> None:
    other = load_credentials(foreign.path("server.p12"), PASSWORD, foreign.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_ssl_context(worker), server_ssl_context(other))


def test_a_foreign_client_is_refused_by_the_server(worker: Credentials, foreign: Pki) -> None:
    stranger = load_credentials(foreign.path("client.p12"), PASSWORD, foreign.ca)
    stranger = dataclasses.replace(stranger, ca_pem=worker.ca_pem)
    near, far, failure = handshake(client_ssl_context(stranger), server_ssl_context(worker))
    with near, far:
        assert isinstance(failure, ssl.SSLError)
        with pytest.raises(OSError):
            if near.recv(1) == b"":
                raise ConnectionResetError


def test_a_client_without_certificate_is_refused(worker: Credentials) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=worker.ca_pem.decode())
    near, far, failure = handshake(bare, server_ssl_context(worker))
    with near, far:
        assert isinstance(failure, ssl.SSLError) and "PEER_DID_NOT_RETURN" in str(failure)


def test_an_expired_client_is_refused(worker: Credentials, pki: Pki) -> None:
    old = pem(certificate(pki.authority, start=NOW - 3 * DAY, end=NOW - DAY))
    stale = dataclasses.replace(worker, key_pem=key_pem(), cert_chain_pem=old)
    near, far, failure = handshake(client_ssl_context(stale), server_ssl_context(worker))
    with near, far:
        assert isinstance(failure, ssl.SSLCertVerificationError) and "expired" in str(failure)


def test_a_chain_over_an_intermediate_is_verified_and_reported(
    pki: Pki, worker: Credentials, tmp_path: Path
) -> None:
    below = create_authority(tmp_path / "below", PASSWORD, parent=pki.authority)
    (tmp_path / "x.p12").write_bytes(below.issue(Identity("job", "worker")).p12(PASSWORD))
    far_away = load_credentials(tmp_path / "x.p12", PASSWORD, pki.ca)
    near, far, failure = handshake(client_ssl_context(far_away), server_ssl_context(worker))
    with near, far:
        assert failure is None
        assert peer_pem(far).startswith(far_away.cert_chain_pem)


def test_an_intermediate_named_as_authority_is_trusted_by_itself(pki: Pki, tmp_path: Path) -> None:
    below = create_authority(tmp_path / "below", PASSWORD, parent=pki.authority)
    (tmp_path / "x.p12").write_bytes(below.issue(Identity("job", "worker")).p12(PASSWORD))
    (tmp_path / "ca.crt").write_bytes(pem(below.certificate))
    both = load_credentials(tmp_path / "x.p12", PASSWORD, tmp_path / "ca.crt")
    near, far, failure = handshake(client_ssl_context(both), server_ssl_context(both))
    with near, far:
        assert failure is None


@pytest.mark.parametrize("memfd", [True, False])
def test_the_key_reaches_the_context_without_a_file(
    worker: Credentials, memfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = open_files()
    assert client_ssl_context(worker)
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def open_files() -> set[tuple[str, str]]:
    """Descriptors of files, in memory or not: threads of earlier tests may open and close sockets now."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = str(each.readlink())
            if name.startswith("/") and not name.startswith("/proc/"):
                found.add((each.name, name))
    return found


def test_many_handshakes_at_once_share_a_context(worker: Credentials) -> None:
    client, server = client_ssl_context(worker), server_ssl_context(worker)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: handshake(client, server), range(16)))
    for near, far, failure in results:
        with near, far:
            assert failure is None
            assert worker.peer(peer_pem(near)).identity == worker.identity


def test_a_key_that_does_not_fit_is_a_typed_error(worker: Credentials) -> None:
    with pytest.raises(errors.CertificateError, match="KEY_VALUES_MISMATCH") as caught:
        client_ssl_context(dataclasses.replace(worker, key_pem=key_pem()))
    assert "PRIVATE" not in str(caught.value)


def test_no_certificate_before_the_handshake(worker: Credentials) -> None:
    left, right = socket.socketpair()
    near = client_ssl_context(worker).wrap_socket(left, do_handshake_on_connect=False)
    with right, near, pytest.raises((errors.HandshakeError, ValueError)):
        peer_pem(near)
