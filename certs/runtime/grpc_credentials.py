"""gRPC's credentials, and the settings that TLS and liveness need. Only this module here imports grpc."""

from __future__ import annotations

from collections import deque

import grpc

from muster.certs.runtime.store import Credentials

_SERVER_OPTIONS = (
    # Clients ping while there is no data; the default here would end them with "Too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # Two schedulers on one port would share its connections without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Refused and silent connections stay open otherwise.
    ("grpc.max_connection_idle_ms", 30_000),
    # Thousands of workers may join in one moment.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 30_000),
)
_CLIENT_OPTIONS = (
    ("grpc.http2.max_pings_without_data", 0),
    # Proxy variables are obeyed even for loopback otherwise.
    ("grpc.enable_http_proxy", 0),
)

DEFAULT_NODE_TIMEOUT_S = 5.0
_LEAST_PING_AFTER_S = 5.0
_LEAST_TIMEOUT_S = 5.0
_SERVER_LEAST_ANSWER_S = 60.0


def server_options(node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S) -> tuple[tuple[str, int], ...]:
    """What every server of ours sets.

    A process that pauses answers no ping, nor does anybody whom a flooded server does not hear. So the server
    ends no connection for that: heartbeats say who is silent, and the kernel which host is gone.

    Args:
        node_timeout_s: MS_NODE_TIMEOUT; see :func:`client_options`.
    """
    return (*_keepalive(node_timeout_s, least_answer_s=_SERVER_LEAST_ANSWER_S), *_SERVER_OPTIONS)


def client_options(node_timeout_s: float = DEFAULT_NODE_TIMEOUT_S) -> tuple[tuple[str, int], ...]:
    """What every channel of ours sets.

    Args:
        node_timeout_s: MS_NODE_TIMEOUT; no connection ends because its other end paused for so long.
    """
    return (*_keepalive(node_timeout_s, least_answer_s=_LEAST_TIMEOUT_S), *_CLIENT_OPTIONS)


def _keepalive(node_timeout_s: float, *, least_answer_s: float) -> tuple[tuple[str, int], ...]:
    timeout_s = max(_LEAST_TIMEOUT_S, 2 * node_timeout_s)
    after_s = max(_LEAST_PING_AFTER_S, 0.6 * node_timeout_s)
    return (
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(1000 * after_s)),
        # The socket's TCP_USER_TIMEOUT: how long the other kernel may acknowledge nothing.
        ("grpc.keepalive_timeout_ms", round(1000 * timeout_s)),
        # How long the other process may answer no ping; gRPC sends some of its own, whenever data comes.
        ("grpc.http2.ping_timeout_ms", round(1000 * max(least_answer_s, timeout_s))),
    )


def channel_credentials(credentials: Credentials, pinned_leaf_pem: bytes) -> grpc.ChannelCredentials:
    """Mutual TLS for a channel that accepts exactly one server certificate.

    Args:
        credentials: our own.
        pinned_leaf_pem: the server's certificate, as the preflight found it.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=pinned_leaf_pem,
        private_key=credentials.key_pem,
        certificate_chain=credentials.cert_chain_pem,
    )


class RotatingServerCredentials:
    """Mutual TLS for a server whose certificate may change while streams live on.

    Pass ``credentials`` to ``add_secure_port`` and call :meth:`update` with what a watcher loaded.
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
