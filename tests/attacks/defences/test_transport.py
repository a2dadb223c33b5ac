"""Attacks on the scheduler's port by strangers and by who has a certificate: twins."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gzip
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from muster.certs.pki import peer
from muster.certs.pki.authority import create_authority
from muster.certs.pki.certificates import parse_certificates
from muster.certs.pki.identity import Identity, parse_uri
from muster.certs.pki.peer import PeerCertificate, peer_of_pem
from muster.certs.pki.revocation import Revocations, load_revocations
from muster.certs.pki.spiffe import IdentityMap
from muster.scheduler.access import Access
from muster.scheduler.errors import UnauthenticatedError
from muster.scheduler.serve.sessions import Limits, Sessions
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.attacks import http2
from tests.attacks.defences.attack import Attack, Try, Without, check
from tests.attacks.defences.service import SETUP, pki, served
from tests.attacks.field import Field
from tests.attacks.http2 import Http2
from tests.attacks.on_one_job.test_identity import join
from tests.attacks.on_one_job.test_transport import (
    CLIENT_HELLO,
    ENHANCE_YOUR_CALM,
    a_malformed_identity,
    a_weak_key,
    control_characters,
    no_identity,
    two_identities,
    two_names,
)
from tests.certs.making import DAY, NOW, certificate, key_pem, pem
from tests.scheduler.processes import PASSWORD, Stream
from tests.waiting import LIMIT_S

SHORT_MS, LONG_MS = 300, 60_000
HANDSHAKE_MS = "grpc.server_handshake_timeout_ms"


def set_option(name: str, value: int) -> Without:
    return lambda patch: patch.setitem(SETUP.options, name, value)


def patience_s(*, defended: bool, without_s: float) -> float:
    """How long to wait for what a defence does, and how long to see that without it nothing is done."""
    return LIMIT_S if defended else without_s


def succeeds(over: grpc.Channel, **more: Any) -> bool:
    """Whether a call is answered."""
    with over:
        try:
            pb_grpc.RendezvousStub(over).Status(pb.StatusRequest(), timeout=LIMIT_S, **more)
        except grpc.RpcError:
            return False
    return True


# ---------------------------------------------------------------- who has no certificate


def speak_plaintext(_: Path) -> bool:
    with served() as here:
        return succeeds(here.channel())


def without_certificates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SETUP, "tls", False)


def show_no_certificate(_: Path) -> bool:
    """Shakes hands without one, and is told the server's settings."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with served() as here, socket.create_connection(("127.0.0.1", here.port), LIMIT_S) as plain:
        with contextlib.suppress(OSError), context.wrap_socket(plain) as sock:
            return sock.recv(1) != b""
        return False


def ask_for_none(patch: pytest.MonkeyPatch) -> None:
    made = grpc.dynamic_ssl_server_credentials

    def asking_for_none(*arguments: Any, require_client_authentication: bool) -> Any:
        return made(*arguments)

    patch.setattr(grpc, "dynamic_ssl_server_credentials", asking_for_none)


@functools.cache
def foreign() -> tuple[bytes, bytes, bytes]:
    """A worker's certificate of an attacker's own authority, its key, and the authority."""
    folder = pki().directory / "foreign"
    folder.mkdir()
    issued = create_authority(folder, PASSWORD).issue(Identity("default", "worker"))
    return pem(issued.certificate), key_pem(issued.key), (folder / "ca.crt").read_bytes()


def show_one_of_an_own_authority(_: Path) -> bool:
    shown_pem, key, _authority = foreign()
    with served() as here:
        tls = grpc.ssl_channel_credentials((pki().directory / "ca.crt").read_bytes(), key, shown_pem)
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        return succeeds(grpc.secure_channel(f"127.0.0.1:{here.port}", tls, options))


def trust_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SETUP, "more_authorities", foreign()[2])


def half_a_hello(_: Path) -> bool:
    """Keeps a connection by the half of a TLS hello; the product gives it five seconds, this test less."""
    with served() as here, socket.create_connection(("127.0.0.1", here.port), LIMIT_S) as sock:
        sock.sendall(CLIENT_HELLO[:20])
        defended = SETUP.options[HANDSHAKE_MS] == SHORT_MS
        sock.settimeout(patience_s(defended=defended, without_s=5 * SHORT_MS / 1000))
        try:
            return sock.recv(1) != b""
        except TimeoutError:
            return True


# ---------------------------------------------------------------- who has one


def open_many_streams(_: Path) -> bool:
    """250 streams on one connection that never say who they are."""
    with served() as here:
        connection = Http2(here.port, pki().credentials("client"))
        connection.send(b"".join(http2.request(2 * number + 1) for number in range(250)))
        refused, defended = 0, "grpc.max_concurrent_streams" not in SETUP.options
        with contextlib.suppress(OSError):
            for found in connection.frames(patience_s(defended=defended, without_s=1.0)):
                refused += found.kind == http2.RST_STREAM and found.body == ENHANCE_YOUR_CALM
                if found.stream == 499:
                    break
        connection.close()
        return bool(refused < 100)


