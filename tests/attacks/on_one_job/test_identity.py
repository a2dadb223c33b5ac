"""Attacks by those who have a certificate of the job's authority, and want what it does not allow."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from muster.certs.pki.identity import Identity
from muster.scheduler import __version__
from muster.scheduler.serve.server import FOLLOW_INTERVAL_S
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.attacks.field import Field
from tests.attacks.on_one_job.test_transport import bare
from tests.certs.servers import server_credentials
from tests.scheduler.processes import PASSWORD, Pki, Stream, environment, error_of
from tests.scheduler.processes import join as plain_join


def join(node_id: str = "intruder-0", **changes: object) -> pb.WorkerMessage:
    """A Join that fits the job's settings."""
    return plain_join(node_id, **{"worker_num": 3, "facts": {"muster": __version__}, **changes})


def refusal(field: Field, name: str, message: pb.WorkerMessage) -> tuple[str, str]:
    """What the scheduler refuses a Join with: the code of the Refused message, and its sentence."""
    with field.channel(name) as over:
        stream = Stream(over)
        stream.put(message)
        refused = stream.next("refused").refused
        stream.end()
    return pb.RefusalCode.Name(refused.code).removeprefix("REFUSAL_CODE_"), refused.sentence


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("server", {}, "has the role scheduler, and this needs worker"),
        ("operator", {}, "has the role operator, and this needs worker"),
        ("other-job", {}, "is for the job 'other', not 'default'"),
        ("client", {"job_id": "other"}, "is for the job 'default', not 'other'"),
        ("client", {"job_id": "../../etc/cron.d/job"}, "not '../../etc/cron.d/job'"),
        ("node-7", {"node_id": "victim-0"}, "bound to the node 'node-7', not 'victim-0'"),
    ],
)
def test_joining_as_somebody_else_is_not_permitted(
    field: Field, name: str, changes: dict[str, object], words: str
) -> None:
    code, sentence = refusal(field, name, join(**{"node_id": "intruder-0", **changes}))  # type: ignore[arg-type]
    assert code == "NOT_PERMITTED"
    assert words in sentence


def test_the_node_id_of_a_live_worker_is_taken(field: Field) -> None:
    code, sentence = refusal(field, "client", join("victim-1", incarnation=4711))
    assert code == "NODE_ID_TAKEN"
    assert "victim-1" in sentence


def test_a_place_is_not_taken_up_again_by_who_guesses_its_incarnation(field: Field) -> None:
    claim = join("victim-0", incarnation=1, held_generation=1, held_rank=0, built=True)
    code, sentence = refusal(field, "client", claim)
    assert code == "SUPERSEDED"
    assert "victim-0" in sentence and "this process has no place in the job" in sentence


@pytest.mark.parametrize("name", ["client", "server", "node-7", "other-job", "other-operator"])
def test_only_an_operator_of_the_job_drains_and_admits(field: Field, name: str) -> None:
    with field.channel(name) as over:
        drain = pb_grpc.RendezvousStub(over).Drain
        request = pb.DrainRequest(job_id="default", node_id="victim-0", reason="go\nERROR forged")
        code, sentence = error_of(lambda: drain(request, timeout=30))
        assert code == "PERMISSION_DENIED"
        assert "operator" in sentence
        admit = pb_grpc.RendezvousStub(over).Admit
        code, sentence = error_of(lambda: admit(pb.AdmitRequest(job_id="default", name="h"), timeout=30))
        assert code == "PERMISSION_DENIED"
        assert "operator" in sentence


@pytest.mark.parametrize("name", ["server", "operator", "node-7", "host", "other-job", "other-host"])
def test_only_its_own_launcher_says_that_a_worker_has_ended(field: Field, name: str) -> None:
    with field.channel(name) as over:
        call = pb_grpc.RendezvousStub(over).ProcessEnded
        request = pb.ProcessEndedRequest(job_id="default", node_id="victim-0", detail="go\nERROR forged")
        code, sentence = error_of(lambda: call(request, timeout=30))
    assert code == "PERMISSION_DENIED"
    assert "default" in sentence or "victim-0" in sentence or "needs worker" in sentence


