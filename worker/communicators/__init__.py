"""The data plane: communicators of several kinds behind one contract, ``base``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.worker.errors import SettingsError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from muster.certs.runtime.store import Credentials
    from muster.worker.communicators.base import Backend
    from muster.worker.communicators.tcp.handshake import TlsPolicy

BACKENDS = ("tcp", "gloo", "nccl")


def create_backend(
    name: str,
    *,
    tls: Credentials | Callable[[], Credentials] | None,
    job_id: str = "default",
    allow_insecure: bool = False,
    seal: bool = True,
) -> Backend:
    """Makes the backend of that name; what it needs is imported now, and nothing else.

    Args:
        name: "tcp" (NumPy, authenticated), "gloo" (NumPy through torch) or "nccl" (GPUs).
        tls: this worker's credentials, or what gives those that are in force; None where TLS is off.
        job_id: the job, which the peers' certificates must be for.
        allow_insecure: lets sockets that are not authenticated leave loopback (MS_ALLOW_INSECURE).
        seal: whether tcp's data goes in sealed records keyed inside TLS, or in TLS's own records.

    Raises:
        SettingsError: no such backend, or its library is not installed; says which extra to install.
    """
    if name == "tcp":
        from muster.worker.communicators.tcp.backend import TcpBackend

        policy = None if tls is None else tls_policies(tls, job_id, seal)
        return TcpBackend(tls=policy, allow_insecure=allow_insecure)
    if name not in BACKENDS:
        raise SettingsError(f"The backend {name!r} does not exist.", remedy=f"Legal: {', '.join(BACKENDS)}.")
    try:
        if name == "gloo":
            from muster.worker.communicators.gloo.backend import GlooBackend

            return GlooBackend(allow_insecure=allow_insecure)
        from muster.worker.communicators.nccl import backend as nccl

        backend: Backend = nccl.NcclBackend()
        return backend
    except ImportError as error:
        extra = "torch" if name == "gloo" else "cuda12 (or cuda13)"
        raise SettingsError(
            f"The backend {name!r} needs {error.name or 'a library'}, which is not installed here.",
            remedy=f"Install the extra: pip install 'muster-rendezvous[{extra.split()[0]}]'; or use 'tcp'.",
        ) from None


def tls_policies(
    tls: Credentials | Callable[[], Credentials], job_id: str, seal: bool = True
) -> Callable[[], TlsPolicy]:
    """Gives the policy of the credentials in force; makes a new one when they have changed."""
    made: list[tuple[Credentials, TlsPolicy]] = []

    def current() -> TlsPolicy:
        credentials = tls() if callable(tls) else tls
        if not made or made[0][0] is not credentials:
            made[:] = [(credentials, _tls_policy(credentials, job_id, seal))]
        return made[0][1]

    return current


def _tls_policy(credentials: Credentials, job_id: str, seal: bool) -> TlsPolicy:
    from muster.certs.errors import CertificateError
    from muster.certs.runtime.tls import client_ssl_context, peer_pem, server_ssl_context
    from muster.worker.communicators.tcp.handshake import TlsPolicy

    def refusal(connection: ssl.SSLSocket, job: str, node_id: str | None) -> str | None:
        try:
            identity = credentials.peer(peer_pem(connection)).identity
        except CertificateError as error:
            return str(error)
        return identity.may(role="worker", job=job, node=node_id)

    return TlsPolicy(server_ssl_context(credentials), client_ssl_context(credentials), job_id, refusal, seal)
