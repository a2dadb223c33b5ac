"""Real gRPC servers that do in a Session what a test says, and what dials them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from muster.worker.config import Settings
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.streams import Dial
from tests.certs.servers import server_credentials
from tests.scheduler.processes import Pki

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
