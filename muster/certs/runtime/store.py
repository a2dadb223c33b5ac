"""A process's own certificate and key, with the authorities it trusts: loaded and checked, in memory only."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes, PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    pkcs12,
)

from muster.certs.config import CIPHERS, NO_FILE, SecurityConfig
from muster.certs.errors import (
    ConfigError,
    FileError,
    KeyMismatchError,
    MissingKeyError,
    PasswordError,
    RevocationListError,
    TruncatedError,
    UsageError,
)
from muster.certs.files import read_file, read_secret
from muster.certs.pki.certificates import (
    UNREADABLE,
    build_chain,
    check_chain,
    check_purpose,
    check_readable,
    fingerprint,
    is_authority,
    load_authorities,
    name_of,
    parse_certificates,
    to_pem,
    utc_now,
)
from muster.certs.pki.identity import Identity
from muster.certs.pki.peer import PeerCertificate, peer_of_pem
from muster.certs.pki.revocation import Revocations, load_revocations
from muster.certs.pki.rounds import MalformedDerError, count_rounds
from muster.certs.pki.spiffe import IdentityMap
from muster.certs.runtime.material import Material
from muster.certs.runtime.passwords import password_for as password_for
from muster.certs.runtime.passwords import prompt_on_terminal

MAX_P12_BYTES = 1 << 20
MAX_ROUNDS = 2_000_000
"""Most hash rounds of a file, all its parts together: a second's work, and 300 times what openssl asks
for."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A process's key, certificate and authorities for TLS. The key is in memory only and never shown.

    Attributes:
        key_pem: the private key, PKCS#8 PEM, not encrypted.
        cert_chain_pem: the leaf, then intermediates.
        ca_pem: the trusted authorities.
        leaf_pem: the leaf alone.
        identity: the identity in the leaf.
        not_before: first moment of the leaf's validity.
        not_after: last moment of the leaf's validity.
        fingerprint: SHA-256 of the leaf.
        ca_not_after: the time at which the first authority in the chain expires.
        revocations: the lists in force; None if none are configured.
        cipher_list: suites for TLS 1.2.
        require_identity: whether peers must name job and role.
        identity_map: the map of SPIFFE IDs to identities.
    """

    key_pem: bytes = field(repr=False)
    cert_chain_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)
    leaf_pem: bytes = field(repr=False)
    identity: Identity
    not_before: datetime.datetime
    not_after: datetime.datetime
    fingerprint: str
    ca_not_after: datetime.datetime
    revocations: Revocations | None = field(repr=False, default=None)
    cipher_list: tuple[str, ...] = field(repr=False, default=CIPHERS)
    require_identity: bool = True
    identity_map: IdentityMap | None = field(repr=False, default=None)

    def peer(self, pem: bytes, now: datetime.datetime | None = None) -> PeerCertificate:
        """Reads and checks the certificate of a TLS peer: identity, dates, revocation.

        The handshake must have verified it against ``ca_pem`` already.

        Raises:
            CertificateError: the certificate is refused; class and message say why.
        """
        peer = peer_of_pem(pem, require_identity=self.require_identity, identity_map=self.identity_map)
        peer.check(self.revocations, now)
        return peer


def load_configured(
    config: SecurityConfig,
    role: str,
    env: Mapping[str, str],
    *,
    password: bytes | None = None,
    prompt: Callable[[str], str | None] | None = prompt_on_terminal,
) -> Credentials:
    """Loads the credentials of a role as config.json says.

    Args:
        config: the configuration.
        role: ``scheduler``, ``worker`` or ``operator``.
        env: the environment in which the password is looked up, unless given.
        password: the password.
        prompt: a function that asks for the password; None: never ask.

    Raises:
        CertificateError: see :func:`load_credentials`; ConfigError also if no password is found.
    """
    if config.spiffe_endpoint_socket:
        from muster.certs.runtime.workload_api import WorkloadApi

        with WorkloadApi(config.spiffe_endpoint_socket) as api:
            return with_lists(checked(api.newest(), CredentialRules.of(config, role)), config.crl_path)
    password = password_for(role, env, prompt) if password is None else password
    try:
        return load_credentials(
            config.cert_path(role),
            password,
            config.ca_cert_path,
            crl_path=config.crl_path,
            purpose="server" if role == "scheduler" else "client",
            require_identity=config.require_identity,
            identity_map=config.identity_map,
            cipher_list=config.cipher_list,
        )
    except FileError as error:
        if error.remedy:
            raise
        raise type(error)(error.message, remedy=f"{config.path} names it.") from None


def load_for_etcd(
    config: SecurityConfig, env: Mapping[str, str], password: bytes | None = None
) -> Credentials:
    """Loads the scheduler's certificate and authorities for etcd, as config.json says.

    Revocation lists are not used, as a scheduler checks all that etcd's members say.

    Raises:
        CertificateError: see :func:`load_credentials`.
    """
    if NO_FILE in (
        config.etcd_cert_path or config.server_cert_path,
        config.etcd_ca_cert_path or config.ca_cert_path,
    ):
        raise ConfigError(
            f"{config.path}: what is shown to etcd comes from files, not from the SPIFFE Workload API.",
            remedy="Name them: etcd_cert_path and etcd_ca_cert_path.",
        )
    return load_credentials(
        config.etcd_cert_path or config.server_cert_path,
        password_for("scheduler", env, None) if password is None else password,
        config.etcd_ca_cert_path or config.ca_cert_path,
        purpose="client",
        require_identity=False,
        cipher_list=config.cipher_list,
    )


def load_credentials(
    p12_path: str | os.PathLike[str],
    password: bytes,
    ca_path: str | os.PathLike[str],
    *,
    crl_path: str | os.PathLike[str] | None = None,
    purpose: str | None = None,
    require_identity: bool = True,
    identity_map: IdentityMap | None = None,
    cipher_list: tuple[str, ...] = CIPHERS,
    now: datetime.datetime | None = None,
) -> Credentials:
    """Loads a PKCS#12 file and checks it as a peer would.

    Args:
        p12_path: the file with key, certificate and intermediates.
        password: its password.
        ca_path: PEM file of the trusted authorities.
        crl_path: PEM file of revocation lists; None for none.
        purpose: ``server``, ``client`` or None for either.
        require_identity: whether the certificate must name job and role.
        identity_map: the map of SPIFFE IDs to identities.
        cipher_list: suites for TLS 1.2.
        now: the time to check dates for; by default the current one.

    Raises:
        FileError: a file is unreadable, truncated, of another kind, or lacks the key.
        PasswordError: the password is wrong.
        KeyMismatchError, ExpiredError, NotYetValidError, UntrustedError, WeakCertificateError, UsageError,
        IdentityError, RevokedError, RevocationListError: a peer would refuse the certificate, for the reason
            that the class states.
    """
    now = now or utc_now()
    key, leaf, extra = read_p12(p12_path, password)
    roots = load_authorities(read_file(ca_path, "The CA file"), f"The CA file {os.fspath(ca_path)!r}")
    material = Material(key, leaf, tuple(extra), tuple(roots), f"The certificate in {os.fspath(p12_path)!r}")
    rules = CredentialRules(purpose, require_identity, identity_map, cipher_list)
    return with_lists(checked(material, rules, now), crl_path, now)


@dataclass(frozen=True, slots=True)
class CredentialRules:
    """The requirements on credentials; the attributes are arguments of :func:`load_credentials`."""

    purpose: str | None = None
    require_identity: bool = True
    identity_map: IdentityMap | None = None
    cipher_list: tuple[str, ...] = CIPHERS

    @classmethod
    def of(cls, config: SecurityConfig, role: str) -> CredentialRules:
        """Returns the rules for a role, from config.json."""
        purpose = "server" if role == "scheduler" else "client"
        return cls(purpose, config.require_identity, config.identity_map, config.cipher_list)


def checked(material: Material, rules: CredentialRules, now: datetime.datetime | None = None) -> Credentials:
    """Checks a key and its certificates as a peer would, except for revocation lists.

    Raises:
        UsageError: the certificate is an authority's, or not for this purpose.
        UntrustedError: no trusted authority has issued it.
        ExpiredError, NotYetValidError, WeakCertificateError, IdentityError: see these classes.
    """
    leaf = material.leaf
    what = f"{material.source} ({name_of(leaf)})"
    if is_authority(leaf):
        raise UsageError(f"{what} is an authority's, not one for a scheduler or worker.")
    chain = build_chain(leaf, list(material.extra), list(material.roots), what)
    check_chain(chain, now or utc_now(), what)
    if rules.purpose is not None:
        check_purpose(leaf, rules.purpose, what)
    peer = peer_of_pem(
        to_pem([leaf]), require_identity=rules.require_identity, identity_map=rules.identity_map
    )
    return Credentials(
        key_pem=material.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        cert_chain_pem=to_pem(chain[:-1]),
        ca_pem=to_pem(material.roots),
        leaf_pem=to_pem([leaf]),
        identity=peer.identity,
        not_before=leaf.not_valid_before_utc,
        not_after=leaf.not_valid_after_utc,
        fingerprint=fingerprint(leaf),
        ca_not_after=min(each.not_valid_after_utc for each in chain[1:]),
        cipher_list=rules.cipher_list,
        require_identity=rules.require_identity,
        identity_map=rules.identity_map,
    )


def with_lists(
    credentials: Credentials,
    crl_path: str | os.PathLike[str] | None,
    now: datetime.datetime | None = None,
) -> Credentials:
    """Adds the revocation lists, and checks the certificate against them.

    Raises:
        RevocationListError: a revocation list is missing, invalid or out of date.
        RevokedError: a list has the certificate itself.
    """
    if crl_path is not None:
        credentials = dataclasses.replace(credentials, revocations=revocations_for(credentials, crl_path))
    credentials.peer(credentials.cert_chain_pem, now)  # a revoked certificate ends here, not at a silent peer
    return credentials


def revocations_for(credentials: Credentials, crl_path: str | os.PathLike[str]) -> Revocations:
    """Reads the revocation lists of the authorities that the credentials trust or come from.

    Raises:
        RevocationListError: a revocation list is missing, invalid or out of date.
    """
    try:
        pem = read_file(crl_path, "The revocation list")
    except FileError as error:
        raise RevocationListError(error.message, remedy="Until it can be read, nobody is let in.") from None
    authorities = parse_certificates(credentials.ca_pem, "The CA file")
    authorities += parse_certificates(credentials.cert_chain_pem, "The certificate chain")[1:]
    return load_revocations(pem, authorities, os.fspath(crl_path))


def is_pem(path: str | os.PathLike[str]) -> bool:
    """Whether a file is PEM text, and not PKCS#12.

    Raises:
        FileError: the file cannot be read.
    """
    return b"-----BEGIN" in read_file(path, "The file")[:4096]


def read_p12(
    path: str | os.PathLike[str], password: bytes
) -> tuple[CertificateIssuerPrivateKeyTypes, x509.Certificate, list[x509.Certificate]]:
    """Opens a PKCS#12 file, also with old encryption (3DES, RC2).

    Returns:
        The key, its certificate, and further certificates.

    Raises:
        FileError: the file is unreadable, damaged, or of another kind.
        TruncatedError: the file is truncated.
        PasswordError: the password does not open it.
        MissingKeyError: the file has no private key, or no certificate for it.
        KeyMismatchError: the key belongs to none of the certificates.
    """
    data = read_secret(path, "The PKCS#12 file", limit=MAX_P12_BYTES)
    shown = f"The PKCS#12 file {os.fspath(path)!r}"
    _check_envelope(data, shown)
    _check_rounds(data, shown)
    try:
        key, leaf, extra = _open(data, password)
    except UnsupportedAlgorithm as error:
        raise FileError(f"{shown} is encrypted in a way that is not supported.", remedy=_REMAKE) from error
    except ValueError as error:
        # The library has one kind of error for both, and only the words differ.
        if "password" in str(error).lower():
            raise PasswordError(
                f"{shown} does not open with this password (or is damaged).",
                remedy="Check --password-file, or MS_SERVER_PASSWORD or MS_CLIENT_PASSWORD and their _FILE.",
            ) from None
        raise FileError(f"{shown} is damaged, or not PKCS#12.", remedy=_REMAKE) from None
    except UNREADABLE as error:
        raise FileError(f"{shown} holds a malformed certificate.", remedy=_REMAKE) from error
    if key is not None and leaf is None and extra:
        raise KeyMismatchError(
            f"{shown}: the private key belongs to none of the certificates.", remedy=_REMAKE
        )
    if key is None or leaf is None:
        missing = "private key" if key is None else "certificate"
        raise MissingKeyError(f"{shown} holds no {missing}.", remedy=_REMAKE)
    try:
        for each in (leaf, *extra):
            check_readable(each)
        public = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except UNREADABLE as error:
        raise FileError(f"{shown} holds a malformed certificate.", remedy=_REMAKE) from error
    if key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) != public:
        raise KeyMismatchError(
            f"{shown}: the private key does not belong to the certificate.", remedy=_REMAKE
        )
    return key, leaf, list(extra)  # type: ignore[return-value]  # other kinds are refused by check_strength


_Opened = tuple[PrivateKeyTypes | None, x509.Certificate | None, list[x509.Certificate]]


class _Ahead:
    """Files that this process or its parent opened in advance, by content and password."""

    def __init__(self) -> None:
        self.keeps = False
        self.opened: dict[bytes, _Opened] = {}


_ahead = _Ahead()


def _open(data: bytes, password: bytes) -> _Opened:
    """Opens a file; uses the result of an earlier opening in advance, once."""
    mark = hashlib.sha256(hashlib.sha256(password).digest() + data).digest()
    opened = _ahead.opened.get(mark) or pkcs12.load_key_and_certificates(data, password)
    _ahead.opened = {mark: opened} if _ahead.keeps else {}
    return opened


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Context that keeps the last opened file in memory for its next use, here or in a fork."""
    _ahead.keeps = True
    try:
        yield
    finally:
        _ahead.keeps = False


