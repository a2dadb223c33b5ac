"""A certificate authority: a directory with its key, its certificate, and all that it issued and revoked.

    ca.crt      what peers trust (ca_cert_path)
ca.key      the authority's key, PKCS#8, encrypted with the password
chain.crt   only under another authority: this one's certificate, then those above it
crl.pem     what is revoked (crl_path)
.lock       held while crl.pem is replaced
issued/     a copy of every certificate issued, by serial number
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)

from muster.certs.errors import ConfigError, FileError, KeyMismatchError, PasswordError
from muster.certs.files import locked, read_file, read_secret, write_file
from muster.certs.pki.certificates import (
    check_dates,
    list_number,
    name_of,
    parse_certificates,
    to_pem,
    utc_now,
)
from muster.certs.pki.identity import Identity
from muster.certs.pki.records import read_lists
from muster.certs.pki.templates import (
    CLOCK_SKEW,
    authority_draft,
    authority_key_id,
    authority_name,
    blank_certificate,
    check_days,
    host_names,
    key_usage,
    leaf_name,
    usages,
)

AuthorityKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
AUTHORITY_DAYS = 3650
LEAF_DAYS = 365


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority opened for issuing.

    Attributes:
        directory: the directory with its files.
        certificate: its own certificate.
        chain: its certificate and the intermediate ones above it; empty for a root.
        roots: the certificates that peers trust.
    """

    directory: Path
    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    roots: tuple[x509.Certificate, ...]
    key: AuthorityKey = field(repr=False)

    def issue(
        self,
        identity: Identity,
        hosts: Iterable[str] = (),
        *,
        days: int = LEAF_DAYS,
        now: datetime.datetime | None = None,
    ) -> Issued:
        """Issues a certificate with a new P-256 key, and keeps a copy of it (not of the key) in ``issued/``.

        Args:
            identity: the identity of its holder.
            hosts: names and addresses by which a server may be reached.
            days: its validity in days; it ends with the authority at the latest.
            now: the beginning of its validity; by default the current time.

        Raises:
            ConfigError: a host name is malformed, or the number of days out of range.
            ExpiredError, NotYetValidError: the authority itself is not valid at ``now``.
        """
        now = now or utc_now()
        check_dates(self.certificate, now, f"The authority {name_of(self.certificate)}")
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(now + check_days(days), self.certificate.not_valid_after_utc)
        uri = x509.UniformResourceIdentifier(identity.uri())
        draft = (
            blank_certificate(leaf_name(identity), self.certificate.subject, key.public_key(), now, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages(identity.role)), critical=False)
            .add_extension(x509.SubjectAlternativeName([uri, *host_names(hosts)]), critical=False)
            .add_extension(authority_key_id(self.certificate), critical=False)
        )
        certificate = draft.sign(self.key, hashes.SHA256())
        self._keep(certificate)
        return Issued(certificate, self.chain, key)

    def revoked(self) -> list[x509.RevokedCertificate]:
        """The entries of this authority's current list."""
        own = self._own_list()
        return [] if own is None else list(own)

    def write_revocations(
        self,
        serials: Iterable[int] = (),
        *,
        days: int = LEAF_DAYS,
        now: datetime.datetime | None = None,
    ) -> int:
        """Adds entries to the revocation list, signs it, and writes it to crl.pem.

        Lists of other authorities in that file stay. A lock keeps two calls at once from losing an entry.

        Args:
            serials: serial numbers of certificates to revoke.
            days: the days after which the list is out of date, and everybody is refused.
            now: the moment of revocation.

        Returns:
            The number of revoked certificates in the list.
        """
        with locked(self.directory):
            return self._replace_list(serials, days, now or utc_now())

    def _replace_list(self, serials: Iterable[int], days: int, now: datetime.datetime) -> int:
        before = self._own_list()
        entries = {entry.serial_number: entry.revocation_date_utc for entry in before or ()}
        entries.update({serial: entries.get(serial, now) for serial in serials})
        draft = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - CLOCK_SKEW)
            .next_update(now + check_days(days))
            .add_extension(x509.CRLNumber(list_number(before) + 1), critical=False)
            .add_extension(authority_key_id(self.certificate), critical=False)
        )
        for serial, date in entries.items():
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date)
            draft = draft.add_revoked_certificate(entry.build())
        crl = draft.sign(self.key, hashes.SHA256())
        others = [each for each in read_lists(self.directory / "crl.pem") if each.issuer != crl.issuer]
        text = b"".join(each.public_bytes(Encoding.PEM) for each in [crl, *others])
        write_file(self.directory / "crl.pem", text, mode=0o644)
        return len(entries)

    def _own_list(self) -> x509.CertificateRevocationList | None:
        for crl in read_lists(self.directory / "crl.pem"):
            if crl.issuer == self.certificate.subject:
                if not crl.is_signature_valid(self.certificate.public_key()):  # type: ignore[arg-type]
                    raise FileError(
                        f"The list in {str(self.directory / 'crl.pem')!r} was altered: wrong signature."
                    )
                return crl
        return None

    def _keep(self, certificate: x509.Certificate) -> None:
        issued = self.directory / "issued"
        issued.mkdir(mode=0o700, exist_ok=True)
        write_file(issued / f"{certificate.serial_number:x}.crt", to_pem([certificate]), mode=0o644)


