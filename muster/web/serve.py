"""The web server: plain HTTP on loopback, and elsewhere TLS that requires an operator's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from muster.certs.errors import CertificateError
from muster.certs.runtime.follower import Follower
from muster.certs.runtime.tls import peer_pem, server_ssl_context
from muster.scheduler.errors import BindError
from muster.web.app import Pages
from muster.web.guard import Guard
from muster.wire.settings import show_address

CONNECTIONS = 128
"""The largest number of connections; beyond it, the one that was without a request longest is closed."""

STRANGERS, HANDSHAKE_S = 64, 5.0
"""The largest number of connections in the TLS handshake, and the time limit of a handshake in seconds. If
there are more, the oldest one is closed.
"""

HEAD_BYTES = 16 * 1024
REQUEST_S = 10.0
"""How long a connection may take to send a request with its body, in seconds."""

REST_S = 1.0
"""How long the rest of a body is still read after its request was answered, in seconds, so that the sender
can read the answer.
"""

LOOK_S = 1.0
"""The interval at which certificates, revocation lists and connected browsers are checked, in seconds."""


_IN_TURN = 8
"""How many connections are accepted before the event loop gets a turn to close aborted ones."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """Accepts connections for asyncio, with a bounded number of them in the TLS handshake.

    If no file descriptor is left, connections are accepted with a spare one and closed.

    Attributes:
        not_accepted: the number of connections that were closed for lack of descriptors.
    """

    def __init__(self, family: int, kind: int) -> None:
        super().__init__(family, kind)
        self.not_accepted = 0
        self._strangers: dict[int, socket.socket] = {}
        self._in_turn = 0
        self._spare: int | None = None
        self._keep_spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection, which counts as being in its handshake until :meth:`welcome`.

        Raises:
            OSError: as for :meth:`socket.socket.accept`; asyncio handles it.
        """
        loop = asyncio.get_running_loop()
        if self._in_turn >= _IN_TURN:
            raise BlockingIOError(errno.EAGAIN, "the others are next")
        if not self._in_turn:
            loop.call_soon(self._end_turn)
        self._in_turn += 1
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if not self._turn_away():
                raise  # asyncio then accepts no connection for a second.
            raise ConnectionAbortedError(error.errno, error.strerror) from None  # asyncio ignores this.
        self._strangers.pop(connection.fileno(), None)  # It may be that of a closed connection.
        if len(self._strangers) >= STRANGERS:
            self._hang_up(*next(iter(self._strangers.items())))
        self._strangers[connection.fileno()] = connection
        loop.call_later(HANDSHAKE_S, self._hang_up, connection.fileno(), connection)
        return connection, address

    def welcome(self, number: int) -> None:
        """Records that the connection with this descriptor has completed its handshake."""
        self._strangers.pop(number, None)

    def _end_turn(self) -> None:
        self._in_turn = 0

    def _hang_up(self, number: int, connection: socket.socket) -> None:
        if self._strangers.get(number) is connection:
            del self._strangers[number]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _turn_away(self) -> bool:
        """Accepts and closes the next connection with the spare descriptor; returns False without one."""
        if not self.not_accepted:
            logging.getLogger("muster.web").warning(
                "connections are turned away: this process has reached its limit of open files"
            )
        self.not_accepted += 1
        self._keep_spare()
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        self._keep_spare()
        return True

    def _keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def bind(host: str, port: int) -> Listener:
    """Binds a listener; port 0 means any free one.

    Raises:
        BindError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise BindError(
            f"The page cannot be served on {show_address(host, port)}: {error.strerror}.",
            remedy="Choose another --port, or leave it out for any free one.",
        ) from error
    return listener


@dataclass(frozen=True)
class Transport:
    """The transport by which browsers reach the pages.

    Attributes:
        names: the host names that browsers may use.
        server: the server's current credentials; None for plain HTTP on loopback, with one-time links.
        job: the job whose operators are admitted; None for those of any job.
        place: the random path below which the pages are.
    """

    names: tuple[str, ...]
    server: Follower | None = None
    job: str | None = None
    place: str = field(default_factory=lambda: f"/{secrets.token_urlsafe(12)}")

    def origins(self, port: int) -> list[str]:
        """Returns the pages' origins, as browsers send them."""
        scheme = "http" if self.server is None else "https"
        standard = 80 if self.server is None else 443
        named = [f"[{name}]" if ":" in name else name for name in self.names]
        return [f"{scheme}://{name}{'' if port == standard else f':{port}'}" for name in named]


