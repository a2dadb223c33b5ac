"""The fields of certificates and revocation lists that an authority fills in."""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muster.certs.errors import ConfigError
from muster.certs.pki.certificates import extension
from muster.certs.pki.identity import ANY_JOB, Identity

CLOCK_SKEW = datetime.timedelta(days=1)
"""How far other hosts' clocks may be behind the issuer's: certificates and lists are backdated by it."""
MAX_DAYS = 36500
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)


def host_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """Converts host names and addresses to the form that certificates contain, each once.

    Raises:
        ConfigError: a name is neither a host name nor an address.
    """
    names: dict[x509.GeneralName, None] = {}
    for host in hosts:
        try:
            names[x509.IPAddress(ipaddress.ip_address(host.strip("[]")))] = None
        except ValueError:
            names[x509.DNSName(_dns_name(host))] = None
    return list(names)


def check_days(days: int) -> datetime.timedelta:
    """Converts a number of days to a time span.

    Raises:
        ConfigError: the number is out of range.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"--days is {days}; legal are 1 to {MAX_DAYS}.")
    return datetime.timedelta(days=days)


def _dns_name(host: str) -> str:
    try:
        ascii_name = host.encode("idna").decode().lower().rstrip(".")
    except UnicodeError:
        ascii_name = ""
    labels = ascii_name.removeprefix("*.").split(".")
    if len(ascii_name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(
            f"{host[:300]!r} is neither a host name nor an address.", remedy="Example: node7,10.0.0.7"
        )
    return ascii_name


def blank_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    """Begins a certificate: names, key, random serial number, dates with room for clock skew."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def authority_name(name: str) -> x509.Name:
    """Returns an authority's name; by default one with a number, so that names differ.

    Raises:
        ConfigError: the name is too long or not printable.
    """
    name = name or f"Muster CA {secrets.token_hex(4)}"
    if len(name) > 64 or not name.isprintable() or name != name.strip():
        raise ConfigError(f"The name {name[:100]!r} is not usable; legal are 1 to 64 printable characters.")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def authority_draft(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    """Builds an authority's certificate, ready to be signed."""
    return (
        blank_certificate(subject, issuer, public_key, start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(key_usage(authority=True), critical=True)
    )


def leaf_name(identity: Identity) -> x509.Name:
    """Returns a common name for people; only the URI is evaluated."""
    first = next(iter(identity.bound_to), None)
    parts = [first, None if identity.job == ANY_JOB else identity.job, identity.role]
    text = ".".join(re.sub(r"[^A-Za-z0-9_.-]", "-", part) for part in parts if part)
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[-64:])])


def usages(role: str) -> Sequence[x509.ObjectIdentifier]:
    """Returns the extended key usages of a role."""
    # Workers listen too (for their peers), and a scheduler may ask another for its status.
    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    return [client] if role == "operator" else [client, server]


def key_usage(*, authority: bool) -> x509.KeyUsage:
    """Returns the key usage of an authority's or another certificate."""
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def authority_key_id(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Returns an identifier of the signing key, as two authorities may have the same name."""
    own = extension(authority, x509.SubjectKeyIdentifier)
    if own is None:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
