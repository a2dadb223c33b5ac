"""Loads a worker's certificate and follows its renewals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster.errors import SecurityError, SettingsError
from muster.worker.config import Settings

if TYPE_CHECKING:
    from muster.certs.runtime.follower import Follower

log = logging.getLogger("muster.worker")


def load_keyring(settings: Settings, env: Mapping[str, str]) -> Follower | None:
    """Loads this worker's certificate and sets gRPC's ciphers; returns None without TLS.

    Raises:
        SettingsError: config.json or the password's variable is wrong.
        SecurityError: the certificate, its password or its authority is wrong.
    """
    if settings.config_path is None:
        return None
    from muster.certs.errors import CertificateError, ConfigError
    from muster.certs.runtime.follower import follow_files

    try:
        keyring = follow_files(
            settings.config_path, "worker", env, log, job=settings.job_id, password=settings.client_password
        )
    except ConfigError as error:
        raise SettingsError(error.message, remedy=error.remedy) from error
    except CertificateError as error:
        raise SecurityError(error.message, remedy=error.remedy) from error
    if keyring.config.ignored_ciphers:
        log.warning(
            "cipher_list: these ciphers have no effect: %s", ", ".join(keyring.config.ignored_ciphers)
        )
    return keyring