def forget_opened() -> None:
    """Drops the files that were opened in advance."""
    _ahead.opened = {}


_REMAKE = "Make it again: `muster certs issue`, or `openssl pkcs12 -export -inkey KEY -in CERT -out FILE`."


def _check_envelope(data: bytes, shown: str) -> None:
    """Refuses PEM, empty, foreign and truncated files with specific errors; the parser has one for all."""
    if b"-----BEGIN" in data[:4096]:
        raise FileError(f"{shown} is PEM text, and PKCS#12 is needed here.", remedy=_REMAKE)
    if data[:1] != b"\x30" or len(data) < 2:
        raise FileError(f"{shown} is {'empty' if not data else 'not PKCS#12'}.", remedy=_REMAKE)
    if data[1] < 0x80:
        expected = 2 + data[1]
    else:
        octets = data[1] & 0x7F
        if octets == 0:
            return  # indefinite length: only the parser knows
        expected = 2 + octets + int.from_bytes(data[2 : 2 + octets], "big")
    if len(data) < expected:
        raise TruncatedError(f"{shown} is cut off: {len(data)} of {expected} bytes.", remedy="Copy it again.")


def _check_rounds(data: bytes, shown: str) -> None:
    """Refuses a file with too many hash rounds: its parser would block the process's threads for long."""
    try:
        rounds = count_rounds(data)
    except MalformedDerError as error:
        raise FileError(f"{shown} is damaged, or not PKCS#12: {error}.", remedy=_REMAKE) from None
    if rounds > MAX_ROUNDS:
        shown_rounds = f"{rounds:,}" if rounds < 10**12 else "endlessly many"
        raise FileError(
            f"{shown} hashes its password in {shown_rounds} rounds; at most {MAX_ROUNDS:,} are accepted.",
            remedy=_REMAKE,
        )