async def serve(pages: Pages, transport: Transport, listener: Listener, ready: Callable[[], None]) -> None:
    """Serves until a signal comes; calls ``ready`` once browsers can connect."""
    origins = transport.origins(listener.getsockname()[1])
    pages.place = transport.place
    app = Guard(
        pages.app(), pages.place, origins, pages.login_links, by_certificate=transport.server is not None
    )
    protocol: type[H11Protocol] = _Bounded
    if transport.server is not None:
        protocol = _for_operators(transport.server, transport.job)

    class Here(protocol):  # type: ignore[valid-type, misc]
        def connection_made(self, transport: Any) -> None:
            listener.welcome(transport.get_extra_info("socket").fileno())
            super().connection_made(transport)

    asyncio.get_running_loop().set_exception_handler(_pass_over_no_room)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # Bad requests need no lines.
    config = uvicorn.Config(
        app,
        http=Here,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=2 * CONNECTIONS,  # Requests of aborted connections count until they end.
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=1,
    )
    config.load()
    if transport.server is not None:
        config.ssl = _Newest(transport.server)
    server = uvicorn.Server(config)
    tasks = [asyncio.ensure_future(pages.keep_fresh())]
    if transport.server is not None:
        tasks.append(asyncio.ensure_future(_keep_looking(transport.server, server.server_state.connections)))
    pages.feed.open()
    listener.listen(CONNECTIONS)
    ready()
    try:
        await server.serve(sockets=[listener])
    finally:
        pages.feed.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pass_over_no_room(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Passes on asyncio's reports, except tracebacks of connections for which no descriptor was left."""
    if getattr(context.get("exception"), "errno", None) not in _NO_ROOM:
        loop.default_exception_handler(context)


class _Bounded(H11Protocol):
    """HTTP with a bounded number of connections and a time limit for each request."""

    _patience: asyncio.TimerHandle | None = None
    _silent_since: float | None = None
    _is_answered_early = False

    def connection_made(self, transport: Any) -> None:
        """Accepts a connection; if there are too many, closes the one that was without a request longest."""
        super().connection_made(transport)
        self._silent_since = self.loop.time()
        self._await_request()
        silent = [
            (each._silent_since, id(each), each)
            for each in self.connections
            if isinstance(each, _Bounded) and each._silent_since is not None
        ]
        if len(self.connections) >= CONNECTIONS and silent:
            min(silent)[-1].give_up()

    def data_received(self, data: bytes) -> None:
        """Handles received bytes; a partial request does not extend the time limit."""
        super().data_received(data)
        if self._is_answered_early:
            return
        if self._has_request():
            self._silent_since = None
            self._stop_awaiting()
        elif self._patience is None and not self.transport.is_closing():
            self._await_request()

    def on_response_complete(self) -> None:
        """Handles the end of an answer; closes the connection soon if its request was answered early."""
        self._silent_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY:
            self._is_answered_early = True
            self._stop_awaiting()
            self._patience = self.loop.call_later(REST_S, self.give_up)
            if self.conn.our_state is h11.MUST_CLOSE:  # Closing immediately would lose the answer.
                return
        super().on_response_complete()
        if not self._is_answered_early and self._has_request():  # The next request has already come.
            self._silent_since = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        self._stop_awaiting()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Aborts the connection."""
        self._stop_awaiting()
        self.transport.abort()

    def _has_request(self) -> bool:
        """Whether a complete request is waiting for its answer."""
        return self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)

    def _await_request(self) -> None:
        self._patience = self.loop.call_later(REQUEST_S, self.give_up)

    def _stop_awaiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Newest(ssl.SSLContext):
    """A TLS context that uses the current certificate and authorities for each new connection."""

    def __new__(cls, server: Follower) -> Self:
        """Creates the :class:`ssl.SSLContext`, which takes no other argument than a protocol."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, server: Follower) -> None:
        self._server = server
        self._of, self._context = server.credentials, server_ssl_context(server.credentials)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """See :meth:`ssl.SSLContext.wrap_bio`, which asyncio calls for each connection."""
        if self._of is not self._server.credentials:
            self._of = self._server.credentials
            self._context = server_ssl_context(self._of)
        return self._context.wrap_bio(*arguments, **options)


async def _keep_looking(server: Follower, connections: Iterable[Any]) -> None:
    """Checks the credential files regularly; aborts connections whose certificates are no longer valid."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(LOOK_S)
        await loop.run_in_executor(None, server)
        for connection in list(connections):
            if connection.refusal() is not None:
                connection.give_up()


def _for_operators(server: Follower, job: str | None) -> type[H11Protocol]:
    """Returns a protocol that refuses browsers without a valid operator's certificate."""

    class OperatorsOnly(_Bounded):
        def refusal(self) -> str | None:
            """Returns why this browser is not admitted; None if it is."""
            try:
                peer = server.credentials.peer(peer_pem(self.transport.get_extra_info("ssl_object")))
            except CertificateError as error:
                return str(error)
            if peer.identity.legacy:
                return "A certificate without an identity cannot act as an operator."
            return peer.identity.may(role="operator", job=job)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            reason = self.refusal()
            if reason is not None:
                text = f"{reason}\n".encode()
                head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
                transport.write(head.encode() + text)
                transport.close()

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)

    return OperatorsOnly