@pytest.mark.parametrize("name", ["other-job", "other-operator"])
def test_nobody_reads_another_job(field: Field, name: str) -> None:
    with field.channel(name) as over:
        status = pb_grpc.RendezvousStub(over).Status
        code, sentence = error_of(lambda: status(pb.StatusRequest(job_id="default"), timeout=30))
    assert code == "PERMISSION_DENIED"
    assert "for the job 'other', not 'default'" in sentence


def test_a_revoked_certificate_is_refused_everywhere(field: Field) -> None:
    with field.channel("revoked") as over:
        stub = pb_grpc.RendezvousStub(over)
        calls = [
            lambda: stub.Status(pb.StatusRequest(), timeout=30),
            lambda: stub.Drain(pb.DrainRequest(node_id="victim-0"), timeout=30),
            lambda: stub.ProcessEnded(pb.ProcessEndedRequest(node_id="victim-0"), timeout=30),
            lambda: list(stub.Session(iter([join()]), timeout=30)),
            lambda: bare(over.unary_unary("/grpc.health.v1.Health/Check"))(b"", timeout=30),
            lambda: list(bare(over.unary_stream("/grpc.health.v1.Health/Watch"))(b"", timeout=30)),
        ]
        for call in calls:
            code, sentence = error_of(call)
            assert code == "UNAUTHENTICATED"
            assert "was revoked" in sentence


def test_who_is_revoked_while_in_is_expelled_soon(field: Field) -> None:
    """Within two seconds, it is promised: a busy machine may need more for what comes after the look."""
    assert FOLLOW_INTERVAL_S <= 0.5
    with field.channel("unlucky") as over:
        stream = Stream(over)
        stream.put(join("spare-0", spare=True))
        assert stream.next("welcome").welcome.spare
        field.pki.authority.write_revocations([field.serial("unlucky")])
        refused = stream.next("refused").refused
        stream.end()
    assert refused.code == pb.REFUSAL_CODE_EXPELLED
    assert "was revoked" in refused.sentence
    assert ("expelled", "spare-0") in [(e["event"], e.get("node_id")) for e in field.audit()]


@pytest.mark.parametrize("kind", ["junk", "cut off", "of another authority", "out of date", "missing"])
def test_a_bad_revocation_list_lets_nobody_in_and_ends_nobody(field: Field, kind: str) -> None:
    import datetime

    path = field.pki.directory / "crl.pem"
    good = path.read_bytes()
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    if kind == "junk":
        path.write_bytes(b"junk")
    elif kind == "cut off":
        path.write_bytes(good[:-60])
    elif kind == "of another authority":
        from muster.certs.pki.authority import create_authority

        other = field.directory / "attacker" / "crl"
        create_authority(other, PASSWORD)
        path.write_bytes((other / "crl.pem").read_bytes())
    elif kind == "out of date":
        field.pki.authority.write_revocations(days=1, now=old)
    else:
        path.unlink()
    try:
        words = _await_code(field, "UNAUTHENTICATED")[1]
        assert "evocation list" in words or "crl" in words
    finally:
        if kind == "out of date":  # a newer list than the good one, which is not gone back to
            field.pki.authority.write_revocations()
        else:
            path.write_bytes(good)
    assert _await_code(field, "OK")[0] == "OK"


def test_an_older_list_does_not_let_the_revoked_in_again(field: Field) -> None:
    path = field.pki.directory / "crl.pem"
    field.pki.issue("late", Identity("default", "worker"))
    older = path.read_bytes()
    field.pki.authority.write_revocations([field.serial("late")])
    newer = path.read_bytes()
    assert "was revoked" in _await_code(field, "UNAUTHENTICATED", "late")[1]
    path.write_bytes(older)
    try:
        assert "the newer one stays in force" in field.running.await_log("older revocation list")
        with field.channel("late") as over:
            status = pb_grpc.RendezvousStub(over).Status
            code, words = error_of(lambda: status(pb.StatusRequest(), timeout=30))
        assert (code, "was revoked" in words) == ("UNAUTHENTICATED", True)
    finally:
        path.write_bytes(newer)


