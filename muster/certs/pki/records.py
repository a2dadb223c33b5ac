"""Reads an authority's records: the certificates that it issued and the lists that it signed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cryptography import x509

from muster.certs.errors import ConfigError, FileError
from muster.certs.files import read_file
from muster.certs.pki.certificates import UNREADABLE, fingerprint, is_authority, parse_certificates, to_pem
from muster.certs.pki.peer import peer_of_pem


def read_lists(path: Path) -> list[x509.CertificateRevocationList]:
    """Reads the revocation lists of a PEM file; returns none if the file does not exist.

    Raises:
        FileError: the file cannot be read, or is damaged.
    """
    if not path.exists():
        return []
    end = b"-----END X509 CRL-----"
    parts = read_file(path, "The revocation list").split(end)[:-1]
    try:
        return [x509.load_pem_x509_crl(part[part.index(b"-----BEGIN") :] + end + b"\n") for part in parts]
    except UNREADABLE:
        raise FileError(f"{str(path)!r} is damaged: not a revocation list.") from None


def find_issued(directory: Path, nodes: Iterable[str], fingerprints: Iterable[str]) -> list[x509.Certificate]:
    """Finds an authority's certificates that are bound to a node, or whose fingerprint begins as given.

    Raises:
        ConfigError: a node or fingerprint matches no certificate.
    """
    kept = [
        parse_certificates(read_file(file, "The certificate"), str(file))[0]
        for file in sorted((directory / "issued").glob("*.crt"))
    ]
    found: list[x509.Certificate] = []
    for node in nodes:
        found += _some([each for each in kept if node in _nodes(each)], f"bound to the node {node!r}")
    for prefix in fingerprints:
        plain = prefix.replace(":", "").rstrip(".").upper()
        if len(plain) < 16:
            raise ConfigError(f"--fingerprint is {prefix[:100]!r}; legal are 16 hexadecimal digits or more.")
        match = [each for each in kept if fingerprint(each).replace(":", "").startswith(plain)]
        found += _some(match, f"with the fingerprint {prefix[:100]}")
    return list(dict.fromkeys(found))


def _some(found: list[x509.Certificate], what: str) -> list[x509.Certificate]:
    if not found:
        raise ConfigError(f"This authority has issued no certificate {what}.", remedy="Nothing was revoked.")
    return found


def _nodes(certificate: x509.Certificate) -> tuple[str, ...]:
    return () if is_authority(certificate) else peer_of_pem(to_pem([certificate])).identity.bound_to
