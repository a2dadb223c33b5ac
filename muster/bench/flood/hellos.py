"""Floods a port with ClientHellos from one address, as fast as one core can; started by ``bench flood``.

Each connection sends a complete ClientHello, so that the server computes its part of the handshake, and then
nothing more. The newest 2,000 connections stay open. Connections that the server does not accept are closed,
oldest first.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import select
import socket
import ssl
import sys
import time

from muster.certs.runtime.probe import trusting_context

OPEN = 2_000
PENDING = 2_000
AT_A_TIME = 16


def client_hello() -> bytes:
    """Returns the first message of a TLS client."""
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        trusting_context().wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


class Flood:
    """The connections of one flood, with counts of their outcomes."""

    def __init__(self, target: tuple[str, int], source: str) -> None:
        self.target, self.source = target, source
        self.tries = self.hellos = self.refused = self.given_up = 0
        self._hello = client_hello()
        self._epoll = select.epoll()
        self._pending: dict[int, socket.socket] = {}
        self._open: collections.deque[socket.socket] = collections.deque()

    def turn(self) -> None:
        """Starts some connections, and sends a hello on those that are established."""
        if len(self._pending) >= PENDING:
            for number in list(self._pending)[: PENDING // 4]:
                self._pending.pop(number).close()
                self.given_up += 1
        for _ in range(AT_A_TIME):
            self._begin()
        for number, _ in self._epoll.poll(0):
            sock = self._pending.pop(number)
            self._epoll.unregister(number)
            self._greet(sock)
        while len(self._open) > OPEN:
            self._open.popleft().close()

    def _begin(self) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in self.source else socket.AF_INET)
        sock.setblocking(False)
        sock.bind((self.source, 0))
        code = sock.connect_ex(self.target)
        self.tries += 1
        if code == 0:
            self._greet(sock)
        elif code == errno.EINPROGRESS:
            self._pending[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLOUT)
        else:
            self.refused += 1
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.send(self._hello)
        except OSError:
            self.refused += 1
            sock.close()
            return
        self.hellos += 1
        self._open.append(sock)


def main() -> None:
    """``python -m muster.bench.flood.hellos HOST PORT SOURCE SECONDS``: prints what it did as JSON."""
    host, port, source, seconds = sys.argv[1:]
    flood = Flood((host, int(port)), source)
    began = time.monotonic()
    cpu_before = time.process_time()
    while time.monotonic() < began + float(seconds):
        flood.turn()
    taken_s = time.monotonic() - began
    result = {
        "seconds": taken_s,
        "tries_per_s": flood.tries / taken_s,
        "hellos_per_s": flood.hellos / taken_s,
        "refused": flood.refused,
        "given_up": flood.given_up,
        "share_of_a_core": (time.process_time() - cpu_before) / taken_s,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
