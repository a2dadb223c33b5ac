"""gRPC's credentials. Only this module here imports grpc."""

from __future__ import annotations

from collections import deque

import grpc

from muster.certs.runtime.store import Credentials


def channel_credentials(credentials: Credentials, pinned_leaf_pem: bytes) -> grpc.ChannelCredentials:
    """Returns credentials for mutual TLS on a channel that accepts exactly one server certificate.

    Args:
        credentials: this process's credentials.
        pinned_leaf_pem: the server's certificate, from the preflight.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=pinned_leaf_pem,
        private_key=credentials.key_pem,
        certificate_chain=credentials.cert_chain_pem,
    )


class RotatingServerCredentials:
    """Mutual TLS for a server whose certificate may change while streams stay open.

    Pass ``credentials`` to ``add_secure_port``, and call :meth:`update` with newly loaded credentials.
    """

    def __init__(self, credentials: Credentials) -> None:
        # One operation puts in and one takes out: with a plain attribute, what is put between another
        # thread's reading and clearing of it would be lost, and the old certificate stay for good.
        self._next: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(credentials),
            self._fetch,  # type: ignore[arg-type]  # None keeps what is in force
            require_client_authentication=True,
        )

    def update(self, credentials: Credentials) -> None:
        """Puts new credentials in force for connections from now on. They must have been validated."""
        self._next.append(_configuration(credentials))

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        # Runs on gRPC's threads at every accept: hands over what is prepared, does nothing else.
        try:
            return self._next.pop()
        except IndexError:
            return None


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key_pem, credentials.cert_chain_pem)], root_certificates=credentials.ca_pem
    )
