"""The store of a real scheduler over mutual TLS: strangers and floods beside a job that goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from muster.certs.pki.identity import Identity
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import store_pb2 as store_pb
from tests.scheduler.processes import Pki, Scheduler, channel, form, scheduler
from tests.scheduler.store.rig import OPEN

SET, GET = store_pb.STORE_KIND_SET, store_pb.STORE_KIND_GET


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki.make(tmp_path_factory.mktemp("pki"))
    made.issue("other", Identity("another-job", "worker"))
    made.issue("named", Identity("default", "worker", "node-1"))
    return made


@pytest.fixture(scope="module")
def running(pki: Pki) -> Iterator[Scheduler]:
    with scheduler(MS_WORKER_NUM="2", MS_NODE_TIMEOUT="600", **pki.env()) as served:
        yield served


class Link:
    """A stream to the store, as a member's or a stranger's."""

    def __init__(self, over: grpc.Channel, **said: object) -> None:
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        opening = {"job_id": "default", "node_id": "node-0", "incarnation": 1000, "generation": 1} | said
        self._say(store_pb.StoreRequest(open=store_pb.StoreOpen(**opening)))  # type: ignore[arg-type]
        open_stream: Any = over.stream_stream(OPEN)
        self.call = open_stream(iter(self._out.get, None), timeout=100)

    def _say(self, request: store_pb.StoreRequest) -> None:
        self._out.put(request.SerializeToString())

    def operate(self, number: int, kind: store_pb.StoreKind, keys: Sequence[bytes], *values: bytes) -> None:
        operation = store_pb.StoreOperation(id=number, kind=kind, keys=keys, values=values)
        self._say(store_pb.StoreRequest(operations=[operation], answered_below=number))

    def next(self) -> store_pb.StoreReply:
        return store_pb.StoreReply.FromString(next(self.call))

    def close(self) -> None:
        self._out.put(None)
        self.call.cancel()


def refused(over: grpc.Channel, **said: object) -> tuple[str, str]:
    link = Link(over, **said)
    try:
        while True:
            link.next()
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    finally:
        link.close()


def test_strangers_and_floods_do_the_job_no_harm(running: Scheduler, pki: Pki, tmp_path: Path) -> None:
    with channel(running.target, pki.credentials("client")) as own:
        members = form(own, 2)
        link = Link(own)
        assert link.next().HasField("opened")
        secret = b"a-key-that-no-log-may-show"
        link.operate(1, SET, [secret], secret)
        assert link.next().answers[0].number == 1

        for name, said, code, words in (
            ("other", {}, "PERMISSION_DENIED", "another-job"),
            ("operator", {}, "PERMISSION_DENIED", "operator"),
            ("named", {}, "PERMISSION_DENIED", "node-1"),
            ("client", {"incarnation": 5}, "PERMISSION_DENIED", "no member of generation 1"),
            ("client", {"node_id": "node-9"}, "PERMISSION_DENIED", "no member of generation 1"),
            ("client", {"generation": 2}, "PERMISSION_DENIED", "no member of generation 2"),
            ("client", {"job_id": "none"}, "PERMISSION_DENIED", "not 'none'"),
        ):
            with channel(running.target, pki.credentials(name)) as strange:
                found, told = refused(strange, **said)
                assert (found, words in told) == (code, True), (name, said, found, told)

        with channel(running.target, pki.credentials("client")) as flooding:
            flood = Link(flooding, node_id="node-1", incarnation=1001)
            assert flood.next().HasField("opened")
            over = threading.Event()

            def pour() -> None:
                number = 0
                while not over.is_set() and number < 20_000:
                    number += 1
                    flood.operate(number, SET, [b"%d" % number], bytes(100_000))

            pouring = threading.Thread(target=pour)
            pouring.start()
            try:
                statuses = [flood.next().answers for _ in range(3000)]  # beyond its quota of 128 MiB
                for beat in range(5):  # a member's heartbeats are heard meanwhile
                    members[0].put(pb.WorkerMessage(heartbeat=pb.Heartbeat(generation=1, step=beat + 1)))
                    members[1].put(pb.WorkerMessage(heartbeat=pb.Heartbeat(generation=1, step=beat + 1)))
                shown = running.command("status", MS_OPERATOR_CERT_PATH=str(pki.directory / "operator.p12"))
            finally:
                over.set()
                pouring.join(100)
                flood.close()
            sentences = {answer.sentence for answers in statuses for answer in answers if answer.status}
            assert sentences == {"The store of a generation holds at most 128 MiB."}
            assert shown.returncode == 0, shown.stderr
            assert "running" in shown.stdout

        link.operate(2, GET, [secret])
        assert list(link.next().answers[0].values) == [secret]
        link.close()
        for member in members:
            member.put(pb.WorkerMessage(leave=pb.Leave(generation=1, finished=True)))
            member.next("ended")
    assert running.wait() == 0
    assert secret.decode() not in running.log
