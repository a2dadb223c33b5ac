"""A handshake with the scheduler before gRPC's own, because gRPC only says "Socket closed" if one fails.

It explains what is wrong on either side, checks role, job, name and revocation of the server's
certificate, and returns exactly that certificate, so that gRPC can be made to accept no other.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass

from muster.certs.errors import (
    CertificateError,
    ExpiredError,
    HandshakeError,
    IdentityError,
    NameMismatchError,
    NotYetValidError,
    PlaintextError,
    RefusedByPeerError,
    UntrustedError,
    UsageError,
    WeakCertificateError,
)
from muster.certs.pki.certificates import clock_here, fingerprint, name_of, parse_certificates, printable
from muster.certs.pki.peer import PeerCertificate
from muster.certs.runtime.probe import SILENT, trusting_context
from muster.certs.runtime.store import Credentials
from muster.certs.runtime.tls import client_ssl_context, peer_pem


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of a preflight.

    Attributes:
        server_leaf_pem: the server's certificate; trust exactly this one.
        name_override: the value of ``grpc.ssl_target_name_override``; None if the name fits anyway.
        peer: the server's certificate, read.
    """

    server_leaf_pem: bytes
    name_override: str | None
    peer: PeerCertificate


def preflight(
    host: str,
    port: int,
    credentials: Credentials,
    *,
    expect_role: str = "scheduler",
    job: str | None,
    timeout_s: float,
) -> Preflight:
    """Performs a handshake with a gRPC server, waits until it has accepted our certificate, and disconnects.

    Args:
        host: host name or address of the server.
        port: its port.
        credentials: our own; their revocation lists are applied to the server.
        expect_role: the role that the server's certificate must have.
        job: the job that it must be for; None for any.
        timeout_s: limit for all of it, in seconds.

    Raises:
        CertificateError: one side refuses the other; class and message say why. Trying again is of
            no use until somebody has changed something.
        OSError: nothing listens there, or the connection broke or timed out. Trying again may help.
    """
    deadline = time.monotonic() + timeout_s
    try:
        return _attempt(host, port, credentials, expect_role, job, deadline)
    except RefusedByPeerError:
        # A scheduler that is just being stopped looks the same. If it is gone, this raises OSError.
        return _attempt(host, port, credentials, expect_role, job, deadline)


def _attempt(
    host: str, port: int, credentials: Credentials, role: str, job: str | None, deadline: float
) -> Preflight:
    where = f"{host}:{port}"
    name = None if _address(host) else host
    with socket.create_connection((host, port), timeout=_left(deadline)) as plain:
        # Made only now: who waits for a scheduler to start tries often, and reading a key takes milliseconds.
        context = client_ssl_context(credentials)
        context.set_alpn_protocols(["h2"])
        try:
            plain.settimeout(_left(deadline))
            with context.wrap_socket(plain, server_hostname=name) as connection:
                peer = _check(peer_pem(connection), credentials, where, role, job)
                override = _name_override(peer, host, where)
                connection.settimeout(_left(deadline))
                _await_acceptance(connection, credentials, where)
                leaf = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()
                return Preflight(leaf, override, peer)
        except ssl.SSLCertVerificationError as error:
            raise verification_error(error, where, _shown_certificate(host, port, deadline)) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError(f"{where} closed the connection during the TLS handshake.") from None
        except ssl.SSLError as error:
            raise handshake_error(error, credentials, where) from None
        except TimeoutError:
            raise TimeoutError(SILENT) from None


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _shown_certificate(host: str, port: int, deadline: float) -> str:
    """Fetches the refused certificate of a server again, as OpenSSL does not return it.

    Sends nothing of ours, and uses only the certificate's text.
    """
    try:
        with (
            socket.create_connection((host, port), timeout=_left(deadline)) as plain,
            trusting_context().wrap_socket(plain) as connection,
        ):
            [leaf] = parse_certificates(peer_pem(connection), "It")[:1]
    except (OSError, CertificateError):
        return ""
    return (
        f"It shows {name_of(leaf)}, issued by {printable(leaf.issuer.rfc4514_string())}, valid from "
        f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M} to {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, "
        f"SHA-256 {fingerprint(leaf)}."
    )


def _check(pem: bytes, credentials: Credentials, where: str, role: str, job: str | None) -> PeerCertificate:
    try:
        peer = credentials.peer(pem)
    except CertificateError as error:
        raise type(error)(
            f"The server at {where} is not accepted: {error.message}", remedy=error.remedy
        ) from None
    refusal = peer.identity.may(role=role, job=job)
    if refusal is not None:
        raise IdentityError(
            f"The server at {where} is not accepted as {role}: {refusal}",
            remedy="Check MS_SCHED_HOST, MS_SCHED_PORT and MS_JOB_ID, and server_cert_path of the scheduler.",
        )
    return peer


def _await_acceptance(connection: ssl.SSLSocket, credentials: Credentials, where: str) -> None:
    """Waits for the server's first byte: in TLS 1.3 a client completes before the server has judged it."""
    try:
        first = connection.recv(1)
    except ConnectionResetError:
        first = b""
    if not first:
        raise RefusedByPeerError(
            f"{where} closed the connection after it saw our certificate {own_certificate(credentials)}.",
            remedy="Most likely it does not trust it: compare ca_cert_path, clock and CRL there.",
        )


