"""The scheduler's certificates: loaded, checked to be a scheduler's, watched for change and age.

Nothing here imports grpc: the cipher list must be in the environment before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from muster.certs.config import apply_cipher_list, load_config
from muster.certs.errors import IdentityError
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.errors import SettingsError
from muster.scheduler.serve.listen import is_loopback

if TYPE_CHECKING:
    from muster.certs.config import SecurityConfig
    from muster.certs.pki.revocation import Revocations
    from muster.certs.runtime.expiry import Expiry
    from muster.certs.runtime.store import Credentials
    from muster.certs.runtime.watcher import Change, CredentialsWatcher


class Security:
    """What is in force: configuration, credentials, revocation lists. Follows the files when polled.

    Args:
        watcher: reads and checks the files, for the scheduler's role and own job.
    """

    def __init__(self, watcher: CredentialsWatcher) -> None:
        from muster.certs.runtime.expiry import ExpiryReminder

        self._watcher = watcher
        self._reminder = ExpiryReminder()
        check_is_scheduler(watcher.credentials, watcher.job)

    @property
    def credentials(self) -> Credentials:
        """The certificate and authorities in force."""
        return self._watcher.credentials

    @property
    def config(self) -> SecurityConfig:
        """The configuration in force."""
        return self._watcher.config

    def revocations(self) -> Revocations | None:
        """The revocation lists in force."""
        return self._watcher.credentials.revocations

    def require_identity(self) -> bool:
        """Whether callers' certificates must name job and role now."""
        return self.config.require_identity

    def poll(self) -> Change | None:
        """Looks for changed files; call it in one thread only.

        Returns:
            What changed, and what is wrong with it. A certificate that is not a scheduler's is such a
            wrong: the old one stays in force.
        """
        return self._watcher.poll()

    def expiries(self) -> Iterable[Expiry]:
        """What ends when, of what is in force."""
        from muster.certs.runtime.expiry import expiries

        return expiries(self.credentials, self.config.cert_expire_warning_time_in_day)

    def expiry_warnings(self) -> list[str]:
        """Sentences about what ends soon; once a day each."""
        return self._reminder.due(self.credentials, self.config.cert_expire_warning_time_in_day)


def load_security(settings: SchedulerSettings, env: Mapping[str, str]) -> Security | None:
    """Loads what config.json names; None where no configuration is given.

    Raises:
        certs.errors.CertificateError: the configuration or a certificate is unusable, or not a scheduler's.
    """
    if settings.config_path is None:
        return None
    apply_cipher_list(load_config(settings.config_path))
    from muster.certs.runtime.passwords import forbid_core_files, prompted_password
    from muster.certs.runtime.watcher import CredentialsWatcher

    forbid_core_files()
    password = prompted_password("scheduler", env)
    return Security(
        CredentialsWatcher(settings.config_path, "scheduler", env, password=password, job=settings.job_id)
    )


def check_is_scheduler(credentials: Credentials, job_id: str | None) -> None:
    """Refuses to serve with a certificate that workers would refuse.

    Raises:
        IdentityError: another role, or another job.
    """
    reason = credentials.identity.may(role="scheduler", job=job_id)
    if reason is not None:
        raise IdentityError(
            reason,
            remedy="server_cert_path must name a certificate for the role scheduler of this MS_JOB_ID.",
        )


def check_may_listen(settings: SchedulerSettings, addresses: list[str], *, tls: bool) -> bool:
    """Keeps plaintext on loopback.

    Returns:
        Whether a warning is due, because plaintext leaves this machine with the operator's consent.

    Raises:
        SettingsError: plaintext beyond loopback without consent.
    """
    if tls or all(is_loopback(address) for address in addresses):
        return False
    if not settings.allow_insecure:
        raise SettingsError(
            f"Without TLS the scheduler listens on loopback only; MS_SCHED_HOST is {settings.bind_host!r}.",
            remedy="Give a config.json by --config or MS_CONFIG_FILE (muster certs init makes one),"
            " or set MS_ALLOW_INSECURE=1 on a network where everybody may read and join.",
        )
    return True
