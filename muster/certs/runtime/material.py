"""A key, its certificates and the trusted authorities, from any source."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes


@dataclass(frozen=True, slots=True)
class Material:
    """A key with its certificates and the trusted authorities, not checked yet.

    Attributes:
        key: the private key.
        leaf: its certificate.
        extra: further certificates, in any order.
        roots: the authorities.
        source: a name of their source, for messages.
    """

    key: CertificateIssuerPrivateKeyTypes = field(repr=False)
    leaf: x509.Certificate
    extra: tuple[x509.Certificate, ...]
    roots: tuple[x509.Certificate, ...]
    source: str
