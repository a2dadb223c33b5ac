"""Opens a role's certificate ahead for processes that are to be forked, which then need not each do it.

Most of what a short-lived worker does with its certificate is to hash the file's password thousands of times,
to wake OpenSSL and to make contexts of the key. Forks find that done; they still read the files and check
everything themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from muster.certs.config import load_config
from muster.certs.errors import CertificateError
from muster.certs.files import unheard_warnings
from muster.certs.runtime.passwords import forbid_core_files
from muster.certs.runtime.store import forget_opened, kept_open, load_configured
from muster.certs.runtime.tls import forget_made, make_ahead


def open_ahead(config_path: str | os.PathLike[str], role: str, env: Mapping[str, str]) -> None:
    """Opens a role's certificate and makes its TLS contexts, for forks to inherit.

    Call :func:`close_again` after forking. Errors are not reported here: each fork meets them again, and
    reports them where the certificate is used. From here on this process and its forks leave no core file,
    which would hold the private key.

    Args:
        config_path: config.json.
        role: ``scheduler`` or ``worker``.
        env: the forks' environment, where the password is looked for.
    """
    forbid_core_files()
    with unheard_warnings(), kept_open():
        try:
            config = load_config(config_path)
            if (
                config.spiffe_endpoint_socket
            ):  # each process has a certificate of its own, and needs gRPC for it
                return
            make_ahead(load_configured(config, role, env, prompt=None))
        except CertificateError:
            close_again()


def close_again() -> None:
    """Drops the opened key and the TLS contexts made from it."""
    forget_opened()
    forget_made()
