"""A stand-in for SPIRE's agent: serves the Workload API on Unix sockets, with an authority of its own."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from spiffe._proto import workload_pb2 as api

DOMAIN = "prod.example"


@dataclass(frozen=True)
class AgentEntry:
    """The identity that one socket hands out.

    Attributes:
        path: the path of the SPIFFE ID in the agent's trust domain.
        dns: the DNS names in a server's certificate.
        mode: the answer: ``serve``, ``refuse``, ``rubbish``, ``silent`` or ``huge``.
        life_s: the certificates' lifetime in seconds.
        authority: whether the leaf certificate is also an authority.
        usage: whether the leaf certificate has a key usage.
        more: further URIs in the certificate.
    """

    path: str
    dns: tuple[str, ...] = ()
    mode: str = "serve"
    life_s: float = 3600.0
    authority: bool = False
    usage: bool = True
    more: tuple[str, ...] = ()


class StandInAgent:
    """The agent of one host. Sockets stay until it is closed; what they hand out may change."""

    def __init__(self, domain: str = DOMAIN) -> None:
        self.domain = domain
        self.entries: dict[Path, AgentEntry] = {}
        self.asked = 0
        self._changed = threading.Condition()
        self._version = 0
        self._servers: dict[Path, grpc.Server] = {}
        self._authorities = [self._make_authority()]
        self._given: dict[Path, list[int]] = {}
        self._lists = 0

    def __enter__(self) -> StandInAgent:
        """Returns itself; the sockets are closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all sockets."""
        for socket in list(self._servers):
            self.stop(socket)

    def serve(self, socket: Path, entry: AgentEntry) -> str:
        """Opens a socket for one workload; returns its address."""
        self.entries[socket] = entry
        server = grpc.server(futures.ThreadPoolExecutor(16))
        method = grpc.unary_stream_rpc_method_handler(
            lambda request, context: self._stream(socket, context),
            request_deserializer=api.X509SVIDRequest.FromString,
            response_serializer=lambda answer: (
                answer if isinstance(answer, bytes) else answer.SerializeToString()
            ),
        )
        handlers = grpc.method_handlers_generic_handler("SpiffeWorkloadAPI", {"FetchX509SVID": method})
        server.add_generic_rpc_handlers((handlers,))
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        self._servers[socket] = server
        return f"unix://{socket}"

    def stop(self, socket: Path) -> None:
        """Ends the service of a socket, as when the agent restarts."""
        with self._changed:
            server = self._servers.pop(socket)
            self._changed.notify_all()
        server.stop(0).wait()

    def change(self, socket: Path, **changes: Any) -> None:
        """Changes what a socket hands out from now on."""
        self.entries[socket] = replace(self.entries[socket], **changes)
        self.rotate()

    def rotate(self) -> None:
        """Sends all workloads new certificates."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def rotate_authority(self) -> None:
        """Signs with a new authority, and adds it to the bundle, which keeps the old ones."""
        self._authorities.append(self._make_authority())
        self.rotate()

    def forget_old_authorities(self) -> None:
        """Removes all authorities but the newest from the bundle."""
        self._authorities = self._authorities[-1:]
        self.rotate()

    def serials(self, socket: Path) -> list[int]:
        """Returns the serial numbers of all certificates that a socket has handed out."""
        return list(self._given.get(socket, ()))

    def revocation_lists(self, serials: Iterable[int] = ()) -> bytes:
        """Returns a revocation list of each authority in the bundle with these serial numbers, as PEM."""
        now = datetime.datetime.now(datetime.UTC)
        self._lists += 1
        entries = [
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            for serial in serials
        ]
        text = b""
        for key, authority in self._authorities:
            made = (
                x509.CertificateRevocationListBuilder()
                .issuer_name(authority.subject)
                .last_update(now - datetime.timedelta(seconds=60))
                .next_update(now + datetime.timedelta(days=1))
                .add_extension(x509.CRLNumber(self._lists), critical=False)
            )
            for entry in entries:
                made = made.add_revoked_certificate(entry)
            text += made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
        return text

    def _stream(self, socket: Path, context: grpc.ServicerContext) -> Iterator[Any]:
        self.asked += 1
        if ("workload.spiffe.io", "true") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "security header missing from request")
        sent = -1
        while context.is_active() and socket in self._servers:
            sent, entry = self._newer_than(sent), self.entries[socket]
            if entry.mode == "refuse":
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "no identity issued")
            elif entry.mode == "rubbish":
                yield b"\xff" * 100
            elif entry.mode == "huge":
                yield api.X509SVIDResponse(crl=[b"x" * (8 << 20)])
            elif entry.mode == "serve" and socket in self._servers:
                yield self._answer(socket, entry)

    def _newer_than(self, sent: int) -> int:
        """Waits until there is a newer version than ``sent``, or a socket is closed; returns the version."""
        with self._changed:
            if self._version == sent:
                self._changed.wait()
            return self._version

    def _answer(self, socket: Path, entry: AgentEntry) -> api.X509SVIDResponse:
        key, leaf = self.issue(entry)
        self._given.setdefault(socket, []).append(leaf.serial_number)
        bundle = b"".join(each.public_bytes(Encoding.DER) for _, each in self._authorities)
        svid = api.X509SVID(
            spiffe_id=f"spiffe://{self.domain}/{entry.path}",
            x509_svid=leaf.public_bytes(Encoding.DER),
            x509_svid_key=key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
            bundle=bundle,
        )
        return api.X509SVIDResponse(svids=[svid])

    def issue(self, entry: AgentEntry) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Returns a new key, and its certificate signed by the newest authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        signing, authority = self._authorities[-1]
        uris = [f"spiffe://{self.domain}/{entry.path}", *entry.more]
        names = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, entry.dns)]
        made = _builder("workload", authority.subject, key, entry.life_s)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = made.add_extension(x509.BasicConstraints(entry.authority, None), critical=True)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = made.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        if entry.usage:
            made = made.add_extension(_usage(signs_certificates=entry.authority), critical=True)
        return key, made.sign(signing, hashes.SHA256())

    def _make_authority(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"authority {x509.random_serial_number()}"
        made = _builder(name, None, key, 86400.0)
        made = made.add_extension(x509.BasicConstraints(True, None), critical=True)
        made = made.add_extension(_usage(signs_certificates=True), critical=True)
        uri = x509.UniformResourceIdentifier(f"spiffe://{self.domain}")
        made = made.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        return key, made.sign(key, hashes.SHA256())


def _builder(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey, life_s: float
) -> x509.CertificateBuilder:
    now, subject = datetime.datetime.now(datetime.UTC), _name(name)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=60))
        .not_valid_after(now + datetime.timedelta(seconds=life_s))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
