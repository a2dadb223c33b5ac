"""Attacks on streams of hosts, stores of torch programs, watchers and metrics, beside the job."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from muster.wire.v1 import host_pb2, store_pb2, watch_pb2
from muster.wire.v1 import rendezvous_pb2 as pb
from tests.attacks.field import Field
from tests.attacks.on_one_job.test_identity import join
from tests.attacks.on_one_job.test_transport import answer_to, bare
from tests.scheduler.processes import Stream, error_of
from tests.waiting import LIMIT_S, wait_for

HOST_STREAM = "/rendezvous.v1.HostStream/Open"
STORE = "/rendezvous.v1.Store/Open"
WATCH, END_JOB = "/rendezvous.v1.Watching/Watch", "/rendezvous.v1.Watching/EndJob"
HELD = 200
GET, SET, WAIT = store_pb2.STORE_KIND_GET, store_pb2.STORE_KIND_SET, store_pb2.STORE_KIND_WAIT


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left(field: Field) -> Iterator[None]:
    """After all of it the job goes on, and the scheduler has no more descriptors and threads."""
    process = Path(f"/proc/{field.running.process.pid}")
    files, threads = (len(list((process / kind).iterdir())) for kind in ("fd", "task"))
    yield
    step_on(field)
    wait_for(lambda: len(list((process / "task").iterdir())) <= threads + 16)
    wait_for(lambda: len(list((process / "fd").iterdir())) <= files + 64)


def step_on(field: Field, steps: int = 1) -> None:
    """Waits until the job has done so many more."""
    before = field.steps()
    wait_for(lambda: field.steps() >= before + steps)


def exchanged(over: grpc.Channel, path: str, messages: Iterable[bytes]) -> tuple[list[bytes], str, str]:
    """Sends messages on a stream; returns what came, and code and sentence of its end."""
    got: list[bytes] = []
    call = bare(over.stream_stream(path))(iter(messages), timeout=LIMIT_S)
    try:
        for data in call:
            got.append(data)
    except grpc.RpcError as error:
        return got, error.code().name, error.details() or ""
    return got, "OK", ""


def says(number: int, message: pb.WorkerMessage | bytes) -> host_pb2.FromWorker:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return host_pb2.FromWorker(worker=number, message=data)


def batch(*items: host_pb2.FromWorker) -> bytes:
    return host_pb2.FromHost(items=items).SerializeToString()


def read_out(got: list[bytes]) -> tuple[list[pb.SchedulerMessage], list[tuple[int, int, str]]]:
    """What came on a host's stream: messages; of conversations that are over number, code, sentence."""
    messages, closed = [], []
    for data in got:
        for item in host_pb2.ToHost.FromString(data).items:
            if item.HasField("closed"):
                closed += [(each, item.closed.code, item.closed.detail) for each in item.workers]
            else:
                messages.append(pb.SchedulerMessage.FromString(item.message + b"".join(item.own[:1])))
    return messages, closed


# ---------------------------------------------------------------- streams of hosts


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("server", {}, "has the role scheduler, and this needs worker"),
        ("operator", {}, "has the role operator, and this needs worker"),
        ("other-job", {}, "is for the job 'other', not 'default'"),
        ("other-host", {"node_id": "victim-0"}, "is for the job 'other', not 'default'"),
        ("host", {"node_id": "victim-0"}, "bound to the nodes 'node-7', 'node-8', not 'victim-0'"),
        ("host", {"node_id": "node-7", "job_id": "other"}, "is for the job 'default', not 'other'"),
        ("node-7", {"node_id": "victim-0"}, "bound to the node 'node-7', not 'victim-0'"),
    ],
)
def test_a_hosts_stream_lets_nobody_in_whom_a_stream_of_its_own_would_not(
    field: Field, name: str, changes: dict[str, object], words: str
) -> None:
    """By a certificate of another role, job, host or node. Taken away: the question in ``Sessions.join``."""
    with field.channel(name) as over:
        got, code, _ = exchanged(over, HOST_STREAM, [batch(says(1, join(**changes)))])  # type: ignore[arg-type]
    messages, closed = read_out(got)
    assert code == "OK"
    assert [(number, status) for number, status, _ in closed] == [
        (1, grpc.StatusCode.PERMISSION_DENIED.value[0])
    ]
    assert words in closed[0][2]
    assert [each.WhichOneof("body") for each in messages] == ["refused"]


