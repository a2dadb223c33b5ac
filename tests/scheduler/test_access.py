"""Who may call what: the certificate decides, at every call."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence

import pytest

from muster.certs.pki.identity import LEGACY, Identity
from muster.certs.pki.peer import PeerCertificate, peer_of_pem
from muster.certs.pki.revocation import Revocations
from muster.scheduler.access import Access, Caller, address_of
from muster.scheduler.errors import NotPermittedError, UnauthenticatedError
from tests.scheduler.processes import Pki


class Context:
    """A call as gRPC shows it."""

    def __init__(self, *pems: bytes) -> None:
        self._pems = pems

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"x509_pem_cert": list(self._pems)} if self._pems else {}

    def peer(self) -> str:
        return "ipv4:10.0.0.9:4000"


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("ipv4:10.0.0.9:4000", "10.0.0.9:4000"),
        ("ipv6:%5Bfe80::1%5D:4000", "[fe80::1]:4000"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_addresses(given: str, address: str) -> None:
    assert address_of(given) == address


def test_a_good_certificate(pki: Pki) -> None:
    credentials = pki.credentials("node-7")
    caller = Access(tls=True).authenticate(Context(credentials.leaf_pem))
    assert caller.certificate is not None
    assert caller.certificate.identity == Identity("default", "worker", "node-7")
    assert caller.certificate.fingerprint == credentials.fingerprint
    assert caller.address == "10.0.0.9:4000"


@pytest.mark.parametrize("pems", [(), (b"junk",), (b"", b"")])
def test_no_usable_certificate(pems: tuple[bytes, ...]) -> None:
    with pytest.raises(UnauthenticatedError):
        Access(tls=True).authenticate(Context(*pems))


def test_expiry_is_checked_at_every_call_because_resumed_sessions_skip_it(pki: Pki) -> None:
    leaf = pki.credentials("client").leaf_pem
    now = dt.datetime.now(dt.UTC)
    clock = [now]
    access = Access(tls=True, wall_clock=lambda: clock[0])
    caller = access.authenticate(Context(leaf))
    assert not access.expired(caller)
    clock[0] = now + dt.timedelta(days=5000)
    assert access.expired(caller)
    assert access.revoked(caller) is None  # expired, but let in before: reported, not expelled
    with pytest.raises(UnauthenticatedError, match="expired"):
        access.authenticate(Context(leaf))


def test_lists_that_cannot_be_relied_on_refuse_newcomers_only(pki: Pki) -> None:
    broken = Revocations(problem="crl.pem is junk.")
    access = Access(tls=True, revocations=lambda: broken)
    with pytest.raises(UnauthenticatedError, match=r"crl\.pem is junk"):
        access.authenticate(Context(pki.credentials("client").leaf_pem))
    member = Caller("x", peer_of_pem(pki.credentials("client").leaf_pem))
    assert access.revoked(member) is None


def peer(pki: Pki, name: str) -> PeerCertificate:
    return peer_of_pem(pki.credentials(name).leaf_pem)


@pytest.mark.parametrize(
    ("name", "roles", "job", "node", "allowed"),
    [
        ("client", ("worker",), "default", "any", True),
        ("client", ("operator",), "default", None, False),
        ("client", ("worker",), "other", "any", False),
        ("node-7", ("worker",), "default", "node-7", True),
        ("node-7", ("worker",), "default", "node-8", False),
        ("any-job", ("worker",), "other", "any", True),
        ("server", ("worker", "scheduler", "operator"), "default", None, True),
        ("server", ("worker",), "default", "any", False),
        ("operator", ("operator",), "default", None, True),
        ("operator", ("operator",), "other", None, False),
    ],
)
def test_permissions(
    pki: Pki, name: str, roles: tuple[str, ...], job: str, node: str | None, allowed: bool
) -> None:
    access, caller = Access(tls=True), Caller("x", peer(pki, name))
    if allowed:
        access.allow(caller, roles=roles, job=job, node=node)
    else:
        with pytest.raises(NotPermittedError, match="certificate"):
            access.allow(caller, roles=roles, job=job, node=node)


def test_a_certificate_without_identity_trains_but_never_operates(pki: Pki) -> None:
    access, caller = Access(tls=True), Caller("x", dataclasses.replace(peer(pki, "client"), identity=LEGACY))
    access.allow(caller, roles=("worker",), job="any", node="any")
    with pytest.raises(NotPermittedError, match="operator"):
        access.allow(caller, roles=("operator",), job="any")


def test_plaintext_callers_are_trusted_because_only_loopback_or_consent_brings_them() -> None:
    access = Access(tls=False)
    caller = access.authenticate(Context())
    assert caller == Caller("10.0.0.9:4000")
    access.allow(caller, roles=("operator",), job="any")