def first_end(data: bytes, *, packed: bool = False, claimed: int | None = None) -> bytes:
    """What a session ends with whose first message is this."""
    extra = (("grpc-encoding", "gzip"),) if packed else ()
    with served() as here:
        connection = Http2(here.port, pki().credentials("client"))
        more: dict[str, Any] = {} if claimed is None else {"claimed": claimed}
        connection.send(http2.request(1, extra=extra) + http2.message(1, data, packed=packed, **more))
        wait_s = patience_s(defended="grpc.max_receive_message_length" not in SETUP.options, without_s=2.0)
        found = next((each.body for each in connection.frames(wait_s) if each.ends_stream), b"")
        connection.close()
        return found


def send_much(_: Path) -> bool:
    """A message of four megabytes is read in full, and only then found to be none."""
    return b"larger than max" not in first_end(gzip.compress(bytes(4 << 20)), packed=True)


def announce_much(_: Path) -> bool:
    """The scheduler waits for what is announced, and makes room."""
    return b"larger than max" not in first_end(b"x" * 1000, claimed=100_000_000)


def send_many_headers(_: Path) -> bool:
    with served() as here:
        many = tuple((f"x-{number}", "v" * 8000) for number in range(8))
        return succeeds(here.channel("client"), metadata=many)


def all_headers(patch: pytest.MonkeyPatch) -> None:
    for name in ("grpc.max_metadata_size", "grpc.absolute_max_metadata_size"):
        patch.setitem(SETUP.options, name, 1 << 24)


def never_join(_: Path) -> bool:
    """Keeps a session that says nothing; the product gives it ten seconds, this test less."""
    with served() as here, here.channel("client") as over:
        stream = Stream(over)
        defended = SETUP.limits.join_timeout_s == SHORT_MS / 1000
        with contextlib.suppress(grpc.FutureTimeoutError, grpc.RpcError):
            stream.call.result(timeout=patience_s(defended=defended, without_s=5 * SHORT_MS / 1000))
        open_still = stream.call.is_active()
        stream.call.cancel()
        stream.half_close()
        return bool(open_still)


def hold_many_sessions(_: Path) -> bool:
    """Twenty from one address, where four may be."""
    with served() as here, contextlib.ExitStack() as held:
        streams = []
        for _number in range(5):
            over = held.enter_context(here.channel("client"))
            streams += [Stream(over) for _ in range(4)]

        async def held_now() -> int:
            return len(here.sessions.all)

        most, limit = 0, time.monotonic() + 30
        while most <= 4 and time.monotonic() < limit and any(stream.call.is_active() for stream in streams):
            most = max(most, here.do(held_now))
            time.sleep(0.01)
        for stream in streams:
            stream.call.cancel()
            stream.half_close()
        return most > 4


# ---------------------------------------------------------------- what stands in a certificate


class Call:
    """What gRPC says of a call whose TLS was good."""

    def __init__(self, certificate_pem: bytes) -> None:
        self._pem = certificate_pem

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._pem]}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"


def taken(certificate_pem: bytes, **more: Any) -> bool:
    """Whether somebody with this certificate is taken for somebody."""
    peer_of_pem.cache_clear()
    try:
        Access(tls=True, **more).authenticate(Call(certificate_pem))
    except UnauthenticatedError:
        return False
    finally:
        peer_of_pem.cache_clear()
    return True


def shown(make: Callable[[Field], tuple[bytes, bytes]]) -> Try:
    """Shows a certificate that the authority's carelessness has signed."""

    def attack(_: Path) -> bool:
        here: Any = pki()  # of a field it needs the certificates alone
        holder = type("Holder", (), {"pki": here})
        return taken(make(holder)[0])  # type: ignore[arg-type]

    return attack


def careless_peer(
    certificate_pem: bytes, *, require_identity: bool = True, identity_map: IdentityMap | None = None
) -> PeerCertificate:
    """Reads a certificate as it comes: its last URI counts, and who has none is a worker."""
    leaf = x509.load_pem_x509_certificate(certificate_pem)
    names = [each.value for each in leaf.extensions if isinstance(each.value, x509.SubjectAlternativeName)]
    uris = [uri for each in names for uri in each.get_values_for_type(x509.UniformResourceIdentifier)]
    identity = parse_uri(uris[-1]) if uris else Identity("default", "worker")
    dates = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    return PeerCertificate(identity, "", "", *dates, "", (), (), ())


def read_carelessly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer, "peer_of_pem", careless_peer)


def careless_uri(uri: str) -> Identity:
    return Identity("default", uri.rpartition("/")[2])


def dated(start: dt.timedelta, end: dt.timedelta) -> Try:
    """Shows a certificate at a time that is not its own, where TLS does not look: a session is resumed."""

    def attack(_: Path) -> bool:
        uris = ("muster://default/worker",)
        return taken(pem(certificate(pki().authority, uris=uris, start=NOW + start, end=NOW + end)))

    return attack


