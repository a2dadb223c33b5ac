"""Attacks on the scheduler's port by those who have no certificate, or a bad one, or too many connections."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from muster.certs.pki.authority import create_authority
from muster.certs.pki.identity import Identity
from muster.certs.runtime.tls import client_ssl_context
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.attacks import http2
from tests.attacks.field import Field
from tests.attacks.http2 import Http2
from tests.certs.making import DAY, KEY, NOW, certificate, key_pem, pem
from tests.scheduler.processes import PASSWORD, channel, error_of
from tests.waiting import wait_for

HALF_HANDSHAKES = 500
SILENT = 60
STREAMS = 10_000
ENHANCE_YOUR_CALM = bytes((0, 0, 0, 0xB))
CLIENT_HELLO = bytes.fromhex("16030100") + b"\xc8\x01\x00\x00\xc4\x03\x03" + b"r" * 32
JOB_URI = ("muster://default/worker",)


def bare(call: Any) -> Any:
    """A call that takes bytes and gives bytes; the types of gRPC do not foresee it."""
    return call


def answer_to(port: int, data: bytes, wait_s: float = 20.0) -> bytes:
    """Sends bytes and returns all that comes until the server hangs up."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            while piece := sock.recv(4096):
                found += piece
        return found


PLAIN = {
    "http/1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http/2 without tls": http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0),
    "random bytes": os.urandom(4096),
    "zeros": bytes(4096),
    "a tls alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a huge tls record": b"\x16\x03\x03\xff\xff" + bytes(70_000),
    "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_no_tls_is_dropped(field: Field, name: str) -> None:
    answer = answer_to(field.port, PLAIN[name])
    assert b"HTTP" not in answer
    assert len(answer) < 64  # an alert at most


def hello_for(name: bytes) -> bytes:
    """A TLS 1.2 hello that asks for a server of that name, whatever bytes it is made of."""

    def sized(count: int, data: bytes) -> bytes:
        return len(data).to_bytes(count, "big") + data

    extensions = b"\0\0" + sized(2, sized(2, b"\0" + sized(2, name)))
    extensions += bytes.fromhex("000a00040002 0017 000d00080006 0403 0804 0401 002b0003020303")
    body = b"\3\3" + os.urandom(32) + sized(1, b"") + sized(2, b"\xc0\x2b\xc0\x2f") + sized(1, b"\0")
    return b"\x16\3\1" + sized(2, b"\1" + sized(3, body + sized(2, extensions)))


FORGED = {
    "a line of the log": b"x\n2026-01-01T00:00:00.000Z INFO joined job_id=default node_id=forged\n",
    "a command to the terminal": b"x\x1b[2J\x1b[31mforged\x07\r",
    "a handshake of another's": (
        b"x\nI1121 16:44:06.378199    4012 handshaker.cc:155] CallNextHandshakerLocked: error=UNKNOWN:"
        b" forged shutdown=false index=2, args={endpoint_peer_address=ipv4:6.6.6.6:1}\n"
    ),
    "a direction mark": "x\u202eforged".encode(),
}


def test_a_servers_name_forges_no_line_of_the_log(field: Field) -> None:
    """gRPC writes the name, as it came, to standard error. Of many names few are shown.

    Taken away: that the scheduler escapes what gRPC says, and each line of its log.
    """
    before, audited = len(field.running.log.splitlines()), len(field.audit())
    names = [*FORGED.values(), *(b"%s%d" % (FORGED["a line of the log"], number) for number in range(300))]
    for name in names:
        with socket.create_connection(("127.0.0.1", field.port), 20.0) as sock:
            sock.sendall(hello_for(name))
            assert sock.recv(1) == b"\x16"  # it was read in full: the server's hello is here
    wait_for(lambda: any("server name" in line for line in field.running.log.splitlines()[before:]))
    for line in field.running.log.splitlines()[before:]:
        assert line.isprintable()
        assert re.match(r"[-\dT:.]+Z (DEBUG|INFO|WARNING|ERROR) ", line), line
        assert "forged" not in line or " gRPC (ssl_transport_security.cc:" in line, line
        assert "6.6.6.6" not in line or " gRPC (ssl_transport_security.cc:" in line, line
    said = [line for line in field.running.log.splitlines()[before:] if "server name" in line]
    assert len(said) < 20
    assert all(len(line) <= 300 for line in said)
    assert not any("forged" in str(entry) or "6.6.6.6" in str(entry) for entry in field.audit()[audited:])


def test_plaintext_grpc_is_dropped(field: Field) -> None:
    with channel(field.running.target) as over:
        status = pb_grpc.RendezvousStub(over).Status
        assert error_of(lambda: status(pb.StatusRequest()))[0] == "UNAVAILABLE"


def shake(field: Field, context: ssl.SSLContext) -> None:
    """Shakes hands and waits for the server's first byte."""
    with (
        socket.create_connection(("127.0.0.1", field.port), timeout=20) as plain,
        context.wrap_socket(plain) as sock,
    ):
        assert sock.recv(1), "closed without a word"


