"""This worker's credentials, which follow their files while it trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster.worker.config import Settings
from muster.worker.errors import SecurityError, SettingsError

if TYPE_CHECKING:
    from muster.certs.pki.peer import Peer
    from muster.certs.runtime.store import Credentials
    from muster.certs.runtime.watcher import CredentialsWatcher

log = logging.getLogger("muster.worker")


class Keyring:
    """Gives the credentials in force; every new connection asks for them.

    Renewed certificates, authorities, revocation lists and settings count from the next connection on,
    whether to the scheduler or to a peer. A bad file leaves the old ones in force and says so; bad
    revocation lists let nobody in.

    Args:
        watcher: reads and checks the files, for the worker's role and job.
    """

    def __init__(self, watcher: CredentialsWatcher) -> None:
        from muster.certs.runtime.expiry import ExpiryReminder

        self._watcher = watcher
        self._lock = threading.Lock()
        self._reminder = ExpiryReminder()

    def __call__(self) -> Credentials:
        """The credentials in force now. Costs a few ``stat`` calls unless a file changed; never raises."""
        with self._lock:
            try:
                self._follow()
            except Exception:
                log.exception("Fault while reading the certificates; those in force stay.")
            return self._watcher.credentials

    def has_revoked(self, peer: Peer) -> bool:
        """Whether a peer that was let in is revoked by now.

        Lists that cannot be relied on keep newcomers out, but end no connection that stands.
        """
        from muster.certs.errors import CertificateError, RevokedError

        revocations = self().revocations
        try:
            if revocations is not None:
                revocations.check(peer.links)
        except RevokedError:
            return True
        except CertificateError:
            return False
        return False

    def _follow(self) -> None:
        change = self._watcher.poll()
        if change is not None:
            for problem in change.problems:
                log.error("%s", problem)
            for sentence in change.warnings:
                log.warning("%s", sentence)
            for sentence in change.notes:
                log.info("%s", sentence)
        days = self._watcher.config.cert_expire_warning_time_in_day
        for sentence in self._reminder.due(self._watcher.credentials, days):
            log.warning("%s", sentence)


def load_keyring(settings: Settings, env: Mapping[str, str]) -> Keyring | None:
    """Loads this worker's certificate and hands the ciphers to gRPC; None without TLS.

    From then on the process leaves no core file, which would hold the private key.

    Raises:
        SettingsError: config.json or the password's variable is wrong.
        SecurityError: the certificate, its password or its authority is.
    """
    if settings.config_path is None:
        return None
    from muster.certs.config import apply_cipher_list, load_config
    from muster.certs.errors import CertificateError, ConfigError
    from muster.certs.runtime.passwords import forbid_core_files, prompted_password
    from muster.certs.runtime.watcher import CredentialsWatcher

    try:
        config = load_config(settings.config_path)
        if config.ignored_ciphers:
            log.warning("cipher_list: no effect have %s", ", ".join(config.ignored_ciphers))
        apply_cipher_list(config)
        password = settings.client_password or prompted_password("worker", env)
        keyring = Keyring(
            CredentialsWatcher(settings.config_path, "worker", env, password=password, job=settings.job_id)
        )
    except ConfigError as error:
        raise SettingsError(error.message, remedy=error.remedy) from error
    except CertificateError as error:
        raise SecurityError(error.message, remedy=error.remedy) from error
    forbid_core_files()
    return keyring
