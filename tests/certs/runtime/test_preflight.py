from __future__ import annotations

import dataclasses
import ipaddress
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from muster.certs import errors
from muster.certs.pki.identity import Identity
from muster.certs.pki.peer import peer_of_pem
from muster.certs.pki.templates import host_names
from muster.certs.runtime.grpc_credentials import channel_credentials
from muster.certs.runtime.preflight import Preflight, fits_host, preflight
from muster.certs.runtime.probe import SILENT, spoken_at
from muster.certs.runtime.store import Credentials, load_credentials, revocations_for
from muster.certs.runtime.tls import server_ssl_context
from muster.wire.settings import client_options
from tests.certs.making import DAY, NOW, PASSWORD, Pki, certificate, key_pem, pem
from tests.certs.servers import grpc_server, server_credentials, socket_server, tls_server

IP = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
SCHEDULER = ("muster://job/scheduler",)


def check(port: int, credentials: Credentials, host: str = "127.0.0.1", timeout_s: float = 60) -> Preflight:
    return preflight(host, port, credentials, job="job", timeout_s=timeout_s)


def with_leaf(server: Credentials, leaf: x509.Certificate) -> grpc.ServerCredentials:
    return server_credentials(dataclasses.replace(server, key_pem=key_pem(), cert_chain_pem=pem(leaf)))


def call(port: int, credentials: Credentials, found: Preflight, host: str = "127.0.0.1") -> grpc.StatusCode:
    """What a call to a method that is not there ends with: UNIMPLEMENTED if TLS is up."""
    options: list[tuple[str, int | str]] = list(client_options())
    if found.name_override is not None:
        options.append(("grpc.ssl_target_name_override", found.name_override))
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.secure_channel(
        target, channel_credentials(credentials, found.server_leaf_pem), options
    ) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            method: Any = channel.unary_unary("/nobody/Home")
            method(b"", timeout=60)
        code: grpc.StatusCode = caught.value.code()
        return code


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_good_server_is_accepted_and_pinned(server: Credentials, worker: Credentials, host: str) -> None:
    with grpc_server(server, "[::1]" if host == "::1" else "127.0.0.1") as port:
        found = check(port, worker, host)
        assert found.server_leaf_pem == server.leaf_pem
        assert found.peer.identity == Identity("job", "scheduler")
        assert found.name_override is None
        assert call(port, worker, found, host) == grpc.StatusCode.UNIMPLEMENTED


