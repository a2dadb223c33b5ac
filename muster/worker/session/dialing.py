"""Opens streams to the scheduler: first a handshake that reports errors precisely, then gRPC."""

from __future__ import annotations

import os
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from muster.forking import not_for_children_to
from muster.worker.config import Settings
from muster.worker.session.grpc_log import guard_grpc_log
from muster.worker.session.schedulers import Schedulers, connect_timeout_s
from muster.worker.session.streams import SESSION_METHOD, DeniedError, Dial, Stream, stream_on

if TYPE_CHECKING:
    from muster.certs.pki.peer import PeerCertificate
    from muster.certs.runtime.follower import Follower
    from muster.certs.runtime.store import Credentials


def grpc_dial(settings: Settings, keyring: Follower | None, method: str = SESSION_METHOD) -> Dial:
    """Opens streams over gRPC, with mutual TLS if there is a keyring."""
    schedulers, count = Schedulers(settings), len(settings.scheduler_hosts)

    def dial(outbox: SimpleQueue[bytes | None]) -> Stream:
        # gRPC is loaded before the scheduler is found, because there is time while the scheduler starts, but
        # not afterwards.
        guard_grpc_log(os.environ)
        import muster.certs.runtime.grpc_credentials  # noqa: F401

        return schedulers.first(lambda one: _dial_one(one, keyring, outbox, count, method))

    return dial


def _dial_one(
    settings: Settings, keyring: Follower | None, outbox: SimpleQueue[bytes | None], count: int, method: str
) -> Stream:
    if keyring is None:
        _probe_plaintext(settings, connect_timeout_s(count))
        return stream_on(_channel(settings, None, None, count), outbox, method=method)
    channel, scheduler = _secure_channel(settings, keyring(), count)
    return stream_on(channel, outbox, lambda: keyring.has_revoked(scheduler), method)


def _secure_channel(settings: Settings, credentials: Credentials, count: int) -> tuple[Any, PeerCertificate]:
    from muster.certs.errors import CertificateError
    from muster.certs.runtime.preflight import preflight

    try:
        found = preflight(
            settings.scheduler_hosts[0],
            settings.scheduler_port,
            credentials,
            job=settings.job_id,
            timeout_s=connect_timeout_s(count),
        )
    except CertificateError as error:
        raise DeniedError(str(error), by_scheduler=False) from error
    from muster.certs.runtime.grpc_credentials import channel_credentials

    tls = channel_credentials(credentials, found.server_leaf_pem)
    return _channel(settings, tls, found.name_override, count), found.peer


def _channel(settings: Settings, credentials: Any, name: str | None, count: int) -> Any:
    import grpc

    from muster.wire.settings import client_options

    options = [
        *client_options(settings.node_timeout_s, schedulers=count),
        ("grpc.max_receive_message_length", 64 << 20),
    ]
    not_for_children_to(settings.scheduler_hosts[0], settings.scheduler_port)
    address = settings.scheduler_address
    if credentials is None:
        return grpc.insecure_channel(address, options)
    if name is not None:
        options.append(("grpc.ssl_target_name_override", name))  # type: ignore[arg-type]
    return grpc.secure_channel(address, credentials, options)


def _probe_plaintext(settings: Settings, timeout_s: float) -> None:
    """Checks that a plaintext HTTP/2 server answers.

    A server that requires TLS would only close the connection.
    """
    from muster.certs.runtime.probe import Spoken, spoken_at

    spoken = spoken_at(settings.scheduler_hosts[0], settings.scheduler_port, timeout_s)
    if spoken is Spoken.TLS:
        raise DeniedError(
            f"The scheduler at {settings.scheduler_address} demands TLS, and this worker has no"
            " config.json. Set MS_CONFIG_FILE to one with a certificate of this job"
            " (muster certs issue).",
            by_scheduler=False,
        )
    if spoken is Spoken.NOTHING:
        raise ConnectionResetError("the connection was closed before anything was said")
