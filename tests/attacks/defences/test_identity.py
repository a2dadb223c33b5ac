"""Attacks by who has a certificate of the authority, and wants what it does not allow; and false schedulers.

The same as those on one job, each with and without its defence.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from cryptography import x509

from muster.certs.errors import CertificateError
from muster.certs.pki.identity import Identity
from muster.certs.pki.revocation import Revocations
from muster.certs.runtime import preflight
from muster.certs.runtime.tls import client_ssl_context
from muster.scheduler.store import service
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from muster.wire.v1 import watch_pb2
from muster.worker.config import load_settings
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.streams import DeniedError
from tests.attacks.defences.attack import Attack, Try, Without, check
from tests.attacks.defences.service import SETUP, pki, served
from tests.attacks.defences.test_transport import look_at_no_list, revocations
from tests.attacks.on_one_job.test_hosts_stores_watchers import (
    END_JOB,
    HOST_STREAM,
    STORE,
    WATCH,
    batch,
    exchanged,
    opening,
    read_out,
    says,
)
from tests.attacks.on_one_job.test_identity import false_scheduler, join
from tests.attacks.on_one_job.test_transport import bare
from tests.certs.servers import grpc_server, server_credentials
from tests.scheduler.processes import PASSWORD, Pki, Stream, form
from tests.waiting import LIMIT_S

Ask = Callable[[grpc.Channel], bool]


def answered(call: Callable[[], object]) -> bool:
    """Whether a call is answered, and not refused because of who calls."""
    try:
        call()
    except grpc.RpcError as error:
        assert error.code().name == "PERMISSION_DENIED", error
        return False
    return True


# ---------------------------------------------------------------- what may be asked for


def drain(over: grpc.Channel) -> bool:
    request = pb.DrainRequest(job_id="default", node_id="victim-0", reason="go")
    return answered(lambda: pb_grpc.RendezvousStub(over).Drain(request, timeout=LIMIT_S))


def say_that_it_has_ended(over: grpc.Channel) -> bool:
    request = pb.ProcessEndedRequest(job_id="default", node_id="victim-0", incarnation=1000, detail="died")
    return answered(lambda: pb_grpc.RendezvousStub(over).ProcessEnded(request, timeout=LIMIT_S))


def read_the_status(over: grpc.Channel) -> bool:
    request = pb.StatusRequest(job_id="default")
    return answered(lambda: pb_grpc.RendezvousStub(over).Status(request, timeout=LIMIT_S))


def watch(over: grpc.Channel) -> bool:
    data = watch_pb2.WatchRequest(job_id="default").SerializeToString()
    call = bare(over.unary_stream(WATCH))(data, timeout=LIMIT_S)
    with cancelled(call):
        return answered(lambda: next(call))


@contextlib.contextmanager
def cancelled(call: Any) -> Iterator[None]:
    """Cancels a call at the context's end."""
    try:
        yield
    finally:
        call.cancel()


def end_the_job(over: grpc.Channel) -> bool:
    data = watch_pb2.EndJobRequest(job_id="default", reason="go").SerializeToString()
    return answered(lambda: bare(over.unary_unary(END_JOB))(data, timeout=LIMIT_S))


def see_the_jobs(over: grpc.Channel) -> bool:
    """All jobs of the scheduler, as an operator of another one."""
    call = bare(over.unary_stream(WATCH))(b"", timeout=LIMIT_S)
    with cancelled(call):
        return bool(watch_pb2.WatchReply.FromString(next(call)).overview.jobs)


def enter_as(node_id: str, **changes: object) -> Ask:
    """Joins under this name."""

    def ask(over: grpc.Channel) -> bool:
        stream = Stream(over)
        stream.put(join(node_id, **changes))
        kind = stream.next().WhichOneof("body")
        stream.call.cancel()
        stream.half_close()
        return bool(kind == "welcome")

    return ask


def enter_by_a_host_as(node_id: str, **changes: object) -> Ask:
    """Joins under this name on a host's stream."""

    def ask(over: grpc.Channel) -> bool:
        got, _, _ = exchanged(over, HOST_STREAM, [batch(says(1, join(node_id, **changes)))])
        return "welcome" in [each.WhichOneof("body") for each in read_out(got)[0]]

    return ask


def by(name: str, ask: Ask) -> Try:
    """Somebody with this certificate asks for it, beside a worker that is in."""

    def attack(_: Path) -> bool:
        with served() as here, here.channel("client") as inside, here.channel(name) as over:
            victim = Stream(inside)
            victim.put(join("victim-0"))
            victim.next("welcome")
            found = ask(over)
            victim.call.cancel()
            victim.half_close()
            return found

    return attack


def ask_nobody_who_he_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Identity, "may", lambda self, **what: None)


ASKED: dict[str, tuple[tuple[str, ...], Ask]] = {
    "drain": (("client", "server", "node-7", "other-job", "other-operator"), drain),
    "say that a worker has ended": (
        ("server", "operator", "node-7", "host", "other-job", "other-host"),
        say_that_it_has_ended,
    ),
    "read the status of another job": (("other-job", "other-operator"), read_the_status),
    "watch": (("client", "node-7", "host", "server", "other-job", "other-operator"), watch),
    "end the job": (("client", "node-7", "host", "server", "other-job", "other-operator"), end_the_job),
    "see other jobs": (("other-operator",), see_the_jobs),
    "join in another role": (("server", "operator"), enter_as("intruder-0")),
    "join another job": (("other-job",), enter_as("intruder-0")),
    "join as another node": (("node-7", "host"), enter_as("victim-1")),
    "join in another role by a host's stream": (("server", "operator"), enter_by_a_host_as("intruder-0")),
    "join another job by a host's stream": (("other-job", "other-host"), enter_by_a_host_as("victim-1")),
    "join as another node by a host's stream": (("node-7", "host"), enter_by_a_host_as("victim-1")),
}
ATTACKS = tuple(
    Attack(f"{what} as {name}", "the job", f"the certificate {name}", by(name, ask), ask_nobody_who_he_is)
    for what, (names, ask) in ASKED.items()
    for name in names
)


