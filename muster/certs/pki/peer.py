"""The certificate at the other end of a connection: identity, dates, revocation.

For interceptors: :func:`peer_of_pem` caches its results, and
:meth:`PeerCertificate.check` costs microseconds.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509

from muster.certs.errors import IdentityError
from muster.certs.pki.certificates import (
    UNREADABLE,
    ChainLink,
    check_period,
    check_strength,
    extension,
    fingerprint,
    link_of,
    name_of,
    parse_certificates,
    printable,
    utc_now,
)
from muster.certs.pki.identity import LEGACY, SCHEME, Identity, parse_uri
from muster.certs.pki.spiffe import SPIFFE_SCHEME, IdentityMap

if TYPE_CHECKING:
    from muster.certs.pki.revocation import Revocations


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """A peer's certificate, read once.

    Attributes:
        identity: job, role and node.
        name: the subject, in a form for log lines.
        fingerprint: SHA-256, as openssl writes it.
        not_before: first moment of validity.
        not_after: last moment of validity.
        common_name: the subject's common name, or an empty string.
        hosts: DNS names in the subject alternative name.
        addresses: IP addresses there.
        links: this certificate and the intermediates that came with it.
    """

    identity: Identity
    name: str
    fingerprint: str
    not_before: datetime.datetime
    not_after: datetime.datetime
    common_name: str
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    links: tuple[ChainLink, ...]

    def check(self, revocations: Revocations | None = None, now: datetime.datetime | None = None) -> None:
        """Refuses a certificate that is out of date or revoked.

        A resumed TLS session skips the check of dates, and gRPC has no revocation lists, so every call needs
        this.

        Args:
            revocations: the lists in force; None for none.
            now: the time to check for; by default the current one.

        Raises:
            ExpiredError, NotYetValidError, RevokedError: the certificate is refused.
            RevocationListError: a list is missing, invalid or out of date, so nobody is accepted.
        """
        now = now or utc_now()
        check_period(self.not_before, self.not_after, now, f"The certificate {self.describe()}")
        if revocations is not None:
            revocations.check(self.links, now)

    def describe(self) -> str:
        """Returns identity (or subject) and fingerprint, for logs and refusals."""
        who = self.name if self.identity.legacy else str(self.identity)
        return f"{who} (SHA-256 {self.fingerprint[:23]}...)"


@functools.lru_cache(maxsize=4096)
def peer_of_pem(
    pem: bytes, *, require_identity: bool = True, identity_map: IdentityMap | None = None
) -> PeerCertificate:
    """Reads a peer's certificate; results are cached.

    Args:
        pem: the certificate, or the chain with the leaf first, from ``auth_context()`` or ``ssl``.
        require_identity: whether certificates without an identity are refused.
        identity_map: the map of SPIFFE IDs to identities; None: there is none.

    Raises:
        IdentityError: the certificate has no identity, several, or a malformed one.
        WeakCertificateError: the key is too small, or the hash is broken.
        FileError: the bytes are not a certificate.
    """
    chain = parse_certificates(pem, "The peer's certificate")
    leaf = chain[0]
    try:
        alternatives = extension(leaf, x509.SubjectAlternativeName) or x509.SubjectAlternativeName([])
        constraints = extension(leaf, x509.BasicConstraints)
        common_names = [str(a.value) for a in leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    except UNREADABLE as error:
        raise IdentityError("The peer's certificate has malformed extensions or names.") from error
    if constraints is not None and constraints.ca:
        raise IdentityError(f"The certificate {name_of(leaf)} is an authority's: it names nobody.")
    hosts = alternatives.get_values_for_type(x509.DNSName)
    _refuse_control_characters(leaf, [*common_names, *hosts])
    identity = _identity(leaf, alternatives, common_names, require_identity, identity_map)
    for each in chain:
        check_strength(each, f"The certificate {name_of(each)}")
    return PeerCertificate(
        identity=identity,
        name=name_of(leaf),
        fingerprint=fingerprint(leaf),
        not_before=leaf.not_valid_before_utc,
        not_after=leaf.not_valid_after_utc,
        common_name=common_names[0] if common_names else "",
        hosts=tuple(hosts),
        addresses=tuple(str(each) for each in alternatives.get_values_for_type(x509.IPAddress)),
        links=tuple(link_of(certificate) for certificate in chain),
    )


def spiffe_id_of(certificate: x509.Certificate) -> str:
    """Returns the only URI of a certificate if it is a SPIFFE ID; otherwise an empty text."""
    try:
        alternatives = extension(certificate, x509.SubjectAlternativeName)
        uris = alternatives.get_values_for_type(x509.UniformResourceIdentifier) if alternatives else []
    except UNREADABLE:
        return ""
    return str(uris[0]) if len(uris) == 1 and uris[0].startswith(SPIFFE_SCHEME) else ""


def _refuse_control_characters(leaf: x509.Certificate, texts: list[str]) -> None:
    for text in texts:
        if not text.isprintable():
            raise IdentityError(
                f"The certificate {name_of(leaf)} has a control character in {printable(text)!r}."
            )


def _identity(
    leaf: x509.Certificate,
    alternatives: x509.SubjectAlternativeName,
    common_names: list[str],
    require_identity: bool,
    identity_map: IdentityMap | None,
) -> Identity:
    if len(common_names) > 1:
        raise IdentityError(f"The certificate {name_of(leaf)} has {len(common_names)} common names, not one.")
    uris = alternatives.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) > 1:
        raise IdentityError(f"The certificate {name_of(leaf)} has {len(uris)} URIs, and must have one.")
    if uris and uris[0].startswith(SPIFFE_SCHEME) and (identity_map is not None or require_identity):
        identity = (identity_map or IdentityMap()).identity_of(uris[0])
        _check_spiffe_usage(leaf)
        return identity
    if uris and (uris[0].startswith(SCHEME) or require_identity):
        return parse_uri(uris[0])
    if require_identity:
        raise IdentityError(
            f"The certificate {name_of(leaf)} names no job and role.",
            remedy="Issue one with `muster certs issue`, or trust every holder: require_identity false.",
        )
    return LEGACY


def _check_spiffe_usage(leaf: x509.Certificate) -> None:
    """Refuses a leaf that may sign certificates, or whose key must not sign (X509-SVID.md, section 4.3).

    Of https://github.com/spiffe/spiffe/blob/main/standards.
    """
    usage = extension(leaf, x509.KeyUsage)
    if usage is None or not usage.digital_signature or usage.key_cert_sign or usage.crl_sign:
        raise IdentityError(
            f"The certificate {name_of(leaf)} is no X.509-SVID: its key usage must be digitalSignature,"
            " and neither keyCertSign nor cRLSign."
        )
