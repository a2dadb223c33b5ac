"""Servers on loopback: gRPC's own, Python's TLS, and such as speak something else."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from muster.certs.runtime.store import Credentials
from muster.wire.settings import server_options


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Mutual TLS for a server whose certificate does not change."""
    return grpc.ssl_server_credentials(
        [(credentials.key_pem, credentials.cert_chain_pem)],
        root_certificates=credentials.ca_pem,
        require_client_auth=True,
    )


@contextlib.contextmanager
def grpc_server(
    credentials: Credentials | grpc.ServerCredentials | None, host: str = "127.0.0.1"
) -> Iterator[int]:
    """A gRPC server without methods; yields its port. None makes it speak plaintext."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, options=server_options())
        if credentials is None:
            port = server.add_insecure_port(f"{host}:0")
        else:
            own = server_credentials(credentials) if isinstance(credentials, Credentials) else credentials
            port = server.add_secure_port(f"{host}:0", own)
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait(60)


@contextlib.contextmanager
def socket_server(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """Accepts connections and gives each to ``handle``; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(60)
                        handle(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # close() alone does not wake a thread in accept().
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """Shakes hands with each connection, sends one byte and hangs up."""

    def handle(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.sendall(b"!")
            wrapped.recv(1)

    with socket_server(handle) as port:
        yield port
