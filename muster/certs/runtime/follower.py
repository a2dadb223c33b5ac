"""Reloads a running process's credentials when their files change, and warns before they end."""

from __future__ import annotations

import datetime
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from muster.certs.config import SecurityConfig, apply_cipher_list, load_config
from muster.certs.errors import CertificateError, RevokedError
from muster.certs.pki.certificates import utc_now
from muster.certs.pki.peer import PeerCertificate
from muster.certs.pki.revocation import Revocations
from muster.certs.pki.spiffe import IdentityMap, why_not_mapped
from muster.certs.runtime.passwords import forbid_core_files, prompted_password
from muster.certs.runtime.store import Credentials
from muster.certs.runtime.watcher import Change, CredentialsWatcher

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Expiry:
    """The end of a certificate, authority or revocation list.

    Attributes:
        what: ``certificate``, ``authority`` or ``revocation_list``; fit for a metric's label.
        not_after: its last moment.
        warn_from: when warnings begin.
    """

    what: str
    not_after: datetime.datetime
    warn_from: datetime.datetime

    def seconds_left(self, now: datetime.datetime | None = None) -> float:
        """Returns the seconds until the end; negative after it."""
        return (self.not_after - (now or utc_now())).total_seconds()


def expiries(credentials: Credentials, warning_days: int) -> list[Expiry]:
    """Returns the expiry times of a process's own credentials.

    A revocation list is warned about in the last quarter of its life at the earliest: many live for days.
    """
    ahead = datetime.timedelta(days=warning_days)
    if credentials.identity.spiffe_id:  # they live for an hour or so, and are renewed half-way
        ahead = min(ahead, (credentials.not_after - credentials.not_before) / 4)
    found = [
        Expiry("certificate", credentials.not_after, credentials.not_after - ahead),
        Expiry("authority", credentials.ca_not_after, credentials.ca_not_after - ahead),
    ]
    for each in credentials.revocations.lists if credentials.revocations else ():
        quarter = (each.next_update - each.this_update) / 4
        found.append(Expiry("revocation_list", each.next_update, each.next_update - min(ahead, quarter)))
    return found


