"""The data plane: communicators of several kinds behind one contract, ``base``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from muster.errors import SettingsError
from muster.version import how_to_install
from muster.wire.variables import TABLE

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from muster.certs.runtime.store import Credentials
    from muster.communicators.base import Backend
    from muster.communicators.nccl.warmup import WarmUp
    from muster.communicators.tcp.handshake import TlsPolicy


class _Needs(NamedTuple):
    """The arguments from which a backend is made."""

    policies: Callable[[], TlsPolicy] | None
    allow_insecure: bool
    warm_up: WarmUp | None


def _tcp(needs: _Needs) -> Backend:
    from muster.communicators.tcp.backend import TcpBackend

    return TcpBackend(tls=needs.policies, allow_insecure=needs.allow_insecure)


def _nccl(needs: _Needs) -> Backend:
    from muster.communicators.following import FollowingBackend
    from muster.communicators.nccl.communicator import NcclBackend
    from muster.communicators.tcp.backend import TcpBackend

    host = TcpBackend(tls=needs.policies, allow_insecure=needs.allow_insecure)
    return FollowingBackend(NcclBackend(warm_up=needs.warm_up), host)


def _outside(needs: _Needs) -> Backend:
    from muster.communicators.outside import OutsideBackend

    return OutsideBackend()


def _warm_up_nccl(ordinal: int) -> WarmUp:
    from muster.communicators.nccl.warmup import WarmUp

    return WarmUp(ordinal)


class _BackendKind(NamedTuple):
    """A registered backend.

    Attributes:
        make: makes the backend, and imports only what it needs.
        extra: the extra of Muster's package that installs what it needs.
        warm_up: begins the slow preparation of a GPU.
    """

    make: Callable[[_Needs], Backend]
    extra: str = ""
    warm_up: Callable[[int], WarmUp] | None = None


BACKENDS = {"nccl": _BackendKind(_nccl, "cuda12", _warm_up_nccl), "tcp": _BackendKind(_tcp)}
"""The backends by name; a new one is registered here."""


_OUTSIDE = _BackendKind(_outside)


def warm_up(name: str, ordinal: int) -> WarmUp | None:
    """Begins the GPU's warm-up before anything else is loaded; returns None if the backend needs none.

    Args:
        name: the name of the backend.
        ordinal: this worker's GPU as CUDA counts in this process. -1: it is not known yet, or this worker is
            a spare, which may wait long and must not hold memory of a GPU until it has a place.
    """
    begin = BACKENDS[name].warm_up if name in BACKENDS else None
    return None if begin is None else begin(ordinal)


def create_backend(
    name: str,
    *,
    tls: Credentials | Callable[[], Credentials] | None,
    job_id: str = "default",
    allow_insecure: bool = False,
    seal: bool = True,
    warm_up: WarmUp | None = None,
) -> Backend:
    """Makes the backend of that name; imports only what it needs.

    Args:
        name: "tcp" (the host's memory, authenticated) or "nccl" (GPUs). "torch" makes a backend without
            communication, for programs that communicate by torch.distributed.
        tls: this worker's credentials, or a source of those in force; None if TLS is off.
        job_id: the job, which the peers' certificates must be for.
        allow_insecure: allows unauthenticated sockets beyond loopback (MS_ALLOW_INSECURE).
        seal: whether tcp's data goes in sealed records keyed inside TLS, or in TLS's own records.
        warm_up: what :func:`warm_up` began for this worker's GPU.

    Raises:
        SettingsError: there is no such backend, or its library is not installed; the message says which extra
            installs it.
    """
    row = TABLE["MS_BACKEND"]
    if name in row.removed:
        raise SettingsError(f"{name!r} is no backend: {row.removed[name]}.")
    if name not in (*BACKENDS, "torch"):
        raise SettingsError(f"The backend {name!r} does not exist.", remedy=f"Legal: {', '.join(BACKENDS)}.")
    policies = None if tls is None else tls_policies(tls, job_id, seal)
    kind = BACKENDS.get(name, _OUTSIDE)
    try:
        return kind.make(_Needs(policies, allow_insecure, warm_up))
    except ImportError as error:
        raise SettingsError(
            f"The backend {name!r} needs {error.name or 'a library'}, which is not installed here.",
            remedy=f"{how_to_install(kind.extra)}; or use 'tcp'.",
        ) from None


def tls_policies(
    tls: Credentials | Callable[[], Credentials], job_id: str, seal: bool = True
) -> Callable[[], TlsPolicy]:
    """Returns a function that returns the policy of the credentials in force; it follows their changes."""
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
    from muster.communicators.tcp.handshake import TlsPolicy

    def refusal(connection: ssl.SSLSocket, job: str, node_id: str | None) -> str | None:
        try:
            identity = credentials.peer(peer_pem(connection)).identity
        except CertificateError as error:
            return str(error)
        return identity.may(role="worker", job=job, node=node_id)

    return TlsPolicy(server_ssl_context(credentials), client_ssl_context(credentials), job_id, refusal, seal)