def test_a_revoked_host_opens_nothing(field: Field) -> None:
    with field.channel("revoked") as over:
        assert exchanged(over, HOST_STREAM, [batch(says(1, join("node-7")))])[1] == "UNAUTHENTICATED"


def test_a_host_speaks_for_no_worker_but_those_that_it_brought(field: Field) -> None:
    """Numbers of others, from before and of nobody; goodbyes, losses and unique ids in the victims' names.

    Taken away, in machine and ledger: that only members complete a training. Then nobody is let in any more.
    """
    ids = pb.WorkerMessage(publish_unique_ids=pb.PublishUniqueIds(generation=1, unique_ids=[b"I" * 128]))
    leave = pb.WorkerMessage(leave=pb.Leave(generation=1, finished=True))
    gone = [host_pb2.FromWorker(worker=number, gone=host_pb2.Gone(detail="x\n")) for number in (2, 1, 0)]
    with field.channel("host") as over:
        _, code, _ = exchanged(
            over,
            HOST_STREAM,
            [
                batch(says(1, join("node-7", spare=True)), says(1, ids), says(1, leave)),
                batch(*gone, says(2**32 - 1, leave), says(5, join("node-8", spare=True)), says(0, leave)),
                batch(host_pb2.FromWorker(worker=9), host_pb2.FromWorker()),
            ],
        )
    assert code == "OK"
    assert field.status().generation == 1
    with inside(field, "spare-9"):
        pass


