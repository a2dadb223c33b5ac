"""Loads the scheduler's credentials at its start, and checks whether it may serve without TLS.

This module does not import grpc, because the cipher list must be in the environment before that import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster.certs.errors import IdentityError
from muster.scheduler.audit.logs import LOG
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.errors import SchedulerSettingsError
from muster.wire.settings import is_loopback

if TYPE_CHECKING:
    from muster.certs.runtime.follower import Follower
    from muster.certs.runtime.store import Credentials


def load_security(settings: SchedulerSettings, env: Mapping[str, str]) -> Follower | None:
    """Loads the certificates that config.json names; returns None if there is no configuration.

    Raises:
        muster.certs.errors.CertificateError: the configuration or a certificate cannot be used, or the
            certificate is not a scheduler's.
    """
    if settings.config_path is None:
        return None
    from muster.certs.runtime.follower import follow_files

    followed = follow_files(settings.config_path, "scheduler", env, LOG, job=settings.job_id)
    check_is_scheduler(followed.credentials, settings.job_id)
    return followed


def check_is_scheduler(credentials: Credentials, job_id: str | None) -> None:
    """Refuses a certificate whose role is not scheduler, because workers would refuse it.

    Raises:
        IdentityError: the certificate is for another role or another job.
    """
    reason = credentials.identity.may(role="scheduler", job=job_id)
    if reason is not None:
        raise IdentityError(
            reason,
            remedy="server_cert_path must name a certificate for the role scheduler of this MS_JOB_ID.",
        )


def check_may_listen(settings: SchedulerSettings, addresses: list[str], *, tls: bool) -> bool:
    """Checks that a scheduler without TLS listens only on loopback, unless the operator has consented.

    Returns:
        Whether to warn that, with the operator's consent, plaintext may leave this machine.

    Raises:
        SchedulerSettingsError: plaintext could leave this machine, and the operator has not consented.
    """
    if tls or all(is_loopback(address) for address in addresses):
        return False
    if not settings.allow_insecure:
        asked = settings.bind_host or ",".join(settings.hosts)
        raise SchedulerSettingsError(
            f"Without TLS the scheduler listens on loopback only; MS_SCHED_HOST is {asked!r}.",
            remedy="Give a config.json by --config or MS_CONFIG_FILE (muster certs init makes one),"
            " or set MS_ALLOW_INSECURE=1 on a network where everybody may read and join.",
        )
    return True