# ---------------------------------------------------------------- the store of a generation


def open_the_store(name: str, message: bytes) -> Try:
    """Opens the store of two members, which both have the certificate ``client``."""

    def attack(_: Path) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SETUP, "wanted", 2)
            with served() as here, here.channel("client") as inside, here.channel(name) as over:
                members = form(inside)
                got, _code, _sentence = exchanged(over, STORE, [message])
                for member in members:
                    member.call.cancel()
                    member.half_close()
                return bool(got)

    return attack


def let_anybody_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "check_member", lambda *_: None)


STORE_ATTACKS = (
    Attack(
        "open the store as a process of before", "what the members' programs say", "a former member",
        open_the_store("client", opening("node-0", incarnation=4711)), let_anybody_in,
    ),
    Attack(
        "open the store of a generation to come", "what the members' programs say", "a member",
        open_the_store("client", opening("node-0", 2)), let_anybody_in,
    ),
    Attack(
        "open the store without a session", "what the members' programs say", "a certificate of the job",
        open_the_store("client", opening("node-7", 0)), let_anybody_in,
    ),
)  # fmt: skip


# ---------------------------------------------------------------- false schedulers


def trusted(name: str) -> Try:
    """A false scheduler with this certificate: whether a worker would go on to it."""

    def attack(_: Path) -> bool:
        with grpc_server(server_credentials(false_keys().credentials(name))) as port:
            return goes_on(port, revocations())

    return attack


def of_another_authority(folder: Path) -> bool:
    """A false scheduler that takes whatever certificate a worker shows."""
    shown = Pki.make(folder / "foreign").credentials("server")
    tls = grpc.ssl_server_credentials([(shown.key_pem, shown.cert_chain_pem)])
    with grpc_server(tls) as port:
        return goes_on(port)


def goes_on(port: int, lists: Revocations | None = None) -> bool:
    mine = replace(pki().credentials("client"), revocations=lists)
    try:
        preflight.preflight("127.0.0.1", port, mine, job="default", timeout_s=LIMIT_S)
    except CertificateError:
        return False
    return True


@functools.cache
def false_keys() -> Pki:
    """The keys of the job, with those that its authority should not have given to a scheduler."""
    keys = pki()
    keys.issue("other-scheduler", Identity("other", "scheduler"), ("127.0.0.1",))
    keys.issue("elsewhere", Identity("default", "scheduler"), ("10.9.9.9",))
    keys.issue("local-worker", Identity("default", "worker"), ("127.0.0.1",))
    keys.issue("dismissed", Identity("default", "scheduler"), ("127.0.0.1",))
    dismissed = x509.load_pem_x509_certificate(keys.credentials("dismissed").leaf_pem)
    keys.authority.write_revocations([dismissed.serial_number])
    return keys


def serve_plaintext(_: Path) -> bool:
    """A false scheduler that has no certificate at all is told who comes."""
    env = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", **CERTIFICATES.found()}
    with false_scheduler(None) as (port, greedy):
        settings = load_settings({**env, "MS_SCHED_PORT": str(port)})
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        outbox.put(join().SerializeToString())
        try:
            messages, close = grpc_dial(settings, load_keyring(settings, env))(outbox)
        except DeniedError:
            return False
        next(iter(messages))
        close()
        return bool(greedy.got)


class Certificates:
    """The variables of a worker that has certificates."""

    there = True

    def found(self) -> dict[str, str]:
        if not self.there:
            return {}
        return {"MS_CONFIG_FILE": str(pki().config), "MS_CLIENT_PASSWORD": PASSWORD.decode()}


CERTIFICATES = Certificates()


def without_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CERTIFICATES, "there", False)


def trust_everybody(patch: pytest.MonkeyPatch) -> None:
    def careless(credentials: object) -> ssl.SSLContext:
        made = client_ssl_context(credentials)  # type: ignore[arg-type]
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        return made

    patch.setattr(preflight, "client_ssl_context", careless)


def take_any_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preflight, "fits_host", lambda host, peer: True)


PLACE = "answers where the scheduler should"
FALSE_SCHEDULERS: tuple[tuple[str, Try, Without], ...] = (
    ("a worker's certificate", trusted("local-worker"), ask_nobody_who_he_is),
    ("another job's scheduler", trusted("other-scheduler"), ask_nobody_who_he_is),
    ("a scheduler's of elsewhere", trusted("elsewhere"), take_any_name),
    ("a revoked certificate", trusted("dismissed"), look_at_no_list),
    ("another authority's", of_another_authority, trust_everybody),
    ("no certificate", serve_plaintext, without_its_own),
)
FALSE_ATTACKS = tuple(
    Attack(f"a false scheduler with {what}", "what workers say", PLACE, attack, without)
    for what, attack, without in FALSE_SCHEDULERS
)


@pytest.mark.parametrize("attack", (*ATTACKS, *STORE_ATTACKS, *FALSE_ATTACKS), ids=lambda attack: attack.name)
def test_its_defence_and_nothing_else_stops_it(attack: Attack, tmp_path: Path) -> None:
    check(attack, tmp_path)