@dataclass(frozen=True, slots=True)
class Issued:
    """A new certificate with its key."""

    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    def key_pem(self) -> bytes:
        """Returns the key as unencrypted PKCS#8 PEM, for programs that can read nothing else."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def p12(self, password: bytes) -> bytes:
        """Returns key, certificate and intermediates as PKCS#12 (PBES2, AES-256)."""
        encryption = BestAvailableEncryption(password)
        return pkcs12.serialize_key_and_certificates(
            b"muster", self.key, self.certificate, list(self.chain) or None, encryption
        )


def create_authority(
    directory: Path,
    password: bytes,
    *,
    name: str = "",
    days: int = AUTHORITY_DAYS,
    parent: Authority | None = None,
    force: bool = False,
    now: datetime.datetime | None = None,
) -> Authority:
    """Makes a new authority: key, certificate and an empty revocation list.

    Args:
        directory: its directory, which is made if missing.
        password: encrypts the key.
        name: its common name; by default "Muster CA" and a number, so that names differ.
        days: its validity in days.
        parent: the authority above; None makes a root.
        force: whether to overwrite an existing authority.
        now: the beginning of its validity.

    Raises:
        FileError: the directory has an authority already, or cannot be written.
    """
    now = now or utc_now()
    subject = authority_name(name)
    end = now + check_days(days)
    make_directory(directory)
    if (directory / "ca.key").exists() and not force:
        raise FileError(
            f"{str(directory)!r} holds an authority already.",
            remedy="Choose another directory, or pass --force.",
        )
    for left_over in ("chain.crt", "crl.pem"):  # of the authority that is overwritten
        (directory / left_over).unlink(missing_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = subject
    if parent is not None:
        issuer, end = parent.certificate.subject, min(end, parent.certificate.not_valid_after_utc)
    draft = authority_draft(subject, issuer, key.public_key(), now, end)
    if parent is not None:
        draft = draft.add_extension(authority_key_id(parent.certificate), critical=False)
    certificate = draft.sign(key if parent is None else parent.key, hashes.SHA256())
    roots = (certificate,) if parent is None else parent.roots
    chain = () if parent is None else (certificate, *parent.chain)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    write_file(directory / "ca.key", encrypted)
    write_file(directory / "ca.crt", to_pem(roots), mode=0o644)
    if parent is not None:
        parent._keep(certificate)
        write_file(directory / "chain.crt", to_pem(chain), mode=0o644)
        write_file(
            directory / "crl.pem", read_file(parent.directory / "crl.pem", "The revocation list"), mode=0o644
        )
    authority = Authority(directory, certificate, chain, roots, key)
    authority.write_revocations(now=now)
    return authority


def renew_authority(
    authority: Authority, *, days: int = AUTHORITY_DAYS, now: datetime.datetime | None = None
) -> Authority:
    """Gives a root a new certificate for the same name and key; certificates that it has issued stay valid.

    Raises:
        ConfigError: the authority is not a root; the authority above must issue it again.
    """
    if authority.chain:
        raise ConfigError(
            f"{name_of(authority.certificate)} is under another authority and cannot renew itself.",
            remedy="Make a new one with `muster certs init --parent`.",
        )
    now = now or utc_now()
    subject, public_key = authority.certificate.subject, authority.certificate.public_key()
    draft = authority_draft(subject, subject, public_key, now, now + check_days(days))  # type: ignore[arg-type]
    certificate = draft.sign(authority.key, hashes.SHA256())
    others = tuple(root for root in authority.roots if root != authority.certificate)
    write_file(authority.directory / "ca.crt", to_pem((certificate, *others)), mode=0o644)
    return dataclasses.replace(authority, certificate=certificate, roots=(certificate, *others))


def open_authority(directory: Path, password: bytes) -> Authority:
    """Opens an authority for issuing and revoking.

    Raises:
        FileError: there is no authority, or its files are damaged.
        PasswordError: the password does not open its key.
        KeyMismatchError: key and certificate do not belong together.
    """
    key_file = directory / "ca.key"
    if not key_file.exists():
        raise FileError(
            f"{str(directory)!r} holds no authority (no ca.key).",
            remedy=f"`muster certs init --dir {directory}` makes one.",
        )
    roots = parse_certificates(read_file(directory / "ca.crt", "The CA file"), str(directory / "ca.crt"))
    chain_file = directory / "chain.crt"
    chain: list[x509.Certificate] = []
    if chain_file.exists():
        chain = parse_certificates(read_file(chain_file, "The chain"), str(chain_file))
    try:
        key = load_pem_private_key(read_secret(key_file, "The authority's key"), password)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise PasswordError(f"{str(key_file)!r} does not open with this password (or is damaged).") from None
    certificate = chain[0] if chain else roots[0]
    if not isinstance(key, AuthorityKey) or key.public_key() != certificate.public_key():
        raise KeyMismatchError(f"{str(key_file)!r} is not the key of {name_of(certificate)}.")
    return Authority(directory, certificate, tuple(chain), tuple(roots), key)


def make_directory(directory: Path) -> None:
    """Makes a directory that only its owner can use, and its parents.

    Raises:
        FileError: the directory cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The directory {str(directory)!r} cannot be made: {error.strerror}.") from None
