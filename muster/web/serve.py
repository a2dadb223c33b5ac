"""The web server: plain HTTP on loopback, and elsewhere TLS that asks for an operator's certificate."""

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
"""Most connections at the same time; more are answered that the server is busy."""

STRANGERS, HANDSHAKE_S = 64, 5.0
"""Most connections that have not shown who they are yet, of more the oldest goes; how long each may take."""

HEAD_BYTES = 16 * 1024
REQUEST_S = 10.0
"""How long a connection may take to bring a request, with its body."""

REST_S = 1.0
"""How long the rest of a body may come once its request is answered: its sender is to read the answer."""

LOOK_S = 1.0
"""How often certificates and revocation lists are looked at, and the browsers that they let in."""


_IN_TURN = 8
"""Connections that are accepted before those that were hung up on get to close."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """Accepts connections for asyncio, a bounded number of which are in their TLS handshake.

    What cannot be accepted for want of descriptors is hung up on: by the one that is kept for that.

    Attributes:
        not_accepted: how many those were.
    """

    def __init__(self, family: int, kind: int) -> None:
        super().__init__(family, kind)
        self.not_accepted = 0
        self._strangers: dict[int, socket.socket] = {}
        self._in_turn = 0
        self._spare: int | None = None
        self._keep_spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """Takes a connection, which is a stranger's until :meth:`welcome`."""
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
                raise  # asyncio accepts nothing for a second
            raise ConnectionAbortedError(error.errno, error.strerror) from None  # asyncio passes over it
        self._strangers.pop(connection.fileno(), None)  # closed since: its number is this one's now
        if len(self._strangers) >= STRANGERS:
            self._hang_up(*next(iter(self._strangers.items())))
        self._strangers[connection.fileno()] = connection
        loop.call_later(HANDSHAKE_S, self._hang_up, connection.fileno(), connection)
        return connection, address

    def welcome(self, number: int) -> None:
        """The connection with this descriptor has come through its handshake."""
        self._strangers.pop(number, None)

    def _end_turn(self) -> None:
        self._in_turn = 0

    def _hang_up(self, number: int, connection: socket.socket) -> None:
        if self._strangers.get(number) is connection:
            del self._strangers[number]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _turn_away(self) -> bool:
        """Hangs up on who is next; false: another thread has the descriptor that is kept for that."""
        if not self.not_accepted:
            logging.getLogger("muster.web").warning(
                "connections are turned away: this process has as many files open as it may"
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
    """Listens; port 0: any free one.

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
    """How browsers come.

    Attributes:
        names: by which they may call this host.
        server: gives the server's certificate and what counts now; None: plain HTTP on loopback, behind a
            link that is good once.
        job: whose operators may come; None: any's.
    """

    names: tuple[str, ...]
    server: Follower | None = None
    job: str | None = None
    place: str = field(default_factory=lambda: f"/{secrets.token_urlsafe(12)}")

    def origins(self, port: int) -> list[str]:
        """The pages' origins, as browsers name them."""
        scheme = "http" if self.server is None else "https"
        standard = 80 if self.server is None else 443
        named = [f"[{name}]" if ":" in name else name for name in self.names]
        return [f"{scheme}://{name}{'' if port == standard else f':{port}'}" for name in named]


async def serve(pages: Pages, transport: Transport, listener: Listener, ready: Callable[[], None]) -> None:
    """Serves until a signal comes; ``ready`` is called when a browser may come."""
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
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # else each bad request is a line on the terminal
    config = uvicorn.Config(
        app,
        http=Here,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=2 * CONNECTIONS,  # requests that were hung up on count until they know it
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
    """Shows what asyncio reports, but no traceback for each connection that finds no descriptor."""
    if getattr(context.get("exception"), "errno", None) not in _NO_ROOM:
        loop.default_exception_handler(context)


class _Bounded(H11Protocol):
    """HTTP for a bounded number of connections, each of which must bring a request soon."""

    _patience: asyncio.TimerHandle | None = None
    _silent_since: float | None = None
    _is_answered_early = False

    def connection_made(self, transport: Any) -> None:
        """Takes a connection; of too many the one goes that has been without a request longest."""
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
        """Takes bytes; a part of a request gives no more time for the rest."""
        super().data_received(data)
        if self._is_answered_early:
            return
        if self._has_request():
            self._silent_since = None
            self._stop_awaiting()
        elif self._patience is None and not self.transport.is_closing():
            self._await_request()

    def on_response_complete(self) -> None:
        """The answer is sent; who has not sent the whole request, and need not any more, is hung up on."""
        self._silent_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY:
            self._is_answered_early = True
            self._stop_awaiting()
            self._patience = self.loop.call_later(REST_S, self.give_up)
            if self.conn.our_state is h11.MUST_CLOSE:  # closed at once, the answer would be lost
                return
        super().on_response_complete()
        if not self._is_answered_early and self._has_request():  # the next one was there already
            self._silent_since = None

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_awaiting()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Hangs up."""
        self._stop_awaiting()
        self.transport.abort()

    def _has_request(self) -> bool:
        """Whether a whole request is here that is not answered yet."""
        return self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)

    def _await_request(self) -> None:
        self._patience = self.loop.call_later(REQUEST_S, self.give_up)

    def _stop_awaiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Newest(ssl.SSLContext):
    """Has each connection begin with the certificate and authorities that are in force then."""

    def __new__(cls, server: Follower) -> Self:
        """As :class:`ssl.SSLContext`, which takes nothing but a protocol."""
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
    """Looks at the files, and hangs up on who was let in and may not be any more."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(LOOK_S)
        await loop.run_in_executor(None, server)
        for connection in list(connections):
            if connection.refusal() is not None:
                connection.give_up()


def _for_operators(server: Follower, job: str | None) -> type[H11Protocol]:
    """A protocol that hangs up on who shows no operator's certificate, or one revoked or out of date."""

    class OperatorsOnly(_Bounded):
        def refusal(self) -> str | None:
            """Why this browser may see nothing; None: it may."""
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
