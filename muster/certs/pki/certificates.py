"""Single certificates: reading, describing, strength, dates, use and chains."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID

from muster.certs.errors import (
    ExpiredError,
    FileError,
    NotYetValidError,
    UntrustedError,
    UsageError,
    WeakCertificateError,
)
from muster.wire.log_lines import one_line

ExtensionT = TypeVar("ExtensionT", bound=x509.ExtensionType)
MIN_RSA_BITS = 2048
CURVES = ("secp256r1", "secp384r1", "secp521r1")
WEAK_HASHES = ("md5", "sha1")
MAX_CHAIN = 8
MAX_CERTIFICATES = 1024
"""In one PEM text."""

_MAX_SHOWN = 200
UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,  # older releases, for unknown kinds of strings
    OverflowError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    CryptographyDeprecationWarning,  # where warnings are errors; otherwise check_readable finds the same
)
"""The library's exceptions for malformed certificates and lists, in parsing or later in reading."""


def utc_now() -> datetime.datetime:
    """Returns the current time, with time zone."""
    return datetime.datetime.now(datetime.UTC)


def parse_certificates(pem: bytes, source: str) -> list[x509.Certificate]:
    """Reads the certificates of a PEM text.

    Args:
        pem: the text.
        source: a name of the text for messages: a file name, or "the peer's certificate".

    Raises:
        FileError: the text has no certificate, or a malformed one.
    """
    count = pem.count(b"-----BEGIN CERTIFICATE")
    if count > MAX_CERTIFICATES:
        raise FileError(f"{source} holds {count} certificates; legal are at most {MAX_CERTIFICATES}.")
    try:
        certificates = x509.load_pem_x509_certificates(pem)
        for certificate in certificates:
            check_readable(certificate)
    except UNREADABLE as error:
        hint = "" if b"-----BEGIN CERTIFICATE" in pem else " It holds no PEM certificate."
        raise FileError(
            f"{source} cannot be read as a certificate.{hint}",
            remedy="" if hint == "" else "PEM text begins with -----BEGIN CERTIFICATE-----.",
        ) from error
    return certificates


def check_readable(certificate: x509.Certificate) -> None:
    """Reads the fields that the library decodes late, so that a malformed one is noticed here.

    Raises:
        Exception: a field is malformed; the class is one of :data:`UNREADABLE`.
    """
    for name in (certificate.subject, certificate.issuer):
        name.rfc4514_string()
        name.public_bytes()
    if certificate.not_valid_before_utc > certificate.not_valid_after_utc or certificate.serial_number <= 0:
        raise ValueError("its dates or serial number make no sense")


def to_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Returns the certificates as one PEM text."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def fingerprint(certificate: x509.Certificate) -> str:
    """Returns the SHA-256 fingerprint, in openssl's form."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def name_of(certificate: x509.Certificate) -> str:
    """Returns a name for messages: the subject, or the serial number if that is empty."""
    return printable(certificate.subject.rfc4514_string()) or f"serial {certificate.serial_number:x}"


def common_name(certificate: x509.Certificate) -> str:
    """Returns the subject's common name; empty if there is none."""
    found = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def printable(text: str) -> str:
    """Escapes text from a certificate so that it fits on a log line."""
    shown = one_line(text[: _MAX_SHOWN + 1])
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."


def check_dates(certificate: x509.Certificate, now: datetime.datetime, what: str) -> None:
    """Refuses a certificate that is not valid now.

    Args:
        certificate: the certificate.
        now: the time to check for, with time zone.
        what: how to call it in the message.

    Raises:
        ExpiredError: ``now`` is after its last moment.
        NotYetValidError: ``now`` is before its first moment.
    """
    check_period(certificate.not_valid_before_utc, certificate.not_valid_after_utc, now, what)


def check_period(
    not_before: datetime.datetime, not_after: datetime.datetime, now: datetime.datetime, what: str
) -> None:
    """Does the same as :func:`check_dates`, for dates that were already read."""
    if now > not_after:
        raise ExpiredError(
            f"{what} expired at {not_after:%Y-%m-%d %H:%M} UTC; {clock_here(now)}.",
            remedy="Issue a new one: `muster certs renew FILE`, or check this host's clock.",
        )
    if now < not_before:
        raise NotYetValidError(
            f"{what} is not valid before {not_before:%Y-%m-%d %H:%M} UTC; {clock_here(now)}.",
            remedy="Check the clocks of this host and of the one that issued it.",
        )


def clock_here(now: datetime.datetime | None = None) -> str:
    """Returns a phrase with this host's time, for errors about the dates of a certificate."""
    return f"here it is {now or utc_now():%Y-%m-%d %H:%M} UTC"


def check_strength(certificate: x509.Certificate, what: str) -> None:
    """Refuses small keys, unusual curves and, unless self-signed, SHA-1 and MD5 signatures.

    Raises:
        WeakCertificateError: the certificate is too weak; the message names the minimum.
    """
    least = f"Use EC P-256 or RSA of {MIN_RSA_BITS} bits or more, signed with SHA-256."
    try:
        key = certificate.public_key()
        digest = certificate.signature_hash_algorithm
    except UNREADABLE as error:
        raise WeakCertificateError(
            f"{what} has a key or signature of an unknown kind.", remedy=least
        ) from error
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < MIN_RSA_BITS:
            raise WeakCertificateError(f"{what} has an RSA key of only {key.key_size} bits.", remedy=least)
    elif not isinstance(key, ec.EllipticCurvePublicKey):
        kind = type(key).__name__.removesuffix("PublicKey")
        raise WeakCertificateError(
            f"{what} has a key of the kind {kind}, which TLS here does not take.", remedy=least
        )
    elif key.curve.name not in CURVES:
        raise WeakCertificateError(f"{what} has a key on the curve {key.curve.name}.", remedy=least)
    # A root's own signature proves nothing and is never checked.
    if digest is not None and digest.name in WEAK_HASHES and certificate.issuer != certificate.subject:
        raise WeakCertificateError(f"{what} is signed with {digest.name.upper()}.", remedy=least)