def test_no_certificate_gets_nothing(field: Field) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with pytest.raises((AssertionError, OSError)):
        shake(field, context)


@pytest.mark.parametrize("suite", ["AES128-SHA", "ECDHE-ECDSA-AES128-SHA", "ECDHE-RSA-AES256-SHA384"])
def test_ciphers_that_are_not_configured_are_refused(field: Field, suite: str) -> None:
    context = client_ssl_context(field.pki.credentials("client"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(suite + ":@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        shake(field, context)


def test_tls_1_1_is_refused(field: Field) -> None:
    suites = b"\xc0\x09\xc0\x13\x00\x2f\x00\xff"
    body = b"\x03\x02" + b"r" * 32 + b"\0" + len(suites).to_bytes(2, "big") + suites + b"\x01\0"
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    answer = answer_to(field.port, b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake)
    assert answer[:2] in (b"", b"\x15\x03")
    assert answer[2:3] != b"\x16"


# ---------------------------------------------------------------- certificates that fail in the handshake


def expired(field: Field) -> tuple[bytes, bytes]:
    made = certificate(field.pki.authority, uris=JOB_URI, start=NOW - 2 * DAY, end=NOW - DAY)
    return pem(made), key_pem()


def not_yet_valid(field: Field) -> tuple[bytes, bytes]:
    made = certificate(field.pki.authority, uris=JOB_URI, start=NOW + DAY, end=NOW + 2 * DAY)
    return pem(made), key_pem()


def of_another_authority(field: Field) -> tuple[bytes, bytes]:
    directory = field.directory / "attacker"
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    issued = create_authority(directory, PASSWORD, force=True).issue(Identity("default", "worker"))
    return pem(issued.certificate), key_pem(issued.key)


def self_signed(field: Field) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives import hashes

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Muster CA")])
    uri = x509.UniformResourceIdentifier(JOB_URI[0])
    draft = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(KEY.public_key())
    draft = draft.serial_number(1).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)
    draft = draft.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    return pem(draft.sign(KEY, hashes.SHA256())), key_pem()


def for_servers_only(field: Field) -> tuple[bytes, bytes]:
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return pem(certificate(field.pki.authority, uris=JOB_URI, extensions=(usage,))), key_pem()


def signed_by_a_worker(field: Field) -> tuple[bytes, bytes]:
    """A worker's key signs a certificate for an operator, as if it were an authority."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    mine = field.pki.credentials("client")
    issuer = x509.load_pem_x509_certificate(mine.leaf_pem)
    key = load_pem_private_key(mine.key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    uri = x509.UniformResourceIdentifier("muster://default/operator")
    draft = x509.CertificateBuilder().subject_name(issuer.subject).issuer_name(issuer.subject)
    draft = draft.public_key(KEY.public_key()).serial_number(5)
    draft = draft.not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)
    draft = draft.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    return pem(draft.sign(key, hashes.SHA256())) + mine.leaf_pem, key_pem()


@pytest.mark.parametrize(
    "make",
    [expired, not_yet_valid, of_another_authority, self_signed, for_servers_only, signed_by_a_worker],
)
def test_the_handshake_refuses(field: Field, make: Callable[[Field], tuple[bytes, bytes]]) -> None:
    with field.odd_channel(*make(field)) as over:
        status = pb_grpc.RendezvousStub(over).Status
        assert error_of(lambda: status(pb.StatusRequest()))[0] == "UNAVAILABLE"


# ---------------------------------------------------------------- certificates that fail in the call


def control_characters(field: Field) -> tuple[bytes, bytes]:
    made = certificate(field.pki.authority, uris=JOB_URI, common_names=("a\nERROR forged",))
    return pem(made), key_pem()


def two_identities(field: Field) -> tuple[bytes, bytes]:
    uris = (*JOB_URI, "muster://default/operator")
    return pem(certificate(field.pki.authority, uris=uris)), key_pem()


def two_names(field: Field) -> tuple[bytes, bytes]:
    made = certificate(field.pki.authority, uris=JOB_URI, common_names=("worker", "operator"))
    return pem(made), key_pem()


def no_identity(field: Field) -> tuple[bytes, bytes]:
    return pem(certificate(field.pki.authority, uris=())), key_pem()


def a_malformed_identity(field: Field) -> tuple[bytes, bytes]:
    return pem(certificate(field.pki.authority, uris=("muster://default/../operator",))), key_pem()


def a_weak_key(field: Field) -> tuple[bytes, bytes]:
    key = rsa.generate_private_key(65537, 1024)
    return pem(certificate(field.pki.authority, uris=JOB_URI, key=key)), key_pem(key)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (control_characters, "control character"),
        (two_identities, "2 URIs"),
        (two_names, "2 common names"),
        (no_identity, "names no job and role"),
        (a_malformed_identity, "'..' does not exist"),
        (a_weak_key, "1024"),
    ],
)
def test_the_scheduler_refuses(
    field: Field, make: Callable[[Field], tuple[bytes, bytes]], words: str
) -> None:
    with field.odd_channel(*make(field)) as over:
        status = pb_grpc.RendezvousStub(over).Status
        code, sentence = error_of(lambda: status(pb.StatusRequest()))
    assert code == "UNAUTHENTICATED"
    assert words in sentence


# ---------------------------------------------------------------- too many, too slow


@pytest.fixture(scope="module")
def siege(field: Field) -> Iterator[list[socket.socket]]:
    """Half handshakes, silent sockets and slow writers, all at once."""
    sockets = []
    for index in range(HALF_HANDSHAKES + SILENT):
        sock = socket.create_connection(("127.0.0.1", field.port))
        if index < HALF_HANDSHAKES:
            sock.sendall(CLIENT_HELLO[: 5 + index % 30])
        sock.setblocking(False)
        sockets.append(sock)
    yield sockets
    for sock in sockets:
        sock.close()


def test_half_handshakes_keep_nobody_out(field: Field, siege: list[socket.socket]) -> None:
    assert field.status().state == "running"
    assert len(siege) == HALF_HANDSHAKES + SILENT


def test_a_slow_writer_is_dropped(field: Field) -> None:
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", field.port), timeout=0.2) as sock:
        for byte in CLIENT_HELLO + bytes(400):
            try:
                sock.sendall(bytes((byte,)))
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the scheduler listened to the end")
    assert time.monotonic() - begun < 60


def test_half_handshakes_and_silence_are_dropped(siege: list[socket.socket]) -> None:
    left, until = {sock.fileno(): sock for sock in siege}, time.monotonic() + 60
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        assert time.monotonic() < until, f"{len(left)} sockets are still open"
        for fd, _ in poll.poll(1000):
            with contextlib.suppress(OSError):
                if left[fd].recv(4096):
                    continue
            poll.unregister(fd)
            del left[fd]


def test_ten_thousand_streams_of_an_insider(field: Field) -> None:
    """Streams that never say who they are: a few of each connection are taken, the others reset."""
    mine, refused = field.pki.credentials("client"), 0
    connections = []
    for _ in range(-(-STREAMS // 250)):
        connection = Http2(field.port, mine)
        connection.send(b"".join(http2.request(2 * i + 1) for i in range(250)))
        connections.append(connection)
    assert field.status().state == "running"
    for connection in connections:
        for found in connection.frames(60.0):
            refused += found.kind == http2.RST_STREAM and found.body == ENHANCE_YOUR_CALM
            if found.kind == http2.RST_STREAM and found.stream == 499:
                break
        connection.close()
    assert refused >= STREAMS * 0.9


def test_ten_thousand_streams_on_one_connection(field: Field) -> None:
    """Also opened and reset at once, so that no limit of open streams is ever reached."""
    for reset in (False, True):
        connection = Http2(field.port, field.pki.credentials("client"))
        for i in range(STREAMS):
            rst = http2.frame(http2.RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08") if reset else b""
            if not connection.send(http2.request(2 * i + 1) + rst):
                break
        connection.close()
    assert field.status().state == "running"


def test_a_message_of_100_mb_is_refused_by_its_length(field: Field) -> None:
    connection = Http2(field.port, field.pki.credentials("client"))
    connection.send(http2.request(1) + http2.message(1, b"x" * 16_000, claimed=100_000_000))
    ended = next((found for found in connection.frames(60.0) if found.ends_stream), None)
    connection.close()
    assert ended is not None
    assert ended.kind == http2.RST_STREAM or b"larger than max" in ended.body


def test_50_mb_that_arrive_compressed_are_refused(field: Field) -> None:
    data = gzip.compress(bytes(50_000_000))  # before the call: to open a session may take 10 s
    connection = Http2(field.port, field.pki.credentials("client"))
    connection.send(
        http2.request(1, extra=(("grpc-encoding", "gzip"),)) + http2.message(1, data, packed=True)
    )
    ended = next((found for found in connection.frames(60.0) if found.ends_stream), None)
    connection.close()
    assert ended is not None
    assert b"larger than max" in ended.body


def test_a_megabyte_of_headers_is_refused(field: Field) -> None:
    with field.channel("client") as over:
        status = pb_grpc.RendezvousStub(over).Status
        many = tuple((f"x-{i}", "v" * 8000) for i in range(128))
        code, _ = error_of(lambda: status(pb.StatusRequest(), metadata=many, timeout=30))
    assert code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL")


def test_unknown_calls_reach_nothing(field: Field) -> None:
    with field.channel("client") as over:
        for path in ("/rendezvous.v1.Rendezvous/Shutdown", "/../../etc/passwd", "/grpc.reflection.v1/X"):
            code, _ = error_of(lambda path=path: bare(over.unary_unary(path))(b"", timeout=30))  # type: ignore[misc]
            assert code == "UNIMPLEMENTED"