def _name_override(peer: PeerCertificate, host: str, where: str) -> str | None:
    """Returns None if the certificate fits the host name; of a legacy one without host names its common name.

    Raises:
        NameMismatchError: the certificate names other hosts, or none.
    """
    known = [*peer.hosts, *peer.addresses]
    if known:
        if fits_host(host, peer):
            return None
        raise NameMismatchError(
            f"The server at {where} has a certificate for {', '.join(known[:8])}, not for {host!r}.",
            remedy=f"Issue it with `--hosts {host}`, or set MS_SCHED_HOST to one of those names.",
        )
    # A legacy certificate is pinned, so gRPC's own name check may compare it with itself. It looks for a
    # common name only where there are no alternative names at all, and an identity is one.
    if not peer.identity.legacy or not peer.common_name:
        raise NameMismatchError(
            f"The certificate of the server at {where} ({peer.name}) names no host.",
            remedy=f"Issue it with `--hosts {host}`.",
        )
    return None if peer.common_name.lower() == host.lower() else peer.common_name


def fits_host(host: str, peer: PeerCertificate) -> bool:
    """Whether a certificate is for the host, as TLS compares names."""
    # An address must stand there as an address: gRPC does not look for it among the names.
    address = _address(host)
    if address is not None:
        return any(_address(each) == address for each in peer.addresses)
    host = host.lower().rstrip(".")
    return any(_name_fits(host, name.lower().rstrip(".")) for name in peer.hosts)


def _name_fits(host: str, name: str) -> bool:
    if name.startswith("*."):
        return host.partition(".")[2] == name[2:] and "." in name[2:]
    return host == name


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None


# ---------------------------------------------------------------- OpenSSL's verdicts and alerts in words


def own_certificate(credentials: Credentials) -> str:
    """Describes our own certificate for the error of its refusal: name, dates, and the time on this host.

    The peer gives no reason; it may have refused the dates by a clock that is wrong.
    """
    dates = f"{credentials.not_before:%Y-%m-%d %H:%M} to {credentials.not_after:%Y-%m-%d %H:%M} UTC"
    who = f"{credentials.identity} (SHA-256 {credentials.fingerprint[:23]}..."
    return f"{who}, valid from {dates}; {clock_here()})"


_UNTRUSTED = (2, 18, 19, 20, 21, 27)
_WEAK = (66, 67, 68)


def verification_error(error: ssl.SSLCertVerificationError, where: str, shown: str) -> CertificateError:
    """Converts OpenSSL's verdict on the server's certificate (X509_V_ERR_...) to an error in words.

    Args:
        error: the verdict.
        where: host and port of the server.
        shown: a sentence on the certificate that it shows; may be empty.
    """
    made = _verdict(error.verify_code, error.verify_message, where)
    return type(made)(f"{made.message} {shown}".strip(), remedy=made.remedy)


def _verdict(code: int, words: str, where: str) -> CertificateError:
    if code == 10:
        return ExpiredError(
            f"The certificate of the server at {where}, or its authority's, has expired; {clock_here()}.",
            remedy="Renew it (`muster certs renew`), or check this host's clock.",
        )
    if code == 9:
        return NotYetValidError(
            f"The certificate of the server at {where}, or its authority's, is not valid yet; "
            f"{clock_here()}.",
            remedy="Check the clocks of both hosts.",
        )
    if code in _UNTRUSTED:
        return UntrustedError(
            f"The certificate of the server at {where} is of an authority not trusted here ({words}).",
            remedy="Both sides need certificates of one authority in ca_cert_path.",
        )
    if code == 26:
        return UsageError(f"The certificate of the server at {where} was not issued for use as a server.")
    if code in _WEAK:
        return WeakCertificateError(
            f"The certificate of the server at {where} is too weak ({words}).",
            remedy="Use EC P-256 or RSA of 2048 bits or more, signed with SHA-256.",
        )
    return UntrustedError(f"The certificate of the server at {where} is refused: {words}.")


_PLAINTEXT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_ALERTS = {
    "UNKNOWN_CA": "it does not trust the authority of our certificate",
    "CERTIFICATE_EXPIRED": "our certificate has expired there",
    "CERTIFICATE_REVOKED": "our certificate is revoked",
    "BAD_CERTIFICATE": "it calls our certificate bad",
    "UNSUPPORTED_CERTIFICATE": "our certificate was not issued for this use",
    "CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "CERTIFICATE_REQUIRED": "it got no certificate from us",
    "DECRYPT_ERROR": "our signature does not fit our certificate",
    "ACCESS_DENIED": "it denies us access",
}
_SETTINGS = {
    "HANDSHAKE_FAILURE": "no cipher suite in common; compare cipher_list on both sides",
    "PROTOCOL_VERSION": "no TLS version in common; 1.2 and 1.3 are spoken here",
    "UNSUPPORTED_PROTOCOL": "it speaks only TLS versions older than 1.2",
    "NO_SHARED_CIPHER": "no cipher suite in common; compare cipher_list on both sides",
}


def handshake_error(error: ssl.SSLError, credentials: Credentials, where: str) -> CertificateError:
    """Converts other failures of a handshake to an error in words: alerts, versions, ciphers, plaintext."""
    reason = error.reason or str(error)
    if reason in _PLAINTEXT:
        return PlaintextError(
            f"{where} does not speak TLS.",
            remedy="Start the scheduler with the same config.json, and check host and port.",
        )
    for word, meaning in _ALERTS.items():
        if "ALERT" in reason and word in reason:
            return RefusedByPeerError(
                f"{where} refused our certificate {own_certificate(credentials)}: {meaning}.",
                remedy="Compare ca_cert_path, clock and revocation lists on both sides.",
            )
    for word, meaning in _SETTINGS.items():
        if word in reason:
            return HandshakeError(f"The TLS handshake with {where} failed: {meaning}.")
    return HandshakeError(f"The TLS handshake with {where} failed: {reason.lower().replace('_', ' ')}.")
