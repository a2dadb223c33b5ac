"""Turns OpenSSL's verdicts and alerts into errors with sentences."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from muster.certs.errors import (
    CertificateError,
    ExpiredError,
    HandshakeError,
    NotYetValidError,
    PlaintextError,
    RefusedByPeerError,
    UntrustedError,
    UsageError,
    WeakCertificateError,
)

if TYPE_CHECKING:
    from muster.certs.runtime.store import Credentials


def own_certificate(credentials: Credentials) -> str:
    """The name of our own certificate, for the sentence that it was refused."""
    return (
        f"{credentials.identity} (SHA-256 {credentials.fingerprint[:23]}..., valid until "
        f"{credentials.not_after:%Y-%m-%d})"
    )


_UNTRUSTED = (2, 18, 19, 20, 21, 27)
_WEAK = (66, 67, 68)


def verification_error(error: ssl.SSLCertVerificationError, where: str, shown: str) -> CertificateError:
    """Puts OpenSSL's verdict on the server's certificate (X509_V_ERR_...) in words.

    Args:
        error: the verdict.
        where: host and port of the server.
        shown: what certificate it shows, as a sentence; may be empty.
    """
    made = _verdict(error.verify_code, error.verify_message, where)
    return type(made)(f"{made.message} {shown}".strip(), remedy=made.remedy)


def _verdict(code: int, words: str, where: str) -> CertificateError:
    if code == 10:
        return ExpiredError(
            f"The certificate of the server at {where}, or its authority's, has expired.",
            remedy="Renew it (`muster certs renew`), or check this host's clock.",
        )
    if code == 9:
        return NotYetValidError(
            f"The certificate of the server at {where}, or its authority's, is not valid yet.",
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
    """Puts any other failure of a handshake in words: alerts, versions, ciphers, plaintext."""
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
