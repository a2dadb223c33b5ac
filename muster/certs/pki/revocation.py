"""Certificate revocation lists: loads, verifies and searches them. Without a valid list all are refused."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from muster.certs.errors import RevocationListError, RevokedError
from muster.certs.pki.certificates import (
    MAX_CHAIN,
    UNREADABLE,
    WEAK_HASHES,
    ChainLink,
    clock_here,
    extension,
    link_of,
    list_number,
    printable,
    utc_now,
)

_BEGIN = b"-----BEGIN X509 CRL-----"
_END = b"-----END X509 CRL-----"
MAX_LISTS = 1024
"""In one PEM text."""

_REMEDY = "Until crl_path names good revocation lists, nobody is let in."


@dataclass(frozen=True, slots=True)
class RevocationList:
    """One revocation list whose signature has been checked."""

    name: str
    issuer: bytes
    issuer_key_id: bytes
    this_update: datetime.datetime
    next_update: datetime.datetime
    serials: frozenset[int] = field(repr=False)
    number: int = 0  # 0: it has none

    @property
    def key(self) -> ListKey:
        """A key that identifies the issuer, as two authorities may have the same name."""
        return self.issuer, self.issuer_key_id

    @property
    def age(self) -> tuple[int, datetime.datetime]:
        """A sort key: greater for the newer of two lists of one authority."""
        return self.number, self.this_update


ListKey = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Revocations:
    """The revocation lists in force.

    A certificate passes if its issuer has a current list, and no list names it or an authority
    above it. Lists of higher authorities are used if they exist, but are not required.

    Attributes:
        lists: the lists.
        authorities: the certificates of issuing authorities that are known here.
        problem: the reason why the lists must not be used; empty: they may.
    """

    lists: tuple[RevocationList, ...] = ()
    authorities: tuple[ChainLink, ...] = ()
    problem: str = ""

    def check(self, links: Sequence[ChainLink], now: datetime.datetime | None = None) -> None:
        """Refuses a revoked chain.

        Args:
            links: the leaf, then intermediates that came with it.
            now: the time to check for; by default the current one.

        Raises:
            RevokedError: a certificate of the chain is revoked.
            RevocationListError: the lists are missing, out of date or broken.
        """
        now = now or utc_now()
        if self.problem:
            raise RevocationListError(self.problem, remedy=_REMEDY)
        link, above = links[0], [*links[1:], *self.authorities]
        for depth in range(MAX_CHAIN):
            self._check_link(link, now, list_needed=depth == 0)
            issuer = next((other for other in above if other.subject == link.issuer), None)
            if issuer is None or issuer.subject == issuer.issuer:
                return
            link = issuer

    def next_update(self) -> datetime.datetime | None:
        """The time at which the first of the lists goes out of date; None without lists."""
        return min((each.next_update for each in self.lists), default=None)

    def _check_link(self, link: ChainLink, now: datetime.datetime, *, list_needed: bool) -> None:
        lists = [each for each in self.lists if _covers(each, link)]
        for each in lists:
            if link.serial in each.serials:
                raise RevokedError(
                    f"The certificate {link.name} (serial {link.serial:x}) was revoked by {each.name}.",
                    remedy="Ask who runs that authority for a new certificate.",
                )
        if not lists and list_needed:
            raise RevocationListError(
                f"crl_path has no revocation list of the authority that issued {link.name}.", remedy=_REMEDY
            )
        for each in lists[:1] if len(lists) == 1 else sorted(lists, key=lambda one: one.next_update)[-1:]:
            _check_list_dates(each, now)


def lists_by_key(revocations: Revocations | None) -> dict[ListKey, tuple[RevocationList, ...]]:
    """Returns the lists of each authority."""
    found: dict[ListKey, tuple[RevocationList, ...]] = {}
    for each in () if revocations is None else revocations.lists:
        found[each.key] = (*found.get(each.key, ()), each)
    return found


def keep_newest(
    new: Revocations, newest: Mapping[ListKey, tuple[RevocationList, ...]]
) -> tuple[Revocations, list[RevocationListError]]:
    """Refuses lists older than those in force, as an old file would accept revoked certificates again.

    Args:
        new: the lists that a file has now.
        newest: the newest lists of each authority that this process has had in force.

    Returns:
        The lists to put in force, the newest of each authority; and a complaint about each authority whose
        new lists are older.
    """
    lists: list[RevocationList] = []
    complaints = []
    for key, found in lists_by_key(new).items():
        had = newest.get(key, ())
        last, best = max((each.age for each in had), default=None), max(found, key=lambda one: one.age)
        if last is None or best.age >= last:
            lists += found
            continue
        lists += had
        complaints.append(
            RevocationListError(
                f"crl_path has an older revocation list of {best.name} (number {best.number} of"
                f" {best.this_update:%Y-%m-%d %H:%M} UTC) than the one known here (number {last[0]} of"
                f" {last[1]:%Y-%m-%d %H:%M} UTC); the newer one stays in force.",
                remedy="Copy the authority's newest crl.pem there; only a restart forgets the newer one.",
            )
        )
    return replace(new, lists=tuple(lists)), complaints


def load_revocations(pem: bytes, authorities: Sequence[x509.Certificate], source: str) -> Revocations:
    """Reads one or several PEM revocation lists and checks their signatures; dates are checked on use.

    Args:
        pem: the text of the file.
        authorities: the authorities whose lists are accepted.
        source: the file's name, for messages.

    Raises:
        RevocationListError: a list is unreadable, of an unknown authority, or its signature is wrong.
    """
    bodies = pem.split(_BEGIN)[1:]
    if len(bodies) > MAX_LISTS:
        raise RevocationListError(
            f"{source} holds {len(bodies)} revocation lists; legal are at most {MAX_LISTS}.", remedy=_REMEDY
        )
    if not bodies:
        raise RevocationListError(
            f"{source} holds no PEM revocation list.", remedy=f"{_REMEDY} `muster certs revoke` makes one."
        )
    lists = []
    for number, body in enumerate(bodies, 1):
        if _END not in body:
            raise RevocationListError(f"{source}: revocation list {number} is cut off.", remedy=_REMEDY)
        text = _BEGIN + body[: body.index(_END)] + _END + b"\n"
        lists.append(_read_list(text, authorities, f"{source}: revocation list {number}"))
    return Revocations(lists=tuple(lists), authorities=tuple(link_of(each) for each in authorities))


def _read_list(pem: bytes, authorities: Sequence[x509.Certificate], what: str) -> RevocationList:
    try:
        crl = x509.load_pem_x509_crl(pem)
        name = printable(crl.issuer.rfc4514_string())
        issuer = _signer(crl, authorities, f"{what} (of {name})")
        critical = [extension.oid.dotted_string for extension in crl.extensions if extension.critical]
        digest, this_update, next_update = (
            crl.signature_hash_algorithm,
            crl.last_update_utc,
            crl.next_update_utc,
        )
        serials = frozenset(entry.serial_number for entry in crl)
        number = list_number(crl)
    except UNREADABLE as error:
        raise RevocationListError(f"{what} cannot be read.", remedy=_REMEDY) from error
    if critical:
        # Delta and indirect lists and limited scopes are marked so: half understood is not understood.
        raise RevocationListError(
            f"{what} has extensions that are not supported: {critical[0]}.", remedy=_REMEDY
        )
    if digest is not None and digest.name in WEAK_HASHES:
        raise RevocationListError(f"{what} is signed with {digest.name.upper()}.", remedy=_REMEDY)
    if next_update is None:
        raise RevocationListError(f"{what} does not say how long it is good.", remedy=_REMEDY)
    return RevocationList(
        name, crl.issuer.public_bytes(), _key_id(issuer), this_update, next_update, serials, number
    )


def _signer(
    crl: x509.CertificateRevocationList, authorities: Sequence[x509.Certificate], what: str
) -> x509.Certificate:
    named = [authority for authority in authorities if authority.subject == crl.issuer]
    if not named:
        raise RevocationListError(f"{what} is of an authority that is not trusted here.", remedy=_REMEDY)
    for authority in named:
        key = authority.public_key()
        if isinstance(key, (ec.EllipticCurvePublicKey, rsa.RSAPublicKey)) and crl.is_signature_valid(key):
            return authority
    raise RevocationListError(f"{what} has a wrong signature: it was altered, or forged.", remedy=_REMEDY)


def _key_id(authority: x509.Certificate) -> bytes:
    try:
        own = extension(authority, x509.SubjectKeyIdentifier)
    except UNREADABLE:
        own = None
    return own.digest if own is not None else b""


def _covers(each: RevocationList, link: ChainLink) -> bool:
    if each.issuer != link.issuer:
        return False
    # Two authorities may share a name (after a change of keys): then the key identifiers decide.
    return not each.issuer_key_id or link.issuer_key_id in (None, each.issuer_key_id)


def _check_list_dates(each: RevocationList, now: datetime.datetime) -> None:
    if now > each.next_update:
        raise RevocationListError(
            f"The revocation list of {each.name} went out of date at {each.next_update:%Y-%m-%d %H:%M} UTC;"
            f" {clock_here(now)}.",
            remedy=f"{_REMEDY} `muster certs revoke` without a certificate renews it.",
        )
    if now < each.this_update:
        raise RevocationListError(
            f"The revocation list of {each.name} is from the future ({each.this_update:%Y-%m-%d %H:%M} UTC);"
            f" {clock_here(now)}.",
            remedy=f"{_REMEDY} Check this host's clock.",
        )
