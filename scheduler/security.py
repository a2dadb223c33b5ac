"""The scheduler's certificates: loads them, checks that they are a scheduler's, and watches their age.

Nothing here imports grpc: the cipher list must be in the environment before that.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from certs.config import SecurityConfig, apply_cipher_list, load_config
from certs.errors import IdentityError
from scheduler.config import SchedulerSettings
from scheduler.errors import SettingsError
from scheduler.listen import is_loopback

if TYPE_CHECKING:
    from certs.revocation import Revocations
    from certs.store import Credentials


class Security:
    """The configuration and credentials in force; ``credentials`` is replaced when they are renewed."""

    def __init__(self, config: SecurityConfig, credentials: Credentials) -> None:
        self.config = config
        self.credentials = credentials

    def revocations(self) -> Revocations | None:
        """The revocation lists in force."""
        return self.credentials.revocations

    def expiries(self) -> dict[str, dt.datetime]:
        """When what is in force ends: own certificate, authority, revocation list."""
        found = {"certificate": self.credentials.not_after, "authority": self.credentials.ca_not_after}
        revocations = self.credentials.revocations
        next_update = revocations.next_update() if revocations is not None else None
        return found if next_update is None else {**found, "revocation_list": next_update}

    def expiry_warnings(self, now: dt.datetime) -> Iterator[str]:
        """One sentence for each of them that ends within the configured time."""
        days = self.config.cert_expire_warning_time_in_day
        for what, end in self.expiries().items():
            # Revocation lists are short-lived by nature: the last tenth of their warning time is what counts.
            margin = dt.timedelta(days=1) if what == "revocation_list" else dt.timedelta(days=days)
            if now + margin >= end:
                left = max(0, (end - now).days)
                yield f"The scheduler's {what.replace('_', ' ')} ends on {end:%Y-%m-%d} ({left} days left)."


def load_security(settings: SchedulerSettings, env: Mapping[str, str]) -> Security | None:
    """Loads what config.json names; None where no configuration is given.

    Raises:
        certs.errors.CertificateError: the configuration or a certificate is unusable, or not a scheduler's.
    """
    if settings.config_path is None:
        return None
    config = load_config(settings.config_path)
    apply_cipher_list(config)
    from certs.store import load_configured

    credentials = load_configured(config, "scheduler", env)
    check_is_scheduler(credentials, settings.job_id)
    return Security(config, credentials)


def check_is_scheduler(credentials: Credentials, job_id: str) -> None:
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
            remedy="Give a config.json by --config or MS_CONFIG_FILE (python -m certs init makes one),"
            " or set MS_ALLOW_INSECURE=1 on a network where everybody may read and join.",
        )
    return True