class ExpiryReminder:
    """Repeats each warning once a day; a warning about a renewed certificate comes at once."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, Expiry], datetime.datetime] = {}

    def due(
        self, credentials: Credentials, warning_days: int, now: datetime.datetime | None = None
    ) -> list[str]:
        """Returns the warnings that were not given within the last day.

        Args:
            credentials: the credentials in force.
            warning_days: ``cert_expire_warning_time_in_day`` of the configuration in force.
            now: the time; by default the current one.
        """
        now = now or utc_now()
        ending = {
            (credentials.fingerprint, each): each
            for each in expiries(credentials, warning_days)
            if now >= each.warn_from
        }
        said = {key: at for key, at in self._said.items() if key in ending and now - at < DAY}
        due = [each for key, each in ending.items() if key not in said]
        self._said = dict.fromkeys(ending, now) | said
        return [_sentence(credentials, each, now) for each in due]


def _sentence(credentials: Credentials, each: Expiry, now: datetime.datetime) -> str:
    names = {
        "certificate": f"The certificate {credentials.identity} (SHA-256 {credentials.fingerprint[:23]}...)",
        "authority": f"The authority of the certificate {credentials.identity}",
        "revocation_list": "The revocation list",
    }
    remedies = {
        "certificate": "`muster certs renew FILE.p12` makes a new one.",
        "authority": "`muster certs renew --ca` gives it a new certificate.",
        "revocation_list": "`muster certs revoke` without a certificate signs it again.",
    }
    days = (each.not_after - now) // DAY
    when = f"ends in {days} days, on" if days > 0 else ("ends on" if now <= each.not_after else "ended on")
    remedy = remedies[each.what]
    if credentials.identity.spiffe_id and each.what != "revocation_list":
        remedy = "The SPIFFE Workload API should have sent a new one: see to its agent."
    return f"{names[each.what]} {when} {each.not_after:%Y-%m-%d %H:%M} UTC. {remedy}"


class Follower:
    """Returns the credentials in force when called; every new connection calls it.

    Renewed certificates, authorities, revocation lists and settings apply from the next connection on. A bad
    file leaves the old ones in force, and is logged; with bad revocation lists nobody is accepted.

    Args:
        watcher: reads and checks the files, for a role and job.
        log: the log for changes, faults, and certificates that expire soon.
    """

    def __init__(self, watcher: CredentialsWatcher, log: logging.Logger) -> None:
        self._watcher = watcher
        self._log = log
        self._lock = threading.Lock()
        self._reminder = ExpiryReminder()

    def __call__(self) -> Credentials:
        """Looks at the files (a few ``stat`` calls unless one changed); returns the credentials in force.

        Never raises; callable from any thread.
        """
        with self._lock:
            self.log_change(self.poll())
        return self.credentials

    @property
    def credentials(self) -> Credentials:
        """The certificate, authorities and revocation lists in force."""
        return self._watcher.credentials

    @property
    def config(self) -> SecurityConfig:
        """The configuration in force."""
        return self._watcher.config

    def etcd(self) -> Credentials:
        """Returns the scheduler's credentials for etcd; the old ones if a renewed file cannot be used.

        Only the first call reads files: the scheduler's event loop asks for each connection to etcd, and must
        not wait for a file server longer than its lease lasts.

        Raises:
            CertificateError: the first call could not load them.
        """
        return self._watcher.etcd or self._watcher.follow_etcd()

    def revocations(self) -> Revocations | None:
        """The revocation lists in force."""
        return self.credentials.revocations

    def require_identity(self) -> bool:
        """Whether callers' certificates must name job and role now."""
        return self.config.require_identity

    def identity_map(self) -> IdentityMap | None:
        """The current map of SPIFFE IDs to identities."""
        return self.config.identity_map

    def poll(self) -> Change | None:
        """Looks for changed files and puts valid ones in force; for one thread at a time. Never raises.

        Returns:
            What changed, and what is wrong with it; None if nothing relevant did.
        """
        try:
            return self._watcher.poll()
        except Exception:
            self._log.exception("Fault while reading the certificates; those in force stay.")
            return None

    def log_change(self, change: Change | None) -> None:
        """Logs changes, and, once a day each, what expires soon."""
        if change is not None:
            for problem in change.problems:
                self._log.error("%s", problem)
            for sentence in change.warnings:
                self._log.warning("%s", sentence)
            for sentence in change.notes:
                self._log.info("%s", sentence)
        for sentence in self._reminder.due(self.credentials, self.config.cert_expire_warning_time_in_day):
            self._log.warning("%s", sentence)

    def expiries(self) -> list[Expiry]:
        """Returns when each of the credentials in force expires."""
        return expiries(self.credentials, self.config.cert_expire_warning_time_in_day)

    def has_revoked(self, peer: PeerCertificate) -> bool:
        """Whether a peer that was accepted is revoked by now.

        Invalid lists keep newcomers out, but do not end established connections.
        """
        credentials = self()
        try:
            if credentials.revocations is not None:
                credentials.revocations.check(peer.links)
        except RevokedError:
            return True
        except CertificateError:
            pass
        return why_not_mapped(peer.identity, credentials.identity_map) is not None


def follow_files(
    config_path: str | os.PathLike[str],
    role: str,
    env: Mapping[str, str],
    log: logging.Logger,
    *,
    job: str | None,
    password: bytes | None = None,
) -> Follower:
    """Loads a role's credentials by config.json, and gives gRPC its ciphers before it is imported.

    From then on the process leaves no core file, which would hold the private key.

    Args:
        config_path: config.json.
        role: ``scheduler`` or ``worker``.
        env: the environment in which the password is looked up.
        log: the log of the process.
        job: the job that renewed certificates must be for; None for any.
        password: the password of the PKCS#12 file, if it is not in the environment.

    Raises:
        CertificateError: the configuration, the password or a certificate is unusable.
    """
    config = load_config(config_path)
    apply_cipher_list(config)
    forbid_core_files()
    asked = password or (None if config.spiffe_endpoint_socket else prompted_password(role, env))
    return Follower(CredentialsWatcher(config_path, role, env, password=asked, job=job), log)
