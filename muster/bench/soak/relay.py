"""A relay before a port of 127.0.0.1, whose connections can be cut, as a network does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Relay:
    """Passes connections on to a port.

    Args:
        target: the port.

    Attributes:
        port: where connections are taken.
    """

    def __init__(self, target: int) -> None:
        self._target = ("127.0.0.1", target)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed_until = 0.0
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self, seconds: float = 0.0) -> None:
        """Cuts all connections, and lets none begin for so long."""
        self._closed_until = time.monotonic() + seconds
        with self._lock:
            cut = list(self._sockets)
        for each in cut:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the relay."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if time.monotonic() < self._closed_until:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(self._target, timeout=5.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets |= {client, server}
                ends = threading.Semaphore(0)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink, ends), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, ends: threading.Semaphore) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                sink.sendall(data)
        for each, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                each.shutdown(how)
        if not ends.acquire(blocking=False):
            ends.release()
            return
        with self._lock:  # both directions have ended
            self._sockets -= {source, sink}
        source.close()
        sink.close()