def show_a_revoked_one(_: Path) -> bool:
    return taken(pki().credentials("revoked").leaf_pem, revocations=revocations)


def revocations() -> Revocations:
    """The lists in force."""
    folder = pki().directory
    authorities = parse_certificates((folder / "ca.crt").read_bytes(), "ca.crt")
    return load_revocations((folder / "crl.pem").read_bytes(), authorities, "crl.pem")


def break_the_list(_: Path) -> bool:
    """Overwrites the revocation list: nobody knows any more who is revoked, and a revoked one comes."""
    broken = Revocations(problem="crl_path is junk")
    return taken(pki().credentials("revoked").leaf_pem, revocations=lambda: broken)


def look_at_no_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Revocations, "check", lambda self, links, now=None: None)


def look_at_no_date(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer, "check_period", lambda *_: None)


def stay_in_when_revoked(_: Path) -> bool:
    """A worker whose certificate is revoked while it is in."""
    with pytest.MonkeyPatch.context() as patch, served() as here, here.channel("revoked") as over:
        stream = Stream(over)
        stream.put(join("spare-0", spare=True))
        stream.next("welcome")
        patch.setattr(SETUP, "revocations", revocations)

        async def look() -> bool:
            await here.sessions.expel_revoked()
            return any(not session.over for session in here.sessions.all.values())

        there = here.do(look)
        stream.call.cancel()
        stream.half_close()
        return there


async def expel_nobody(_: object) -> None:
    return


def expels_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "expel_revoked", expel_nobody)


STRANGER, INSIDER = "reaches the port, no certificate", "a certificate of the job"
CARELESS = "has had the authority sign it"
ATTACKS = (
    Attack("speak plaintext", "the job", STRANGER, speak_plaintext, without_certificates),
    Attack("show no certificate", "the protocol", STRANGER, show_no_certificate, ask_for_none),
    Attack("show one of an own authority", "the job", STRANGER, show_one_of_an_own_authority, trust_it),
    Attack(
        "half a hello", "descriptors", STRANGER, half_a_hello,
        set_option(HANDSHAKE_MS, LONG_MS),
    ),
    Attack(
        "many streams", "memory", INSIDER, open_many_streams,
        set_option("grpc.max_concurrent_streams", 1 << 20),
    ),
    Attack(
        "a small message that swells", "memory", INSIDER, send_much,
        set_option("grpc.max_receive_message_length", 1 << 30),
    ),
    Attack(
        "announce 100 MB", "memory", INSIDER, announce_much,
        set_option("grpc.max_receive_message_length", 1 << 30),
    ),
    Attack("many headers", "memory", INSIDER, send_many_headers, all_headers),
    Attack(
        "never join", "memory", INSIDER, never_join,
        lambda patch: patch.setattr(SETUP, "limits", Limits()),
    ),
    Attack(
        "many sessions of one host", "memory", INSIDER, hold_many_sessions,
        lambda patch: patch.setattr(SETUP, "limits", Limits()),
    ),
    Attack("a control character", "the log", CARELESS, shown(control_characters), read_carelessly),
    Attack("two identities", "an operator's rights", CARELESS, shown(two_identities), read_carelessly),
    Attack("two names", "an operator's rights", CARELESS, shown(two_names), read_carelessly),
    Attack("no identity", "the job", CARELESS, shown(no_identity), read_carelessly),
    Attack(
        "a malformed identity", "the job", CARELESS, shown(a_malformed_identity),
        lambda patch: patch.setattr(peer, "parse_uri", careless_uri),
    ),
    Attack(
        "a weak key", "the job", CARELESS, shown(a_weak_key),
        lambda patch: patch.setattr(peer, "check_strength", lambda *_: None),
    ),
    Attack("an expired certificate", "the job", "a former member", dated(-2 * DAY, -DAY), look_at_no_date),
    Attack("a certificate of tomorrow", "the job", INSIDER, dated(DAY, 2 * DAY), look_at_no_date),
    Attack("a revoked certificate", "the job", "a stolen key", show_a_revoked_one, look_at_no_list),
    Attack(
        "break the list", "the job", "a stolen key; writes the list's file", break_the_list, look_at_no_list
    ),
    Attack("stay in when revoked", "the job", "a stolen key", stay_in_when_revoked, expels_nobody),
)  # fmt: skip


@pytest.fixture
def _short_times(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps others waiting is not waited for as long as in the product; all others have its times."""
    if attack.succeeds is half_a_hello:
        monkeypatch.setitem(SETUP.options, HANDSHAKE_MS, SHORT_MS)
    if attack.succeeds in (never_join, hold_many_sessions):
        monkeypatch.setattr(SETUP, "limits", Limits(join_timeout_s=SHORT_MS / 1000, sessions_per_host=4))


@pytest.mark.usefixtures("_short_times")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