def test_a_pinned_channel_accepts_no_other_server_of_the_same_authority(
    pki: Pki, server: Credentials, worker: Credentials
) -> None:
    other = certificate(pki.authority, uris=SCHEDULER, hosts=(IP,))
    with grpc_server(server) as port, grpc_server(with_leaf(server, other)) as twin:
        assert call(twin, worker, check(port, worker)) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("leaf", "error", "words"),
    [
        (
            {"start": NOW - 3 * DAY, "end": NOW - DAY},
            errors.ExpiredError,
            "expired; here it is .* valid from .* UTC",
        ),
        (
            {"start": NOW + DAY, "end": NOW + 3 * DAY},
            errors.NotYetValidError,
            "not valid yet; here it is .* valid from .* UTC",
        ),
        (
            {"uris": ("muster://job/worker",)},
            errors.IdentityError,
            "not accepted as scheduler.*has the role worker",
        ),
        ({"uris": ("muster://other/scheduler",)}, errors.IdentityError, "for the job 'other', not 'job'"),
        ({"uris": ()}, errors.IdentityError, "names no job and role"),
        ({"uris": (*SCHEDULER, *SCHEDULER)}, errors.IdentityError, "2 URIs"),
        (
            {"extensions": (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]),)},
            errors.UsageError,
            "not issued for use as a server",
        ),
        (
            {"hosts": (x509.DNSName("elsewhere.example"),)},
            errors.NameMismatchError,
            "for elsewhere.example, not for",
        ),
        (
            {"hosts": (x509.DNSName("127.0.0.1"),)},
            errors.NameMismatchError,
            "for 127.0.0.1, not for '127.0.0.1'",
        ),
        (
            {"hosts": ()},
            errors.NameMismatchError,
            r"names no host\. Issue it with",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_is_wrong_with_the_server_is_said_in_words(
    pki: Pki,
    server: Credentials,
    worker: Credentials,
    leaf: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    bad = certificate(pki.authority, **({"uris": SCHEDULER, "hosts": (IP,)} | leaf))  # type: ignore[arg-type]
    with grpc_server(with_leaf(server, bad)) as port:
        with pytest.raises(error, match=words) as caught:
            check(port, worker)
        assert f"127.0.0.1:{port}" in str(caught.value)


def test_a_server_of_a_foreign_authority(foreign: Pki, worker: Credentials) -> None:
    stranger = load_credentials(foreign.path("server.p12"), PASSWORD, foreign.ca)
    with (
        grpc_server(stranger) as port,
        pytest.raises(errors.UntrustedError, match="not trusted here") as caught,
    ):
        check(port, worker)
    # The words say which certificate it was, though OpenSSL keeps it to itself.
    assert stranger.fingerprint in str(caught.value)
    assert foreign.authority.certificate.subject.rfc4514_string() in str(caught.value)


def test_a_revoked_server(own_pki: Pki) -> None:
    server = load_credentials(own_pki.path("server.p12"), PASSWORD, own_pki.ca)
    worker = load_credentials(
        own_pki.path("client.p12"), PASSWORD, own_pki.ca, crl_path=own_pki.path("crl.pem")
    )
    with grpc_server(server) as port:
        assert check(port, worker)
        own_pki.authority.write_revocations([x509.load_pem_x509_certificate(server.leaf_pem).serial_number])
        warned = dataclasses.replace(worker, revocations=revocations_for(worker, own_pki.path("crl.pem")))
        with pytest.raises(errors.RevokedError, match=r"server at 127\.0\.0\.1.*was revoked by CN=Muster CA"):
            check(port, warned)


def test_a_server_that_refuses_us(pki: Pki, server: Credentials, foreign: Pki, worker: Credentials) -> None:
    """It has a certificate that we trust, but trusts another authority."""
    picky = dataclasses.replace(server, ca_pem=foreign.ca.read_bytes())
    with grpc_server(picky) as port, pytest.raises(errors.RefusedByPeerError) as caught:
        check(port, worker)
    assert "muster://job/worker" in str(caught.value) and worker.fingerprint[:23] in str(caught.value)
    with (
        tls_server(server_ssl_context(picky)) as port,
        pytest.raises(errors.RefusedByPeerError, match="does not trust the authority of our certificate"),
    ):
        check(port, worker)


@pytest.mark.parametrize(
    ("start", "end", "verdict"),
    [(-3, -1, "our certificate has expired there"), (1, 3, "it calls our certificate bad")],
)
def test_a_refusal_for_our_dates_says_them_and_what_time_it_is_here(
    pki: Pki, server: Credentials, worker: Credentials, start: int, end: int, verdict: str
) -> None:
    """TLS says nothing of the server's clock, and not even that a certificate is refused as too new."""
    dates = NOW + start * DAY, NOW + end * DAY
    shown = pem(certificate(pki.authority, start=dates[0], end=dates[1]))
    own = dataclasses.replace(
        worker, key_pem=key_pem(), cert_chain_pem=shown, not_before=dates[0], not_after=dates[1]
    )
    with (
        tls_server(server_ssl_context(server)) as port,
        pytest.raises(errors.RefusedByPeerError, match=verdict) as caught,
    ):
        check(port, own)
    said = f"valid from {dates[0]:%Y-%m-%d %H:%M} to {dates[1]:%Y-%m-%d %H:%M} UTC; here it is 20"
    assert said in caught.value.message


def test_a_plaintext_grpc_server(worker: Credentials) -> None:
    with grpc_server(None) as port, pytest.raises(errors.PlaintextError, match="does not speak TLS"):
        check(port, worker)


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"\x00" * 64, b"\x16\x03\x01\xff\xff"]
)
def test_servers_of_another_kind(worker: Credentials, words: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(65536)

    with socket_server(answer) as port, pytest.raises((errors.HandshakeError, ConnectionError)):
        check(port, worker)


def test_no_cipher_in_common(server: Credentials, worker: Credentials) -> None:
    context = server_ssl_context(dataclasses.replace(server, cipher_list=("ECDHE-ECDSA-AES256-GCM-SHA384",)))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    narrow = dataclasses.replace(worker, cipher_list=("ECDHE-ECDSA-AES128-GCM-SHA256",))
    with tls_server(context) as port, pytest.raises(errors.HandshakeError, match="no cipher suite in common"):
        check(port, narrow)


def test_a_server_that_stops_in_between_is_no_refusal(server: Credentials, worker: Credentials) -> None:
    """It ends after the handshake, as one that refuses us does, but then it is gone."""
    context = server_ssl_context(server)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            listener.close()
            with connection, context.wrap_socket(connection, server_side=True):
                pass

        thread = threading.Thread(target=serve)
        port = listener.getsockname()[1]
        thread.start()
        with pytest.raises(ConnectionRefusedError):
            check(port, worker)
        thread.join(60)


def test_what_may_pass_is_an_os_error(worker: Credentials, server: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError, match=f"^{SILENT}$"):
            check(port, worker, timeout_s=0.05)
        with pytest.raises(TimeoutError, match=f"^{SILENT}$"):
            spoken_at("127.0.0.1", port, timeout_s=0.05)
    with pytest.raises(ConnectionRefusedError):
        check(port, worker)
    with socket_server(lambda connection: None) as port, pytest.raises(ConnectionError):
        check(port, worker)


def test_nothing_of_ours_is_read_for_a_server_that_is_not_there(worker: Credentials) -> None:
    """Who waits for it tries often, and to read a key takes milliseconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        check(port, dataclasses.replace(worker, key_pem=b"not read"))


def test_a_server_silent_after_the_handshake_times_out(server: Credentials, worker: Credentials) -> None:
    context = server_ssl_context(server)

    def silent(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.recv(1)

    with socket_server(silent) as port, pytest.raises(TimeoutError, match=f"^{SILENT}$"):
        check(port, worker, timeout_s=0.5)


@pytest.mark.parametrize(
    ("name", "host", "fits"),
    [
        ("localhost", "localhost", True),
        ("LOCALHOST", "localhost", True),
        ("localhost.", "localhost", True),
        ("*.example.org", "a.example.org", True),
        ("*.example.org", "a.b.example.org", False),
        ("*.example.org", "example.org", False),
        ("*.org", "org", False),
        ("*", "localhost", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("10.0.0.1", "127.0.0.1", False),
    ],
)
def test_names_are_compared_as_tls_does(pki: Pki, name: str, host: str, fits: bool) -> None:
    [entry] = host_names([name]) if name != "*" else [x509.DNSName("*")]
    peer = peer_of_pem(pem(certificate(pki.authority, hosts=(entry,))))
    assert fits_host(host, peer) is fits


def test_legacy_servers_only_where_allowed(pki: Pki, server: Credentials, worker: Credentials) -> None:
    legacy = certificate(pki.authority, uris=(), common_names=("mindspore",))
    with grpc_server(with_leaf(server, legacy)) as port:
        with pytest.raises(errors.IdentityError):
            check(port, worker)
        lenient = dataclasses.replace(worker, require_identity=False)
        found = check(port, lenient)
        assert found.peer.identity.legacy and found.name_override == "mindspore"
        assert call(port, lenient, found) == grpc.StatusCode.UNIMPLEMENTED


def test_over_an_intermediate(pki: Pki, worker: Credentials, tmp_path: Path) -> None:
    from muster.certs.pki.authority import create_authority

    below = create_authority(tmp_path / "below", PASSWORD, parent=pki.authority)
    (tmp_path / "x.p12").write_bytes(below.issue(Identity("job", "scheduler"), ["127.0.0.1"]).p12(PASSWORD))
    with grpc_server(load_credentials(tmp_path / "x.p12", PASSWORD, pki.ca)) as port:
        found = check(port, worker)
        assert len(found.peer.links) == 2
        assert call(port, worker, found) == grpc.StatusCode.UNIMPLEMENTED