GIANT_MAP = join("node-7", facts={f"{number:06}": "x" * 10 for number in range(30_000)})
NO_JOIN = batch(says(1, pb.WorkerMessage(heartbeat=pb.Heartbeat(step=1))))
BROKEN: dict[str, tuple[list[bytes], str, str]] = {
    "random bytes": ([b"\xff" * 50], "INVALID_ARGUMENT", ""),
    "too many items": ([batch(*[host_pb2.FromWorker()] * 5000)], "INVALID_ARGUMENT", ""),
    "too long": ([b"\x0a" + b"\xff" * (2 << 20)], "RESOURCE_EXHAUSTED", ""),
    "nothing, for ever": ([batch()] * 3000, "OK", ""),
    "no Join": ([NO_JOIN], "OK", "must be Join"),
    "a giant map": ([batch(says(1, GIANT_MAP))], "OK", "number of facts"),
    "a message of bytes": ([batch(says(1, b"\xff" * 100_000))], "OK", "not a WorkerMessage"),
    "a Join twice": ([batch(*[says(1, join("node-7", spare=True))] * 2)], "OK", "takes one Join only"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_batch_ends_its_own_conversations_alone(field: Field, what: str) -> None:
    messages, code, words = BROKEN[what]
    with field.channel("host") as over:
        got, ended, _ = exchanged(over, HOST_STREAM, messages)
        assert ended == code
        refused = [each.refused.sentence for each in read_out(got)[0] if each.HasField("refused")]
        assert all(each.isprintable() and len(each) < 1000 for each in refused)
        assert [words in each for each in refused] == ([True] if words else [])


def test_a_thousand_refused_workers_of_one_host_cost_one_stream(field: Field) -> None:
    with field.channel("host") as over:
        items = [says(number, join("node-7", worker_num=2)) for number in range(1, 1001)]
        got, code, _ = exchanged(over, HOST_STREAM, [batch(*items)])
    assert code == "OK"
    assert len(read_out(got)[1]) == 1000


# ---------------------------------------------------------------- stores


def opening(node_id: str, generation: int = 1, *, incarnation: int = 1000, job_id: str = "default") -> bytes:
    said = store_pb2.StoreOpen(job_id=job_id, node_id=node_id, incarnation=incarnation, generation=generation)
    return store_pb2.StoreRequest(open=said).SerializeToString()


@pytest.mark.parametrize(
    ("name", "message", "code", "words"),
    [
        ("operator", opening("victim-0"), "PERMISSION_DENIED", "the role operator"),
        ("server", opening("victim-0"), "PERMISSION_DENIED", "the role scheduler"),
        ("other-job", opening("victim-0"), "PERMISSION_DENIED", "for the job 'other'"),
        ("other-job", opening("victim-0", job_id="other"), "NOT_FOUND", ""),
        ("node-7", opening("victim-0"), "PERMISSION_DENIED", "bound to the node 'node-7'"),
        ("host", opening("victim-0"), "PERMISSION_DENIED", "bound to the nodes 'node-7', 'node-8'"),
        ("revoked", opening("victim-0"), "UNAUTHENTICATED", "was revoked"),
        ("client", opening("victim-0"), "PERMISSION_DENIED", "no member"),  # of another incarnation
        ("client", opening("victim-0", 2), "PERMISSION_DENIED", "no member"),
        ("client", opening("victim-0", 2**63 - 1), "PERMISSION_DENIED", "no member"),
        ("client", opening("victim-0", 2**63), "INVALID_ARGUMENT", "generation"),
        ("client", opening("victim-0", 0), "UNAVAILABLE", "session"),  # it has none
        ("client", opening("../../etc/passwd", 0), "UNAVAILABLE", "session"),
        ("client", opening("x\n2026 INFO forged", 0), "INVALID_ARGUMENT", "node_id"),
        ("client", opening("victim-0", job_id="x\x1b[2J"), "INVALID_ARGUMENT", "job_id"),
        ("client", opening("victim-0", incarnation=0), "INVALID_ARGUMENT", "incarnation"),
        ("client", b"", "INVALID_ARGUMENT", "must carry open"),
        ("client", b"\xff" * 100, "INVALID_ARGUMENT", "not a StoreRequest"),
    ],
)
def test_the_store_is_for_members_of_the_generation_alone(
    field: Field, name: str, message: bytes, code: str, words: str
) -> None:
    with field.channel(name) as over:
        got, ended, sentence = exchanged(over, STORE, [message])
    assert (got, ended) == ([], code)
    assert sentence.isprintable() and len(sentence) < 1000
    assert words in sentence


@contextlib.contextmanager
def inside(field: Field, node_id: str) -> Iterator[grpc.Channel]:
    """An insider: a spare of the job, who may open the namespace of the agents."""
    with field.channel("client") as over:
        stream = Stream(over)
        stream.put(join(node_id, spare=True))
        stream.next("welcome")
        yield over
        stream.call.cancel()
        stream.half_close()


def asks(*operations: Any, **fields: Any) -> bytes:
    return store_pb2.StoreRequest(operations=operations, **fields).SerializeToString()


def operation(
    number: int, kind: Any, keys: Iterable[bytes] = (), values: Iterable[bytes] = (), **more: Any
) -> Any:
    return store_pb2.StoreOperation(id=number, kind=kind, keys=list(keys), values=list(values), **more)


LOOKS = [operation(number, store_pb2.STORE_KIND_LIST_KEYS) for number in range(1, 60_001)]
WAITS = [operation(number, WAIT, [b"%d" % key for key in range(8)]) for number in range(1, 4097)]
CHANGES = [operation(number, store_pb2.STORE_KIND_ADD, [b"n"], amount=1) for number in range(1, 9001)]
REPLAY = store_pb2.StoreReplay(last=True, count=2**63, seen=2**63)
GREED: dict[str, tuple[list[bytes], str]] = {
    "60,000 looks at all keys in one message": ([asks(*LOOKS)], "OK"),
    "waits, and cancels them all": (
        [asks(*WAITS), asks(cancelled=range(1, 4097)), asks(cancelled=range(200_000))],
        "OK",
    ),
    "answers never confirmed": ([asks(*CHANGES)], "RESOURCE_EXHAUSTED"),
    "all values, many times": (
        [
            asks(operation(1, SET, [b"big"], [bytes(700_000)])),
            asks(operation(2, store_pb2.STORE_KIND_MULTI_GET, [b"big"] * 60_000)),
        ],
        "DEADLINE_EXCEEDED",
    ),
    "a replay that nobody asked for": ([asks(replay=REPLAY)], "OK"),
    "an operation of no kind": ([asks(operation(1, 99))], "INVALID_ARGUMENT"),
    "an id beyond all": ([asks(operation(2**63, GET, [b"k"]))], "INVALID_ARGUMENT"),
    "a second opening": ([opening("spare-7", 0, incarnation=1007)], "OK"),
    "bytes": ([b"\xff" * 1000], "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("what", GREED)
def test_an_insiders_greed_in_the_store_ends_at_its_bounds(field: Field, what: str) -> None:
    """Looks and cancels once kept the event loop for as long as they took: see the store's own tests."""
    messages, code = GREED[what]
    index = 10 + list(GREED).index(what)
    node_id, begin = f"spare-{index}", opening(f"spare-{index}", 0, incarnation=1000 + index)
    with inside(field, node_id) as over:
        _, ended, sentence = exchanged(over, STORE, [begin, *messages])
        step_on(field)
    assert ended == code
    assert sentence.isprintable()


TOO_MUCH = {
    "one wait too many": (asks(*WAITS, operation(4097, WAIT, [b"k"])), "may wait for 4096 things"),
    "a value that is too large": (
        asks(operation(4097, SET, [b"k"], [bytes(900_000)])),
        "A value has at most",
    ),
    "a key that is too large": (asks(operation(4097, SET, [bytes(5000)], [b"v"])), "A key has at most"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_is_too_much_for_the_store_is_refused_by_an_answer(field: Field, what: str) -> None:
    message, words = TOO_MUCH[what]
    index, answered = 30 + list(TOO_MUCH).index(what), threading.Event()

    def asked() -> Iterator[bytes]:
        yield opening(f"spare-{index}", 0, incarnation=1000 + index)
        yield message
        answered.wait(LIMIT_S)  # a stream that is closed gets no more answers

    with inside(field, f"spare-{index}") as over:
        for data in bare(over.stream_stream(STORE))(asked(), timeout=LIMIT_S):
            found = [each for each in store_pb2.StoreReply.FromString(data).answers if each.id == 4097]
            if found:
                answered.set()
                assert found[0].status == store_pb2.STORE_STATUS_REFUSED and words in found[0].sentence
                break


# ---------------------------------------------------------------- watchers


@pytest.mark.parametrize(
    "name", ["client", "node-7", "host", "server", "other-job", "other-operator", "revoked"]
)
def test_watching_and_ending_jobs_is_for_their_operators(field: Field, name: str) -> None:
    expected = "UNAUTHENTICATED" if name == "revoked" else "PERMISSION_DENIED"
    with field.channel(name) as over:
        watches, ends = bare(over.unary_stream(WATCH)), bare(over.unary_unary(END_JOB))
        for job_id in ("default", "", "../default"):
            request = watch_pb2.EndJobRequest(job_id=job_id, reason="x\n\x1b[2J").SerializeToString()
            assert error_of(lambda request=request: ends(request, timeout=LIMIT_S))[0] == expected  # type: ignore[misc]
            if name != "other-operator" or job_id:  # it sees the jobs that it may see: none; see below
                call = watches(watch_pb2.WatchRequest(job_id=job_id).SerializeToString(), timeout=LIMIT_S)
                assert error_of(lambda call=call: next(call))[0] == expected  # type: ignore[misc]
    assert field.status().state == "running"


def test_another_jobs_operator_sees_neither_job_nor_refusals(field: Field) -> None:
    with field.channel("other-operator") as over:
        call = bare(over.unary_stream(WATCH))(b"", timeout=0.7)
        with pytest.raises(grpc.RpcError):
            for data in call:
                reply = watch_pb2.WatchReply.FromString(data)
                assert reply.WhichOneof("body") == "overview"
                assert not reply.overview.jobs


def test_so_many_watch_and_no_more_and_who_does_not_read_is_not_waited_for(field: Field) -> None:
    with contextlib.ExitStack() as held:
        calls: list[Any] = []
        for _ in range(4):
            over = held.enter_context(field.channel("operator"))
            for _ in range(8):
                calls.append(bare(over.unary_stream(WATCH))(b"\x0a\x07default", timeout=LIMIT_S))
                next(calls[-1])
        over = held.enter_context(field.channel("operator"))
        with pytest.raises(grpc.RpcError, match="already have 32 watchers"):
            next(bare(over.unary_stream(WATCH))(b"", timeout=LIMIT_S))
        other = held.enter_context(field.channel("other-operator"))
        calls.append(bare(other.unary_stream(WATCH))(b"", timeout=LIMIT_S))
        next(calls[-1])  # these are no reason to keep another job's operator out
        step_on(field, 10)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("request_", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03a\nb", b"\x0a\x01\x1b"])
def test_a_malformed_request_to_watch_is_refused(field: Field, request_: bytes) -> None:
    with field.channel("operator") as over:
        both: tuple[Any, ...] = (over.unary_stream(WATCH), over.unary_unary(END_JOB))
        for call in both:
            with pytest.raises(grpc.RpcError) as error:
                found = bare(call)(request_, timeout=LIMIT_S)
                next(found)
            assert error.value.code().name == "INVALID_ARGUMENT"


def test_what_a_worker_says_commands_no_terminal(field: Field) -> None:
    """In ``status``, in what watchers get and in the log: as a name it is refused, as a text escaped."""
    evil = "x\x1b[2J\x1b]0;owned\x07\n2026-01-01T00:00:00.000Z INFO forged \u202e<script>"
    with field.channel("operator") as over:
        call = bare(over.unary_stream(WATCH))(b"\x0a\x07default", timeout=LIMIT_S)
        with field.channel("client") as workers:
            stream = Stream(workers)
            stream.put(join("spare-8", spare=True))
            stream.next("welcome")
            stream.put(pb.WorkerMessage(leave=pb.Leave(reason=evil)))
            stream.end()
        for data in call:
            reply = watch_pb2.WatchReply.FromString(data)
            for each in reply.happenings.happenings:
                assert "\x1b" not in each.text
                assert all(line.isprintable() for line in each.text.split("\n"))
                assert not any(line.startswith("2026-01-01") for line in each.text.split("\n"))
            found = [each for each in reply.happenings.happenings if each.node_id == "spare-8"]
            if any(each.kind == "left" for each in found):
                break
        call.cancel()
    for command in ("status", "jobs"):
        done = field.running.command(command)
        assert done.returncode == 0, done.stderr
        assert not set("\x1b\x07\u202e") & set(done.stdout + done.stderr)


# ---------------------------------------------------------------- metrics


def test_a_flood_at_the_metrics_is_the_metrics_alone(field: Field) -> None:
    """By any user of the host: half requests, other pages, and as many whole ones as it can ask for."""
    port = field.metrics_port
    halves = [socket.create_connection(("127.0.0.1", port), LIMIT_S) for _ in range(HELD)]
    for half in halves:
        with contextlib.suppress(OSError):
            half.sendall(b"GET /metrics HTT")
    step_on(field)
    for half in halves:
        half.close()
    for path in (b"/../../etc/passwd", b"/%2e%2e/", b"/metrics/../..", b"/" + b"x" * 7000):
        assert b"404" in answer_to(port, b"GET " + path + b" HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b"405" in answer_to(port, b"POST /metrics HTTP/1.1\r\n\r\n").splitlines()[0]
    assert answer_to(port, b"x" * 100_000) == b""
    for _ in range(HELD):
        answer = answer_to(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b'muster_job_state{job="default",state="running"} 1.0' in answer
    assert b"victim-" not in answer and b"\x1b" not in answer
