"""The stream to the scheduler over real gRPC: who answers, and what is said when it goes wrong."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from cryptography import x509

from muster.certs.pki.identity import Identity
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from muster.worker.config import Settings
from muster.worker.session.connection import DeniedError, Dial, MessageRejectedError, grpc_dial, load_keyring
from tests.certs.servers import server_credentials
from tests.scheduler.processes import Pki, environment

Behaviour = Callable[[Iterator[Any], Any], Iterator[Any]]


class Servicer(pb_grpc.RendezvousServicer):
    """Does in Session what the test says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    def Session(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        yield from self._behaviour(request_iterator, context)


@contextlib.contextmanager
def serving(behaviour: Behaviour, pki: Pki | None = None, name: str = "server") -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_RendezvousServicer_to_server(Servicer(behaviour), server)
    if pki is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(pki.credentials(name)))
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A bare socket that answers every caller, up to three times, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                for _ in range(3):
                    peer, _ = listener.accept()
                    with peer:
                        peer.recv(4096)
                        peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki.make(tmp_path_factory.mktemp("pki"))
    made.issue("elsewhere", Identity("elsewhere", "scheduler"), ("127.0.0.1",))
    made.issue("misnamed", Identity("default", "scheduler"), ("10.9.9.9",))
    return made


def connector(port: int, pki: Pki | None = None) -> Dial:
    settings = Settings(worker_num=1, worker_min=1, scheduler_port=port)
    env = {} if pki is None else pki.env()
    path = None if pki is None else pki.config
    return grpc_dial(settings, load_keyring(settings.replaced(config_path=path), env))


def welcome_each(requests: Iterator[Any], context: Any) -> Iterator[Any]:
    for request in requests:
        yield pb.SchedulerMessage(waiting=pb.Waiting(sentence=request.join.node_id))


def join(node_id: str) -> bytes:
    return pb.WorkerMessage(join=pb.Join(node_id=node_id)).SerializeToString()


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
        reader.join(20)
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


def test_nobody_there_is_worth_another_try(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for used in (None, pki):
        with pytest.raises(ConnectionRefusedError):
            connector(port, used)(SimpleQueue())


def test_a_worker_without_tls_is_told_that_the_scheduler_demands_it(pki: Pki) -> None:
    with serving(welcome_each, pki) as port, pytest.raises(DeniedError, match=r"demands TLS.*MS_CONFIG_FILE"):
        connector(port)(SimpleQueue())


def test_a_tls_alert_tells_too() -> None:
    with (
        answering(b"\x15\x03\x01\x00\x02\x02\x46") as port,
        pytest.raises(DeniedError, match="demands TLS"),
    ):
        connector(port)(SimpleQueue())


def test_a_hang_up_is_worth_another_try() -> None:
    with answering(b"") as port, pytest.raises(ConnectionError):
        connector(port)(SimpleQueue())


def test_a_plaintext_scheduler_is_refused_by_a_worker_with_tls(pki: Pki) -> None:
    with serving(welcome_each) as port, pytest.raises(DeniedError, match="does not speak TLS") as caught:
        connector(port, pki)(SimpleQueue())
    assert not caught.value.by_scheduler


@pytest.mark.parametrize(
    ("name", "words"),
    [("client", "role worker"), ("elsewhere", "for the job 'elsewhere'"), ("misnamed", r"for 10\.9\.9\.9")],
)
def test_a_server_that_is_not_this_jobs_scheduler_is_refused(pki: Pki, name: str, words: str) -> None:
    with serving(welcome_each, pki, name) as port, pytest.raises(DeniedError, match=words):
        connector(port, pki)(SimpleQueue())


def test_a_scheduler_of_another_authority_is_refused(pki: Pki, tmp_path: Path) -> None:
    with serving(welcome_each, Pki.make(tmp_path)) as port, pytest.raises(DeniedError, match="not trusted"):
        connector(port, pki)(SimpleQueue())


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
from muster.worker.session.connection import stream_on

calls = []
class Channel:
    def stream_stream(self, method):
        def call(requests):
            calls.append(real.stream_stream(method)(requests))
            return calls[0]
        return call
    def close(self):
        real.close()

signal.alarm(20)
real = grpc.insecure_channel("127.0.0.1:1")
messages, end = stream_on(Channel(), SimpleQueue())
end()
stopped = threading.Thread(target=calls[0]._state.condition.acquire)
stopped.start()
stopped.join()
"""


def test_the_interpreter_ends_though_a_thread_of_grpc_was_stopped_while_it_held_a_lock() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], env=environment(), check=False, timeout=60)
    assert done.returncode != -signal.SIGALRM, "it hung"
    assert done.returncode == 0