def _await_code(field: Field, wanted: str, name: str = "operator") -> tuple[str, str]:
    """Asks for status until it is answered so; the scheduler looks at its files twice a second."""
    until = time.monotonic() + 60
    with field.channel(name) as over:
        status = pb_grpc.RendezvousStub(over).Status
        while True:
            try:
                status(pb.StatusRequest(), timeout=30)
                code, words = "OK", ""
            except grpc.RpcError as error:
                code, words = error.code().name, error.details() or ""
            if code == wanted or time.monotonic() > until:
                return code, words
            time.sleep(0.02)


# ---------------------------------------------------------------- a false scheduler


class _Greedy(pb_grpc.RendezvousServicer):
    """Takes whatever a worker sends."""

    def __init__(self) -> None:
        self.got: list[pb.WorkerMessage] = []

    def Session(self, requests: Iterator[pb.WorkerMessage], _: object) -> Iterator[pb.SchedulerMessage]:
        for request in requests:
            self.got.append(request)
            yield pb.SchedulerMessage(refused=pb.Refused(sentence="caught"))


@contextlib.contextmanager
def false_scheduler(credentials: grpc.ServerCredentials | None) -> Iterator[tuple[int, _Greedy]]:
    with futures.ThreadPoolExecutor(4) as pool:
        greedy, server = _Greedy(), grpc.server(pool)
        pb_grpc.add_RendezvousServicer_to_server(greedy, server)
        where = "127.0.0.1:0"
        port = (
            server.add_insecure_port(where)
            if credentials is None
            else server.add_secure_port(where, credentials)
        )
        server.start()
        yield port, greedy
        server.stop(0).wait()


def start_worker(field: Field, port: int) -> subprocess.Popen[str]:
    """A worker of the job that is led astray."""
    env = environment(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM="3",
        MS_SCHED_PORT=str(port),
        MS_CONFIG_FILE=str(field.pki.config),
        MS_CLIENT_PASSWORD_FILE=str(field.directory / "password"),
    )
    command = [sys.executable, "-m", "tests.end_to_end.obedient_worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )


def test_workers_tell_nothing_to_a_false_scheduler(field: Field, tmp_path: Path) -> None:
    """Another worker, another job's scheduler, another authority's, a revoked one, or plaintext."""
    pki = field.pki
    pki.issue("other-scheduler", Identity("other", "scheduler"), ("127.0.0.1",))
    pki.issue("elsewhere", Identity("default", "scheduler"), ("10.9.9.9",))
    pki.issue("dismissed", Identity("default", "scheduler"), ("127.0.0.1",))
    pki.authority.write_revocations([field.serial("dismissed")])
    foreign = Pki.make(tmp_path / "foreign")
    cases = {
        "role worker": server_credentials(pki.credentials("client")),
        "for the job 'other'": server_credentials(pki.credentials("other-scheduler")),
        "for 10.9.9.9": server_credentials(pki.credentials("elsewhere")),
        "was revoked": server_credentials(pki.credentials("dismissed")),
        "not trusted": server_credentials(foreign.credentials("server")),
        "does not speak TLS": None,
    }
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(false_scheduler(each)) for each in cases.values()]
        workers = [start_worker(field, port) for port, _ in servers]
        answers = [worker.communicate(timeout=200)[0] for worker in workers]
    for words, answer, (_, greedy) in zip(cases, answers, servers, strict=True):
        assert answer.startswith("error SecurityError"), answer
        assert words in answer
        assert greedy.got == []


def test_every_refusal_is_in_the_audit_log_with_its_certificate(field: Field) -> None:
    entries = [json.loads(json.dumps(each)) for each in field.audit()]
    denied = [each for each in entries if each["event"] in ("denied", "refused")]
    denied = [each for each in denied if each.get("call") != "handshake"]  # gRPC shows no certificate then
    assert {"not_permitted", "unauthenticated"} <= {each["code"] for each in denied}
    assert all(each["peer"].startswith("127.0.0.1:") for each in denied)
    assert all("certificate" in each for each in denied if each["code"] == "not_permitted")
