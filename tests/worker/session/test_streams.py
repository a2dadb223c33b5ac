"""A stream to the scheduler over real gRPC: both ways, how it is closed, with which errors it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from cryptography import x509

from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.session.streams import DeniedError, MessageRejectedError
from tests.scheduler.processes import Pki, environment
from tests.worker.session.grpc_servers import connector, join, serving, welcome_each


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize("secure", [False, True])
def test_messages_go_both_ways(pki: Pki, secure: bool) -> None:
    used = pki if secure else None
    with serving(welcome_each, used) as port:
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        messages, end = connector(port, used)(outbox)
        replies = iter(messages)
        for name in ("a", "b"):
            outbox.put(join(name))
            assert pb.SchedulerMessage.FromString(next(replies)).waiting.sentence == name
        end()
        end()


def test_closing_ends_a_reader_that_waits(pki: Pki) -> None:
    with serving(welcome_each, pki) as port:
        messages, end = connector(port, pki)(SimpleQueue())
        ended: list[Exception] = []

        def read() -> None:
            try:
                next(iter(messages))
            except Exception as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        end()
        reader.join(100)
        assert not reader.is_alive()
        assert isinstance(ended[0], OSError)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, DeniedError, "the sentence"),
        (grpc.StatusCode.PERMISSION_DENIED, DeniedError, "the sentence"),
        (grpc.StatusCode.INVALID_ARGUMENT, MessageRejectedError, "the sentence"),
        (grpc.StatusCode.UNIMPLEMENTED, MessageRejectedError, "not a scheduler of Muster"),
        (grpc.StatusCode.UNAVAILABLE, OSError, "unavailable: the sentence"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, OSError, "the sentence"),
    ],
)
def test_how_a_stream_is_turned_down(code: grpc.StatusCode, kind: type[Exception], words: str) -> None:
    def abort(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        context.abort(code, "the sentence")
        yield

    with serving(abort) as port:
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        messages, end = connector(port)(outbox)
        with pytest.raises(kind, match=words) as caught:
            next(iter(messages))
        if isinstance(caught.value, DeniedError):
            assert caught.value.by_scheduler
        end()


def test_a_scheduler_that_is_revoked_meanwhile_is_left(tmp_path: Path) -> None:
    own = Pki.make(tmp_path, crl_path="crl.pem")
    with serving(welcome_each, own) as port:
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        looking = connector(port, own)
        messages, end = looking(outbox)
        replies = iter(messages)
        outbox.put(join("a"))
        next(replies)
        server = x509.load_pem_x509_certificate(own.credentials("server").leaf_pem)
        own.authority.write_revocations([server.serial_number])
        outbox.put(join("b"))
        with pytest.raises(ConnectionError, match="cancelled"):
            next(replies)
        end()
        with pytest.raises(DeniedError, match="was revoked"):
            looking(SimpleQueue())


LOCKED = """
import grpc, signal, threading
from queue import SimpleQueue
from muster.worker.session.streams import stream_on

calls = []
class Channel:
    def stream_stream(self, method):
        def call(requests):
            calls.append(real.stream_stream(method)(requests))
            return calls[0]
        return call
    def close(self):
        real.close()

signal.alarm(60)
real = grpc.insecure_channel("127.0.0.1:1")
messages, end = stream_on(Channel(), SimpleQueue())
end()
stopped = threading.Thread(target=calls[0]._state.condition.acquire)
stopped.start()
stopped.join()
"""


def test_the_interpreter_ends_though_a_thread_of_grpc_was_stopped_while_it_held_a_lock() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], env=environment(), check=False, timeout=100)
    assert done.returncode != -signal.SIGALRM, "it hung"
    assert done.returncode == 0
