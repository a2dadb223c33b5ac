"""Who gets in on a real port with mutual TLS, and revocation and rotation while streams live."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.certs.pki.identity import Identity
from muster.wire.v1 import host_pb2 as host
from muster.wire.v1 import host_pb2_grpc as host_grpc
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.certs.making import KEY, certificate, key_pem, pem
from tests.scheduler.processes import (
    PASSWORD,
    Pki,
    Scheduler,
    Stream,
    channel,
    environment,
    error_of,
    form,
    join,
    run_scheduler,
    scheduler,
)


@pytest.fixture(scope="module")
def running(pki: Pki) -> Iterator[Scheduler]:
    with scheduler("--serve", **pki.env(), MS_WORKER_NUM="", MS_NODE_TIMEOUT="600") as process:
        yield process


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("server", {}, "role scheduler"),
        ("operator", {}, "role operator"),
        ("other-job", {}, "is for the job 'other', not 'default'"),
        ("node-7", {"node_id": "node-8"}, "bound to the node 'node-7', not 'node-8'"),
        ("client", {"job_id": "other"}, "is for the job 'default', not 'other'"),
    ],
)
def test_role_job_and_node_come_from_the_certificate(
    running: Scheduler, pki: Pki, name: str, changes: dict[str, object], words: str
) -> None:
    with channel(running.target, pki.credentials(name)) as over:
        stream = Stream(over)
        stream.put(join(str(changes.get("node_id", "node-0")), job_id=changes.get("job_id", "default")))
        refused = stream.next("refused").refused
        assert refused.code == pb.REFUSAL_CODE_NOT_PERMITTED
        assert words in refused.sentence
        error = stream.end()
    assert error is not None
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "certificate=" in running.await_log("denied code=not_permitted call=Session")


def test_a_node_certificate_takes_its_own_place(running: Scheduler, pki: Pki) -> None:
    with channel(running.target, pki.credentials("node-7")) as over:
        stream = Stream(over)
        stream.put(join("node-7"))
        stream.next("welcome")
        stream.call.cancel()


def test_strangers_fail_in_the_handshake(running: Scheduler, pki: Pki, foreign: Pki) -> None:
    own = foreign.credentials("client")
    tls = grpc.ssl_channel_credentials(
        (pki.directory / "ca.crt").read_bytes(), own.key_pem, own.cert_chain_pem
    )
    bare = grpc.ssl_channel_credentials((pki.directory / "ca.crt").read_bytes())
    for credentials in (tls, bare):
        with grpc.secure_channel(running.target, credentials) as over:
            status = pb_grpc.RendezvousStub(over).Status
            assert error_of(lambda status=status: status(pb.StatusRequest()))[0] == "UNAVAILABLE"  # type: ignore[misc]
    with channel(running.target) as over:
        plain = pb_grpc.RendezvousStub(over).Status
        assert error_of(lambda: plain(pb.StatusRequest()))[0] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("name", "job", "code"),
    [
        ("client", "default", "OK"),
        ("server", "default", "OK"),
        ("operator", "default", "OK"),
        ("any-job", "default", "OK"),
        ("other-job", "default", "PERMISSION_DENIED"),
        ("operator", "other", "PERMISSION_DENIED"),
        ("client", "a\nb", "INVALID_ARGUMENT"),
    ],
)
def test_who_may_ask_for_status(running: Scheduler, pki: Pki, name: str, job: str, code: str) -> None:
    with channel(running.target, pki.credentials("client")) as over:
        stream = Stream(over)
        stream.put(join())
        stream.next("welcome")
        with channel(running.target, pki.credentials(name)) as asking:
            status = pb_grpc.RendezvousStub(asking).Status
            request = pb.StatusRequest(job_id=job)
            if code == "OK":
                assert status(request).job_id == job
            else:
                assert error_of(lambda: status(request))[0] == code
        stream.call.cancel()


@pytest.mark.parametrize("name", ["client", "server", "any-job"])
def test_only_an_operator_drains(running: Scheduler, pki: Pki, name: str) -> None:
    with channel(running.target, pki.credentials(name)) as over:
        drain = pb_grpc.RendezvousStub(over).Drain
        code, words = error_of(lambda: drain(pb.DrainRequest(job_id="default", node_id="node-0")))
    assert code == "PERMISSION_DENIED"
    assert "operator" in words


@pytest.mark.parametrize(
    ("name", "changes", "code", "words"),
    [
        ("node-7", {"node_id": "node-0"}, "PERMISSION_DENIED", "bound to the node 'node-7', not 'node-0'"),
        ("host", {"node_id": "node-0"}, "PERMISSION_DENIED", "not 'node-0'"),
        ("other-job", {"node_id": "node-0"}, "PERMISSION_DENIED", "for the job 'other', not 'default'"),
        ("server", {"node_id": "node-0"}, "PERMISSION_DENIED", "role scheduler"),
        ("operator", {"node_id": "node-0"}, "PERMISSION_DENIED", "role operator"),
        ("client", {"node_id": "node-0", "job_id": "other"}, "PERMISSION_DENIED", "not 'other'"),
        ("client", {}, "INVALID_ARGUMENT", "node_id"),
    ],
)
def test_a_launcher_speaks_only_for_the_nodes_of_its_certificate(
    running: Scheduler, pki: Pki, name: str, changes: dict[str, object], code: str, words: str
) -> None:
    request = pb.ProcessEndedRequest(**{"job_id": "default", "incarnation": 1000, **changes})  # type: ignore[arg-type]
    with channel(running.target, pki.credentials(name)) as over:
        refused = error_of(lambda: pb_grpc.RendezvousStub(over).ProcessEnded(request))
    assert refused[0] == code
    assert words in refused[1]


def test_a_launchers_word_counts_once_that_very_process_is_away(running: Scheduler, pki: Pki) -> None:
    def is_gone(over: grpc.Channel, incarnation: int) -> bool:
        word = pb.ProcessEndedRequest(job_id="default", node_id="node-7", incarnation=incarnation)
        reply: pb.ProcessEndedReply = pb_grpc.RendezvousStub(over).ProcessEnded(word)
        return reply.gone

    with (
        channel(running.target, pki.credentials("node-7")) as own,
        channel(running.target, pki.credentials("host")) as over,
    ):
        hosts = host_grpc.HostStreamStub(own).Open(
            iter([host.FromHost(items=[_from_worker(join("node-7", incarnation=5))])])
        )
        assert next(iter(hosts)).items
        running.await_log("lost job_id=default")  # its host's stream has ended, which says nothing of it
        assert is_gone(over, 4)
        assert is_gone(over, 5)
        running.await_log("cpu:7 is lost: its launcher says that it has ended.")
        whose = running.await_log("lost code=by_launcher job_id=default node_id=node-7")
        assert "identity=muster://default/host/node-7/node-8" in whose


def _from_worker(message: pb.WorkerMessage) -> host.FromWorker:
    return host.FromWorker(worker=1, message=message.SerializeToString())


def test_the_commands_find_their_certificates(running: Scheduler, pki: Pki) -> None:
    with channel(running.target, pki.credentials("client")) as over:
        stream = Stream(over)
        stream.put(join("node-3", worker_num=2))
        stream.next("welcome")
        shown = running.command("status", "--json")
        assert shown.returncode == 0, shown.stderr
        assert "node-3" in [worker["node_id"] for worker in json.loads(shown.stdout)["workers"]]
        done = running.command("drain", "node-3")
        assert done.returncode == 0, done.stderr
        for command in (("drain", "node-3"), ("admit", "host")):
            refused = running.command(*command, "--cert", str(pki.directory / "client.p12"))
            assert refused.returncode == 1
            assert "needs operator" in refused.stderr
        unknown = running.command("admit", "host")
        assert unknown.returncode == 1 and "no GPU is refused" in unknown.stderr
        stream.end()


def test_tls_trouble_reaches_the_operator_in_words(running: Scheduler, foreign: Pki) -> None:
    port = str(running.port)
    done = run_scheduler("status", env=environment(**foreign.env(), MS_SCHED_PORT=port))
    assert done.returncode == 1
    assert "not trusted here" in done.stderr
    done = run_scheduler("status", env=environment(MS_SCHED_PORT=port))
    assert done.returncode == 1
    assert f"127.0.0.1:{port} speaks TLS" in done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_cert_path": "client.p12"}, "scheduler"),
        ({"server_cert_path": "missing.p12"}, "missing.p12"),
        ({"crl_path": "missing.pem"}, "missing.pem"),
        ({"cipher_list": "NULL-MD5"}, "cipher"),
        ({"typo": 1}, "typo"),
    ],
)
def test_a_scheduler_that_could_only_be_refused_does_not_start(
    own_pki: Pki, changes: dict[str, object], words: str
) -> None:
    own_pki.write_config(**changes)
    done = run_scheduler("--port", "0", env=environment(**own_pki.env(), MS_WORKER_NUM="2"))
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert done.stderr.startswith("scheduler: ")
    assert "Traceback" not in done.stderr


def test_what_weakens_the_scheduler_is_said_at_its_start(own_pki: Pki) -> None:
    own_pki.write_config(require_identity=False, cipher_list="ECDHE-ECDSA-AES128-GCM-SHA256:OLD-ONE")
    with scheduler(**own_pki.env()) as running:
        assert "WARNING" in running.await_log("require_identity is false")
        assert "WARNING" in running.await_log("no certificate can be revoked")
        assert "'OLD-ONE'" in running.await_log("cipher_list")


def test_a_certificate_that_ends_soon_is_told_while_the_scheduler_runs(own_pki: Pki) -> None:
    with scheduler(**own_pki.env()) as running:
        running.await_log("certificate muster://default/scheduler")
        soon = own_pki.authority.issue(Identity("default", "scheduler"), ("127.0.0.1",), days=5)
        replacement = own_pki.directory / "staged.p12"
        replacement.write_bytes(soon.p12(PASSWORD))
        replacement.replace(own_pki.directory / "server.p12")
        end = own_pki.credentials("server").not_after
        assert "WARNING" in running.await_log(f"{end:%Y-%m-%d}")


def test_a_wrong_password_is_one_sentence_and_not_shown(own_pki: Pki) -> None:
    env = own_pki.env() | {"MS_SERVER_PASSWORD": "WRONG-ONE"}
    done = run_scheduler("--port", "0", env=environment(**env, MS_WORKER_NUM="2"))
    assert done.returncode == 1
    assert "does not open with this password" in done.stderr
    assert "WRONG-ONE" not in done.stderr


# ---------------------------------------------------------------- revocation and rotation


def serial(pki: Pki, name: str) -> int:
    return x509.load_pem_x509_certificate(pki.credentials(name).leaf_pem).serial_number


def test_a_revoked_worker_is_expelled_and_stays_out(own_pki: Pki, tmp_path: Path) -> None:
    own_pki.issue("bad", Identity("default", "worker"))
    own_pki.authority.write_revocations()
    own_pki.write_config(crl_path="crl.pem")
    audit = tmp_path / "audit.jsonl"
    env = own_pki.env() | {"MS_AUDIT_LOG": str(audit), "MS_NODE_TIMEOUT": "600"}
    good, bad = own_pki.credentials("client"), own_pki.credentials("bad")
    with (
        scheduler(**env) as running,
        channel(running.target, good) as over,
        channel(running.target, bad) as bad_over,
    ):
        stays, goes, silent = Stream(over), Stream(bad_over), Stream(bad_over)
        stays.put(join("node-0", worker_num=2))
        stays.next("welcome")
        goes.put(join("node-1", worker_num=2))
        goes.next("assignment")
        own_pki.authority.write_revocations([serial(own_pki, "bad")])
        refused = goes.next("refused").refused
        assert refused.code == pb.REFUSAL_CODE_EXPELLED
        assert "was revoked" in refused.sentence
        error = silent.end()  # had sent no Join yet
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        again = Stream(bad_over)  # on the connection that was good before
        again.put(join("node-1"))
        code, words = error_of(lambda: again.next("welcome"))
        assert (code, "was revoked" in words) == ("UNAUTHENTICATED", True)
        health: Any = health_pb2_grpc.HealthStub(bad_over)
        for call in (health.Check, lambda request: next(health.Watch(request))):
            assert error_of(lambda call=call: call(health_pb2.HealthCheckRequest()))[0] == "UNAUTHENTICATED"  # type: ignore[misc]
        assert "node-1" in str(stays.next("suspended"))
        assert running.process.poll() is None
        for stream in (stays, goes):
            stream.call.cancel()
    assert ".." not in running.log
    expelled = [json.loads(line) for line in audit.read_text().splitlines()]
    assert ("expelled", "node-1", bad.fingerprint) in [
        (event["event"], event.get("node_id"), event.get("certificate")) for event in expelled
    ]


def test_an_unreadable_list_keeps_newcomers_out_and_leaves_members_alone(own_pki: Pki) -> None:
    own_pki.authority.write_revocations()
    own_pki.write_config(crl_path="crl.pem")
    with (
        scheduler(**own_pki.env(), MS_NODE_TIMEOUT="600") as running,
        channel(running.target, own_pki.credentials("client")) as over,
    ):
        streams = form(over)
        (own_pki.directory / "crl.pem").write_text("junk")
        running.await_log("ERROR")
        status = pb_grpc.RendezvousStub(over).Status
        code, words = error_of(lambda: status(pb.StatusRequest()))
        assert code == "UNAUTHENTICATED"
        assert "crl.pem" in words
        (own_pki.directory / "crl.pem").unlink()
        own_pki.authority.write_revocations()
        running.await_log("new revocation lists are in force")
        assert status(pb.StatusRequest()).state == "running"
        for stream in streams:
            stream.call.cancel()


def test_a_renewed_certificate_serves_new_connections_and_drops_no_stream(own_pki: Pki) -> None:
    old = own_pki.credentials("server")
    with (
        scheduler(**own_pki.env(), MS_NODE_TIMEOUT="600") as running,
        channel(running.target, own_pki.credentials("client")) as over,
    ):
        streams = form(over)
        staged = own_pki.issue("staged", Identity("default", "scheduler"), ("127.0.0.1",))
        staged.replace(own_pki.directory / "server.p12")
        new = own_pki.credentials("server")
        assert new.fingerprint != old.fingerprint
        assert new.fingerprint in running.await_log("new certificate muster://default/scheduler")
        with channel(running.target, pinned(own_pki, new.leaf_pem)) as fresh:
            assert pb_grpc.RendezvousStub(fresh).Status(pb.StatusRequest()).state == "running"
        for stream in streams:
            stream.put(pb.WorkerMessage(heartbeat=pb.Heartbeat(generation=1, step=1)))
        bad = own_pki.issue("bad", Identity("default", "worker"))
        bad.replace(own_pki.directory / "server.p12")
        running.await_log("role")
        with channel(running.target, pinned(own_pki, new.leaf_pem)) as fresh:
            assert pb_grpc.RendezvousStub(fresh).Status(pb.StatusRequest()).state == "running"
        running.signal(signal.SIGTERM)
        for stream in streams:
            error = stream.end()
            assert error is not None
            assert error.details() == "The scheduler is stopping."


def test_only_a_certificate_that_peers_would_take_is_put_in_force(own_pki: Pki) -> None:
    own_pki.authority.write_revocations()
    own_pki.write_config(crl_path="crl.pem")
    first = own_pki.credentials("server")
    with (
        scheduler("--serve", **own_pki.env(), MS_WORKER_NUM="") as running,
        channel(running.target, pinned(own_pki, first.leaf_pem)) as over,
    ):
        own_pki.issue("revoked", Identity("default", "scheduler"), ("127.0.0.1",))
        own_pki.authority.write_revocations([serial(own_pki, "revoked")])
        running.await_log("new revocation lists are in force")
        (own_pki.directory / "revoked.p12").replace(own_pki.directory / "server.p12")
        assert "the old ones stay in force" in running.await_log("was revoked by")
        own_pki.issue("bad", Identity("default", "worker")).replace(own_pki.directory / "server.p12")
        assert "the old ones stay in force" in running.await_log("has the role worker")
        # A client that knows only the first one is still served, and health answers on a new connection.
        health: Any = health_pb2_grpc.HealthStub(over)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        own_pki.issue("good", Identity("default", "scheduler"), ("127.0.0.1",))
        good = own_pki.credentials("good")
        (own_pki.directory / "good.p12").replace(own_pki.directory / "server.p12")
        assert good.fingerprint in running.await_log("new certificate muster://")
        assert running.log.count("new certificate muster://") == 1


def test_a_changed_configuration_is_obeyed_or_refused_in_words(own_pki: Pki) -> None:
    own_pki.write_config(require_identity=False)
    leaf = certificate(own_pki.authority, uris=(), key=KEY)
    nobody = pinned(own_pki, own_pki.credentials("server").leaf_pem)
    nobody = dataclasses.replace(nobody, key_pem=key_pem(KEY), cert_chain_pem=pem(leaf), leaf_pem=pem(leaf))
    with (
        scheduler("--serve", **own_pki.env(), MS_WORKER_NUM="") as running,
        channel(running.target, nobody) as over,
    ):
        health: Any = health_pb2_grpc.HealthStub(over)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        own_pki.write_config(require_identity=False, typo=1)
        assert "the old one stays in force" in running.await_log("ERROR")
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        own_pki.write_config(cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384")
        running.await_log("require_identity is now true")
        assert "WARNING" in running.await_log("cipher_list has changed")
        code, words = error_of(lambda: health.Check(health_pb2.HealthCheckRequest()))
        assert (code, "names no job and role" in words) == ("UNAUTHENTICATED", True)


def pinned(pki: Pki, leaf_pem: bytes) -> Any:
    """Credentials that accept exactly one server certificate."""
    return dataclasses.replace(pki.credentials("client"), ca_pem=leaf_pem)
