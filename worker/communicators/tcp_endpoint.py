"""The listening socket of a process and the handshakes of all its connections.

One thread runs every handshake, its own dials and those that come in, as generators over non-blocking
sockets: a slow, silent or hostile socket costs a place in a bounded table and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from worker.communicators.tcp_handshake import (
    Lobby,
    Steps,
    TlsPolicy,
    Want,
    accept,
    dial,
    host_and_port,
    no_steps,
)
from worker.errors import CommunicatorError, WorkerError

_LOG = logging.getLogger("muster.tcp")
_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 0.5


@dataclass
class _Task:
    """One handshake under way."""

    steps: Steps
    sock: socket.socket | None
    expires: float
    lobby: Lobby | None = None
    rank: int = -1
    want: Want = Want.READ
    retry_s: float = _FIRST_RETRY_S
    resume_at: float = 0.0


class Endpoint:
    """Accepts and makes authenticated connections; lives as long as its backend.

    Args:
        tls: gives the contexts and the rule about identities that are in force; None for plaintext.
        handshake_timeout_s: how long a connection may take to prove itself.
        parked_timeout_s: how long a proven worker may wait for this process to enter its generation.
        max_handshakes: handshakes under way from outside; the oldest is dropped for a new one.
    """

    def __init__(
        self,
        tls: Callable[[], TlsPolicy] | None,
        *,
        handshake_timeout_s: float = 10.0,
        parked_timeout_s: float = 60.0,
        max_handshakes: int = 512,
    ) -> None:
        self._tls = tls
        self._policy_in_force = None if tls is None else tls()
        self._handshake_timeout_s = handshake_timeout_s
        self._parked_timeout_s = parked_timeout_s
        self._max_handshakes = max_handshakes
        self._lobbies: dict[bytes, Lobby] = {}
        self._newest = -1
        self._lock = threading.Lock()
        self._requests: list[_Task] = []
        self._tasks: list[_Task] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._closed = False

    def open(self, address: str) -> str:
        """Listens on a free port of a local address and returns ``host:port``."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise CommunicatorError(
                f"Cannot listen on {address}: {error.strerror}.",
                remedy="Set MS_WORKER_ADDRESS or MS_INTERFACE to an address of this host.",
            ) from None
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._start()
        port = listener.getsockname()[1]
        return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"

    def gather(self, lobby: Lobby) -> None:
        """Expects the lobby's peers from now on, and dials those that this side has to dial."""
        with self._lock:
            self._lobbies[lobby.label] = lobby
            self._newest = max(self._newest, lobby.membership.generation)
        self._wake()

    def dial(self, lobby: Lobby, rank: int, deadline: float) -> None:
        """Dials a peer until it answers or the deadline passes; the connection comes to the lobby."""
        task = _Task(no_steps(), None, deadline, lobby, rank)
        with self._lock:
            self._requests.append(task)
            self._start()
        self._wake()

    def forget(self, lobby: Lobby) -> None:
        """Expects nobody for this lobby any more."""
        with self._lock:
            self._lobbies.pop(lobby.label, None)
        lobby.closed = True
        self._wake()

    def close(self) -> None:
        """Stops listening and drops what is under way; idempotent."""
        self._closed = True
        self._wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(5)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._wake_fd >= 0:
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._serve, name="muster-tcp-endpoint", daemon=True)
            self._thread.start()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ in the endpoint's thread

    def _serve(self) -> None:
        while not self._closed:
            ready = self._selector.select(self._pause())
            for key, _ in ready:
                if key.fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._advance(key.data)
            self._begin_dials()
            self._tend()
        for task in list(self._tasks):
            self._drop(task)

    def _pause(self) -> float | None:
        times = [t.resume_at if t.want is Want.PAUSE else t.expires for t in self._tasks]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _tend(self) -> None:
        now = time.monotonic()
        for task in list(self._tasks):
            if task.lobby is not None and task.lobby.closed:
                self._drop(task)
            elif task.want is Want.LOBBY and now < task.expires:
                self._advance(task)
            elif now >= task.expires:
                _LOG.debug("A handshake was dropped: it took too long.")
                self._drop(task)
            elif task.want is Want.PAUSE and now >= task.resume_at:
                self._redial(task)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._make_room(0)
                return
            self._make_room(self._max_handshakes - 1)
            steps = accept(sock, self._policy(), self._find_lobby, str(address[0]))
            task = _Task(steps, sock, time.monotonic() + self._handshake_timeout_s)
            self._tasks.append(task)
            self._advance(task)

    def _policy(self) -> TlsPolicy | None:
        if self._tls is not None:
            try:
                self._policy_in_force = self._tls()
            except Exception:
                _LOG.exception("What was renewed cannot be used; the old certificate stays in force.")
        return self._policy_in_force

    def _make_room(self, limit: int) -> None:
        accepted = [task for task in self._tasks if task.lobby is None]
        if len(accepted) > limit:
            unproven = [task for task in accepted if task.want is not Want.LOBBY]
            self._drop((unproven or accepted)[0])

    def _find_lobby(self, label: bytes, generation: int) -> Lobby | None:
        with self._lock:
            lobby = self._lobbies.get(label)
            newest = self._newest
        if lobby is None and generation < newest:
            raise CommunicatorError(f"The hello is of generation {generation}, which is over (now {newest}).")
        return lobby

    def _begin_dials(self) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
        for task in requests:
            self._tasks.append(task)
            self._redial(task)

    def _redial(self, task: _Task) -> None:
        assert task.lobby is not None
        try:
            host, port = host_and_port(task.lobby.membership.peers[task.rank].data_address)
            task.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except (ValueError, OSError) as error:
            task.lobby.fail(task.rank, CommunicatorError(f"Rank {task.rank} cannot be dialed: {error}"))
            self._drop(task)
            return
        task.steps = dial(task.sock, (host, port), self._policy(), task.lobby, task.rank)
        self._advance(task)

    def _advance(self, task: _Task) -> None:
        before = task.want
        try:
            want, sock = next(task.steps)
        except StopIteration as end:
            lobby, connection = end.value
            self._unselect(task, close=False)
            self._tasks.remove(task)
            lobby.arrive(connection)
        except (OSError, CommunicatorError, ssl.SSLError) as error:
            self._failed(task, error)
        except WorkerError as error:
            if task.lobby is not None:
                task.lobby.fail(task.rank, error)
            else:
                _LOG.warning("A connection was refused: %s", error)
            self._drop(task)
        except Exception as error:
            _LOG.exception("A handshake failed in a way that was not foreseen.")
            self._failed(task, error)
        else:
            if want is Want.LOBBY and before is not Want.LOBBY:
                task.expires = time.monotonic() + self._parked_timeout_s
            self._select(task, want, sock)

    def _failed(self, task: _Task, error: Exception) -> None:
        if task.lobby is None:
            _LOG.info("A connection was dropped: %s", error)
            self._drop(task)
            return
        self._unselect(task)
        task.lobby.note(task.rank, str(error))
        task.want, task.resume_at = Want.PAUSE, min(task.expires, time.monotonic() + task.retry_s)
        task.retry_s = min(_LAST_RETRY_S, 2 * task.retry_s)

    def _select(self, task: _Task, want: Want, sock: socket.socket) -> None:
        if task.sock is not sock or want is Want.LOBBY or task.want in (Want.LOBBY, Want.PAUSE):
            self._unselect(task, close=False)
            task.sock = sock
        task.want = want
        if want is Want.LOBBY:
            return
        events = selectors.EVENT_READ if want is Want.READ else selectors.EVENT_WRITE
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, task)
        else:
            self._selector.register(sock, events, task)

    def _unselect(self, task: _Task, *, close: bool = True) -> None:
        if task.sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(task.sock)
            if close:
                task.sock.close()
                task.sock = None

    def _drop(self, task: _Task) -> None:
        self._unselect(task)
        task.steps.close()
        if task in self._tasks:
            self._tasks.remove(task)
