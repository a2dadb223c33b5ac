"""Shows certificates and revocation lists as text and as JSON."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from muster.certs.errors import CertificateError
from muster.certs.files import read_file
from muster.certs.pki.certificates import (
    UNREADABLE,
    check_dates,
    check_strength,
    fingerprint,
    is_authority,
    name_of,
    parse_certificates,
    printable,
    to_pem,
)
from muster.certs.pki.peer import PeerCertificate, peer_of_pem, spiffe_id_of
from muster.certs.pki.records import read_lists
from muster.certs.pki.spiffe import IdentityMap

MAX_SERIALS = 20


def describe_file(
    path: Path,
    certificates: list[x509.Certificate] | None,
    now: datetime.datetime,
    identity_map: IdentityMap | None = None,
) -> list[dict[str, Any]]:
    """Returns facts about each certificate and revocation list of a file.

    Args:
        path: the file.
        certificates: the certificates of a PKCS#12 file; None for PEM.
        now: the time from which "time left" is counted.
        identity_map: the map of SPIFFE IDs to identities; None: it is not known.

    Raises:
        FileError: the file is neither PKCS#12 nor PEM.
    """
    if certificates is None:
        data = read_file(path, "The file")
        if b"-----BEGIN X509 CRL-----" in data:
            return [{"file": str(path), **describe_list(crl, now)} for crl in read_lists(path)]
        certificates = parse_certificates(data, f"The file {str(path)!r}")
    return [{"file": str(path), **describe(each, now, identity_map)} for each in certificates]


def describe(
    certificate: x509.Certificate, now: datetime.datetime, identity_map: IdentityMap | None = None
) -> dict[str, Any]:
    """Collects facts about a certificate; ``problems`` lists why a peer would refuse it.

    For a certificate with a SPIFFE ID they name the identity that the map gives it, or say that a map is
    needed.
    """
    facts: dict[str, Any] = {"subject": name_of(certificate)}
    problems: list[str] = []
    if is_authority(certificate):
        facts["authority"] = True
    else:
        spiffe_id = spiffe_id_of(certificate)
        facts |= {"spiffe_id": spiffe_id} if spiffe_id else {}
        if spiffe_id and identity_map is None:
            facts["identity"] = "what identity_map says; --config FILE shows it"
        else:
            try:
                facts |= _who(peer_of_pem(to_pem([certificate]), identity_map=identity_map))
            except CertificateError as error:
                problems.append(str(error))
    for check in (check_strength, lambda c, what: check_dates(c, now, what)):
        try:
            check(certificate, "It")
        except CertificateError as error:
            problems.append(str(error))
    return facts | {
        "issuer": printable(certificate.issuer.rfc4514_string()),
        "valid_from": _time(certificate.not_valid_before_utc),
        "valid_until": _time(certificate.not_valid_after_utc),
        "days_left": (certificate.not_valid_after_utc - now).days,
        "time_left": _span(certificate.not_valid_after_utc - now),
        "key": _key(certificate),
        "serial": f"{certificate.serial_number:x}",
        "sha256": fingerprint(certificate),
        "problems": list(dict.fromkeys(problems)),
    }


def describe_list(crl: x509.CertificateRevocationList, now: datetime.datetime) -> dict[str, Any]:
    """Returns facts about a revocation list. Its signature is not checked here."""
    until = crl.next_update_utc
    serials = [f"{entry.serial_number:x}" for entry in crl]
    return {
        "revocation_list_of": printable(crl.issuer.rfc4514_string()),
        "valid_from": _time(crl.last_update_utc),
        "valid_until": _time(until) if until else "",
        "days_left": (until - now).days if until else None,
        "revoked_count": len(serials),
        "revoked": serials[:MAX_SERIALS],
        "problems": [] if until and now <= until else ["It is out of date: nobody is let in."],
    }


def as_text(facts: dict[str, Any]) -> str:
    """Returns the facts as aligned lines below the file's name."""
    lines = [str(facts["file"])]
    for key, value in facts.items():
        if key == "file" or value == []:
            continue
        for item in value if key == "problems" else [", ".join(value) if isinstance(value, list) else value]:
            lines.append(f"  {key.replace('_', ' '):<18} {item}")
    return "\n".join(lines)


def _who(peer: PeerCertificate) -> dict[str, Any]:
    """Returns the identity in a certificate, as a URI and by its parts."""
    identity = peer.identity
    facts: dict[str, Any] = {"identity": identity.uri(), "role": identity.role, "job": identity.job}
    if len(identity.bound_to) == 1:
        facts["node"] = identity.bound_to[0]
    return facts | {"hosts": [*peer.hosts, *peer.addresses]}


def _span(left: datetime.timedelta) -> str:
    """Returns a time span in its two largest units; ``none`` if it is not positive."""
    minutes = left // datetime.timedelta(minutes=1)
    if minutes < 0:
        return "none"
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} days {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _time(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _key(certificate: x509.Certificate) -> str:
    try:
        key = certificate.public_key()
    except UNREADABLE:
        return "unknown"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return f"EC {key.curve.name}"
    return f"RSA {key.key_size}" if isinstance(key, rsa.RSAPublicKey) else type(key).__name__
