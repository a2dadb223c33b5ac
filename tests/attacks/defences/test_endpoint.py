"""Attacks on the CPU communicator's ports, and by who listens on the wire: twins of those on one job."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from muster.certs.pki.identity import Identity
from muster.certs.runtime import tls
from muster.certs.runtime.store import Credentials
from muster.certs.runtime.tls import client_ssl_context
from muster.communicators.tcp import handshake
from muster.communicators.tcp.endpoint import Endpoint, host_and_port
from muster.communicators.tcp.handshake import REPLY, Hello, group_label
from muster.communicators.tcp.pending_group import PendingGroup
from tests.attacks.defences.attack import Attack, Try, check, folder_until_the_end
from tests.attacks.on_one_job.test_communicator import pair, reduced
from tests.attacks.on_one_job.test_transport import CLIENT_HELLO
from tests.communicators.tcp.world import Office, World, address_of, connect, endpoint_of, make_world

BOUNDS: dict[str, float] = {"max_parked": 8, "handshake_timeout_s": 0.3}
"""Of the endpoint that is attacked, so that a test need not make many or wait long."""


@functools.cache
def office() -> Office:
    """The job's authority."""
    return Office(folder_until_the_end())


@functools.cache
def enemy() -> Office:
    """An attacker's own."""
    return Office(folder_until_the_end())


@contextlib.contextmanager
def victim() -> Iterator[World]:
    """Rank 0 of a generation, which waits for rank 1."""
    world = make_world([office().credentials(node="n0"), office().credentials(node="n1")])
    membership = world.memberships[0]
    group = PendingGroup(membership, group_label(membership, ""))
    world.backends[0].endpoint.gather(group)
    try:
        yield world
    finally:
        world.backends[0].endpoint.forget(group)
        world.close()


def challenged(world: World, context: ssl.SSLContext) -> bool:
    """Says hello as rank 1; whether rank 0 challenges it, as it does a worker of the job alone."""
    hello = Hello(5, 1, 0, group_label(world.memberships[0], ""), b"n" * 32)
    try:
        with connect(address_of(world, 0)) as plain, context.wrap_socket(plain) as sock:
            sock.settimeout(30)
            sock.sendall(hello.encode())
            return len(sock.recv(REPLY.size)) > 0
    except OSError:
        return False


def trusting(credentials: Credentials | None) -> ssl.SSLContext:
    """A dialer's context that asks nothing of the other side."""
    if credentials is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        context = client_ssl_context(credentials)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def come_from_another_authority(_: Path) -> bool:
    with victim() as world:
        return challenged(world, trusting(enemy().credentials(node="n1")))


def trust_the_enemys(patch: pytest.MonkeyPatch) -> None:
    made = tls.server_ssl_context

    def lenient(credentials: Credentials) -> ssl.SSLContext:
        context = made(credentials)
        context.load_verify_locations(cadata=enemy().credentials().ca_pem.decode())
        return context

    patch.setattr(tls, "server_ssl_context", lenient)


def come_as(**identity: str) -> Try:
    """Comes with a certificate for another role, job or node."""

    def attack(_: Path) -> bool:
        with victim() as world:
            return challenged(world, trusting(office().credentials(**identity)))

    return attack


def ask_nobody_who_he_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Identity, "may", lambda self, **what: None)


def wait_in_every_place(_: Path) -> bool:
    """Many hellos of a generation to come, under one certificate."""
    context, kept = trusting(office().credentials(node="n1")), 0
    with victim() as world, contextlib.ExitStack() as held:
        bounds = {"max_parked": BOUNDS["max_parked"]}
        address = held.enter_context(endpoint_of(world, **bounds))
        hello = Hello(2**40, 1, 0, group_label(world.memberships[0], "x"), b"n" * 32)
        waiting = []
        for _number in range(12):
            sock = held.enter_context(context.wrap_socket(held.enter_context(connect(address))))
            sock.sendall(hello.encode())
            waiting.append(sock)
        for sock in waiting:
            sock.settimeout(0.1)
            try:
                sock.recv(1)
            except TimeoutError:
                kept += 1
            except OSError:
                continue
        return kept > 6


def half_a_hello(_: Path) -> bool:
    with victim() as world, contextlib.ExitStack() as held:
        limit_s = BOUNDS["handshake_timeout_s"]
        endpoint = Endpoint(world.backends[0].tls, handshake_timeout_s=limit_s)
        held.callback(endpoint.close)
        address = host_and_port(endpoint.open("127.0.0.1"))
        sock = held.enter_context(connect(address, CLIENT_HELLO[:20]))
        sock.settimeout(2.0 if limit_s > 2.0 else 60.0)  # long for what the defence does
        try:
            return sock.recv(1) != b""
        except TimeoutError:
            return True
        except ConnectionError:
            return False


class Keys:
    """What the ranks of a pair have."""

    there = True

    def credentials(self, **identity: str) -> Credentials | None:
        return office().credentials(**identity) if self.there else None


KEYS = Keys()


def read_the_wire(_: Path) -> bool:
    """Looks for a rank's numbers between the ranks."""
    with pair(KEYS) as (world, proxies):  # type: ignore[arg-type]
        assert all((result == 3.0).all() for result in reduced(world, 100))
        seen = b"".join(proxy.seen for proxy in proxies)
    return np.full(4, 2.0).tobytes() in seen


def without_certificates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KEYS, "there", False)


def speak_before_the_proof(_: Path) -> bool:
    """Asks for an answer before it is known who asks: a probe, by who has no certificate of this job."""
    context = trusting(office().credentials(job="other"))
    with victim() as world:
        try:
            with connect(address_of(world, 0)) as plain, context.wrap_socket(plain) as sock:
                sock.settimeout(30)
                sock.sendall(handshake.PROBE + bytes(handshake.HELLO.size - len(handshake.PROBE)))
                return sock.recv(4) == handshake.PROBE_ANSWER
        except OSError:
            return False


STRANGER, INSIDER = "reaches the port", "another certificate of the authority"
ATTACKS = (
    Attack(
        "come from another authority", "the group", STRANGER, come_from_another_authority, trust_the_enemys
    ),
    Attack("come as an operator", "the group", INSIDER, come_as(role="operator"), ask_nobody_who_he_is),
    Attack("come from another job", "the group", INSIDER, come_as(job="other"), ask_nobody_who_he_is),
    Attack("come as another node", "the group", INSIDER, come_as(node="n7"), ask_nobody_who_he_is),
    Attack("probe from another job", "who is there", INSIDER, speak_before_the_proof, ask_nobody_who_he_is),
    Attack(
        "wait in every place", "the next generation", INSIDER, wait_in_every_place,
        lambda patch: patch.setitem(BOUNDS, "max_parked", 1 << 12),
    ),
    Attack(
        "half a hello", "descriptors", STRANGER, half_a_hello,
        lambda patch: patch.setitem(BOUNDS, "handshake_timeout_s", 600),
    ),
    Attack("read the wire", "gradients", "in the middle", read_the_wire, without_certificates),
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