def extension(
    of: x509.Certificate | x509.CertificateRevocationList, kind: type[ExtensionT]
) -> ExtensionT | None:
    """Returns the extension of this kind; None if there is none.

    Raises:
        Exception: the extension is malformed; the class is one of :data:`UNREADABLE`.
    """
    try:
        return of.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether a certificate may issue others."""
    try:
        constraints, usage = (
            extension(certificate, x509.BasicConstraints),
            extension(certificate, x509.KeyUsage),
        )
        return constraints is not None and constraints.ca and (usage is None or usage.key_cert_sign)
    except UNREADABLE:
        return False


def check_purpose(certificate: x509.Certificate, purpose: str, what: str) -> None:
    """Refuses a certificate that must not be used for this purpose.

    Args:
        certificate: the leaf.
        purpose: ``server`` or ``client``.
        what: how to call it in the message.

    Raises:
        UsageError: the certificate is an authority's, or its extended key usage lacks the purpose.
    """
    oids = ExtendedKeyUsageOID
    needed = oids.SERVER_AUTH if purpose == "server" else oids.CLIENT_AUTH
    try:
        usage = extension(certificate, x509.ExtendedKeyUsage)
    except UNREADABLE as error:
        raise UsageError(f"{what} has malformed extensions.") from error
    if usage is not None and needed not in usage and oids.ANY_EXTENDED_KEY_USAGE not in usage:
        raise UsageError(
            f"{what} was not issued for use as a TLS {purpose}.",
            remedy="Use the file that was made for this role, or issue one with `muster certs issue`.",
        )


def issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether the issuer's name and key fit the certificate's signature."""
    if certificate.issuer != issuer.subject:
        return False
    try:
        certificate.verify_directly_issued_by(issuer)
    except UNREADABLE:
        return False
    return True


def build_chain(
    leaf: x509.Certificate, extra: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], what: str
) -> list[x509.Certificate]:
    """Finds the chain of certificates from a leaf to a trusted authority.

    Args:
        leaf: the certificate to trust.
        extra: intermediate certificates that came with it; not trusted by themselves.
        roots: the authorities that are trusted; each may itself be an intermediate.
        what: how to call the leaf in the message.

    Returns:
        leaf, intermediates..., trusted authority.

    Raises:
        UntrustedError: no chain leads to a trusted authority.
        WeakCertificateError: a key or signature on it is too weak.
    """
    chain = [leaf]
    while len(chain) <= MAX_CHAIN:
        last = chain[-1]
        # First, because no signature with a broken hash is verified below.
        check_strength(last, what if last is leaf else f"The authority {name_of(last)}")
        anchor = next((root for root in roots if issued_by(last, root)), None)
        if anchor is not None:
            return [*chain, anchor]
        above = (c for c in extra if c not in chain and is_authority(c) and issued_by(last, c))
        following = next(above, None)
        if following is None:
            break
        chain.append(following)
    known = "; ".join(name_of(root) for root in roots[:5])
    issuer = printable(chain[-1].issuer.rfc4514_string())
    same_name = any(root.subject == chain[-1].issuer for root in roots)
    twin = " An authority of that name is trusted, but has another key." if same_name else ""
    raise UntrustedError(
        f"{what} was issued by {issuer}, which is not trusted here.{twin}",
        remedy=f"Trusted are: {known}. Both sides need certificates of one authority in ca_cert_path.",
    )


def check_chain(chain: Sequence[x509.Certificate], now: datetime.datetime, what: str) -> None:
    """Checks dates and strength of each certificate of a chain as :func:`build_chain` returns it.

    Raises:
        ExpiredError, NotYetValidError: one is not valid now.
        WeakCertificateError: a certificate has a small key or a broken hash.
    """
    for depth, certificate in enumerate(chain):
        name = what if depth == 0 else f"The authority {name_of(certificate)}"
        check_strength(certificate, name)
        check_dates(certificate, now, name)


def load_authorities(pem: bytes, source: str) -> list[x509.Certificate]:
    """Reads the trusted authorities.

    Raises:
        FileError: the file cannot be read.
        UsageError: a certificate is not an authority's.
    """
    roots = parse_certificates(pem, source)
    for root in roots:
        if not is_authority(root):
            raise UsageError(
                f"{source} holds {name_of(root)}, which is not an authority's certificate.",
                remedy="ca_cert_path names what issued the others (CA:TRUE, keyCertSign).",
            )
    return roots


@dataclass(frozen=True, slots=True)
class ChainLink:
    """The facts about one certificate of a chain that a check against revocation lists needs."""

    name: str
    subject: bytes
    issuer: bytes
    issuer_key_id: bytes | None
    serial: int


def link_of(certificate: x509.Certificate) -> ChainLink:
    """Reads from a certificate the facts for a check against revocation lists."""
    try:
        key = extension(certificate, x509.AuthorityKeyIdentifier)
    except UNREADABLE:
        key = None
    return ChainLink(
        name=name_of(certificate),
        subject=certificate.subject.public_bytes(),
        issuer=certificate.issuer.public_bytes(),
        issuer_key_id=key.key_identifier if key is not None else None,
        serial=certificate.serial_number,
    )


def list_number(crl: x509.CertificateRevocationList | None) -> int:
    """Returns a revocation list's CRL number; 0 if there is no list, or it has no number."""
    number = None if crl is None else extension(crl, x509.CRLNumber)
    return 0 if number is None else number.crl_number
