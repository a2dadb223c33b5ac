"""Authenticates callers by their TLS certificates, and checks what they may do.

The contents of messages are never trusted: role, job and node come from the caller's certificate alone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from muster.certs.errors import CertificateError, RevokedError
from muster.scheduler.errors import NotPermittedError, UnauthenticatedError

if TYPE_CHECKING:
    from muster.certs.pki.peer import PeerCertificate
    from muster.certs.pki.revocation import Revocations
    from muster.certs.pki.spiffe import IdentityMap


class CallContext(Protocol):
    """The part of a gRPC call's context that this module reads."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns what the TLS layer reports about the peer."""

    def peer(self) -> str:
        """The peer's address in gRPC's notation."""


@dataclass(frozen=True)
class Caller:
    """The process that calls; ``certificate`` is None on a plaintext connection."""

    address: str
    certificate: PeerCertificate | None = None


def address_of(peer: str) -> str:
    """Turns gRPC's ``ipv4:1.2.3.4:5`` and ``ipv6:%5B::1%5D:5`` into a plain address."""
    return unquote(peer.split(":", 1)[1]) if peer.startswith(("ipv4:", "ipv6:")) else peer


class Access:
    """Authenticates and authorises every call.

    Args:
        tls: whether the port requires client certificates. Without TLS, any caller that reaches the port may
            do anything.
        require_identity: called for each call; returns whether a certificate must name job and role.
        identity_map: called for each call; returns the identities that SPIFFE IDs map to.
        revocations: called for each call; returns the revocation lists in force, or None.
        wall_clock: returns the date and time, with which the validity of certificates is checked.
    """

    def __init__(
        self,
        *,
        tls: bool,
        require_identity: Callable[[], bool] = lambda: True,
        identity_map: Callable[[], IdentityMap | None] = lambda: None,
        revocations: Callable[[], Revocations | None] = lambda: None,
        wall_clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self._tls = tls
        self._require_identity = require_identity
        self._identity_map = identity_map
        self._revocations = revocations
        self._wall_clock = wall_clock

    def authenticate(self, context: CallContext) -> Caller:
        """Reads and checks the caller's certificate.

        Raises:
            UnauthenticatedError: the caller has no certificate, or its certificate is expired, revoked or
                names no identity.
        """
        address = address_of(context.peer())
        if not self._tls:
            return Caller(address)
        from muster.certs.pki.peer import peer_of_pem

        pems = list(context.auth_context().get("x509_pem_cert") or ())
        if len(pems) != 1:
            raise UnauthenticatedError("The caller showed no certificate.")
        try:
            certificate = peer_of_pem(
                bytes(pems[0]), require_identity=self._require_identity(), identity_map=self._identity_map()
            )
            certificate.check(self._revocations(), self._wall_clock())
        except CertificateError as error:
            raise UnauthenticatedError(error.message, remedy=error.remedy) from error
        return Caller(address, certificate)

    def revoked(self, caller: Caller) -> str | None:
        """Returns why a certificate that was accepted earlier is no longer valid; None if it still is.

        A revocation list that cannot be trusted keeps new callers out, but does not end training that is
        running.
        """
        if caller.certificate is None:
            return None
        revocations = self._revocations()
        try:
            if revocations is not None:
                revocations.check(caller.certificate.links, self._wall_clock())
        except RevokedError as error:
            return str(error)
        except CertificateError:
            pass
        if not caller.certificate.identity.spiffe_id:
            return None
        from muster.certs.pki.spiffe import why_not_mapped

        return why_not_mapped(caller.certificate.identity, self._identity_map())

    def expired(self, caller: Caller) -> bool:
        """Whether a certificate that was accepted earlier has since expired."""
        return caller.certificate is not None and self._wall_clock() > caller.certificate.not_after

    def allow(self, caller: Caller, *, roles: Sequence[str], job: str, node: str | None = None) -> None:
        """Checks that the caller's certificate allows one of ``roles`` in ``job`` (as ``node``).

        Raises:
            NotPermittedError: the certificate does not allow the call; the message says why.
        """
        if caller.certificate is None:
            return
        identity = caller.certificate.identity
        reason = identity.may(role=roles, job=job, node=node)
        if identity.legacy and "worker" not in roles:
            reason = "A certificate without an identity cannot act as an operator."
        if reason is not None:
            raise NotPermittedError(reason, remedy="Issue a fitting one with muster certs issue.")
