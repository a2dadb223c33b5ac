"""What changed files do to what is in force: decisions only. The watcher reads them."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass

from muster.certs.config import SecurityConfig, config_warnings, settings_changes
from muster.certs.errors import CertificateError, IdentityError
from muster.certs.pki.revocation import RevocationList
from muster.certs.runtime.store import Credentials

OLD_STAYS = "New certificates are not used, the old ones stay in force"


@dataclass(frozen=True, slots=True)
class InForce:
    """What counts at a moment: the settings, and the credentials with their revocation lists."""

    config: SecurityConfig
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class Change:
    """What a poll found.

    Attributes:
        credentials: what is in force now.
        new_certificate: whether another key or certificate was accepted; new connections must use it.
        new_authorities: whether other authorities are trusted now; new connections must use them, too.
        new_revocations: whether the revocation lists changed; then every joined peer must be checked again.
        notes: sentences about what is in force now.
        warnings: sentences about what weakens it, or needs a restart.
        problems: what was wrong with the new files; what they should have replaced stays in force, except for
            revocation lists, which fail closed.
    """

    credentials: Credentials
    new_certificate: bool
    new_authorities: bool
    new_revocations: bool
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    problems: tuple[CertificateError, ...] = ()


def same_certificate(one: Credentials, other: Credentials) -> bool:
    """Whether both have one key and one chain of certificates."""
    return (one.key_pem, one.cert_chain_pem) == (other.key_pem, other.cert_chain_pem)


def refusal(
    new: Credentials, role: str, job: str | None, now: datetime.datetime | None = None
) -> CertificateError | None:
    """Says why a renewed certificate must not replace the one in force: every peer would refuse it.

    Args:
        new: the certificate, with the revocation lists that it would come into force with.
        role: the role that it must have.
        job: the job that it must be for; None for any.
        now: the time to check for; by default the current one.

    Returns:
        None if it may.
    """
    reason = new.identity.may(role=role, job=job)
    error: CertificateError | None = None
    if reason is not None:
        error = IdentityError(reason, remedy="Put a certificate of this role and job there.")
    try:
        new.peer(new.cert_chain_pem, now)
    except CertificateError as found:
        error = error or found
    return None if error is None else unused(error)


def unused(error: CertificateError) -> CertificateError:
    """The same error, saying what stays in force."""
    return type(error)(f"{OLD_STAYS}: {error.message}", remedy=error.remedy)


def own_problem(credentials: Credentials, now: datetime.datetime | None = None) -> CertificateError | None:
    """What is wrong with the certificate in force; None also where its lists have been complained about."""
    if credentials.revocations is not None and credentials.revocations.problem:
        return None
    try:
        credentials.peer(credentials.cert_chain_pem, now)
    except CertificateError as error:
        return error
    return None


def kept_under(config: SecurityConfig, credentials: Credentials) -> Credentials:
    """The old certificate under a new configuration."""
    return dataclasses.replace(credentials, require_identity=config.require_identity)


def _lists(credentials: Credentials) -> tuple[RevocationList, ...]:
    return credentials.revocations.lists if credentials.revocations is not None else ()


def change_between(before: InForce, after: InForce, problems: list[CertificateError]) -> Change | None:
    """What to do and say about a change; None if there is nothing."""
    old, new = before.credentials, after.credentials
    new_certificate = not same_certificate(old, new)
    new_authorities = old.ca_pem != new.ca_pem
    new_revocations = old.revocations != new.revocations
    notes, warnings = settings_changes(before.config, after.config)
    known = config_warnings(before.config)
    warnings += [sentence for sentence in config_warnings(after.config) if sentence not in known]
    if new_authorities:
        notes.append("new authorities are in force")
    if new_certificate:
        notes.append(f"new certificate {new.identity} {new.fingerprint}")
    if _lists(new) and _lists(new) != _lists(old):
        notes.append("new revocation lists are in force")
    if not (new_certificate or new_authorities or new_revocations or notes or warnings or problems):
        return None
    return Change(
        credentials=new,
        new_certificate=new_certificate,
        new_authorities=new_authorities,
        new_revocations=new_revocations,
        notes=tuple(notes),
        warnings=tuple(warnings),
        problems=tuple(problems),
    )
