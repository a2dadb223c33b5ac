"""A TCP proxy that keeps what passes, and may change it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

MAX_KEPT = 4 << 20
Change = Callable[[int, bytes], bytes]


class Proxy:
    """Stands in front of a port of 127.0.0.1.

    Args:
        port: where connections are passed on to.
        change: given the number of bytes that passed before in that direction, and a piece; returns what is
            passed on instead. An empty piece ends the direction.
        to_server_only: whether only what the client sends is changed.
    """

    def __init__(self, port: int, change: Change | None = None, *, to_server_only: bool = False) -> None:
        self.target = ("127.0.0.1", port)
        self._change = change
        self._to_server_only = to_server_only
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._sockets: list[socket.socket] = []
        self.kept: list[bytearray] = []
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def seen(self) -> bytes:
        """Everything kept, direction after direction."""
        return b"\n".join(bytes(each) for each in list(self.kept))

    def close(self) -> None:
        """Ends the port and all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(10)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self.target)
                except OSError:
                    client.close()
                    continue
                self._sockets += (client, server)
                self._start(client, server, self._change)
                self._start(server, client, None if self._to_server_only else self._change)

    def _start(self, source: socket.socket, target: socket.socket, change: Change | None) -> None:
        kept = bytearray()
        self.kept.append(kept)
        threading.Thread(target=self._pass_on, args=(source, target, change, kept), daemon=True).start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, change: Change | None, kept: bytearray
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                passed, before = passed + len(data), passed
                if len(kept) < MAX_KEPT:
                    kept += data
                if change is not None:
                    data = change(before, data)
                    if not data:
                        break
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
