"""A relay before a port of 127.0.0.1 that acts like a bad network: it cuts, delays, stalls and resets.

A kernel without netem cannot drop packets. A program on TCP sees lost packets as a stall or as the
connection's end, and the relay makes both.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Trouble:
    """The faults of a bad network; the probabilities are per chunk of data that passes.

    Attributes:
        delay_s: the largest delay; each direction of a connection draws its own delays, in seconds.
        stall: the probability that this direction stalls for ``stall_s``.
        stall_s: the length of a stall, as after lost packets, in seconds.
        reset: the probability that the connection is reset.
        half_close: the probability that this direction ends while the other one goes on.
    """

    delay_s: float = 0.0
    stall: float = 0.0
    stall_s: float = 1.0
    reset: float = 0.0
    half_close: float = 0.0


class Relay:
    """Passes connections on to a port, with faults.

    Args:
        target: the port.
        trouble: the faults.
        seed: the seed of the faults' random numbers.

    Attributes:
        port: the port on which it accepts connections.
        trouble: the faults from now on, also of established connections.
        done: the numbers of delays, stalls, resets and half-closes so far.
    """

    def __init__(self, target: int, trouble: Trouble | None = None, seed: int = 0) -> None:
        self._target = ("127.0.0.1", target)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed_until = 0.0
        self._chance = random.Random(seed)
        self.trouble = trouble or Trouble()
        self.done: Counter[str] = Counter()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self, seconds: float = 0.0) -> None:
        """Cuts all connections, and refuses new ones for ``seconds``."""
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
                what = self._befalls()
                if what == "reset":
                    for each in (source, sink):
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                        each.shutdown(socket.SHUT_RD)  # both directions end, and the close resets
                    break
                if what == "half-close":
                    break
                sink.sendall(data)
        self._end(source, sink, ends)

    def _befalls(self) -> str:
        """Draws the fault of a chunk, and waits for a delay's or stall's time; returns the fault's name."""
        trouble = self.trouble
        if trouble == Trouble():
            return ""
        with self._lock:
            dice, delay_s = self._chance.random(), self._chance.uniform(0.0, trouble.delay_s)
            what, wait_s = "delay" if delay_s else "", delay_s
            for name, share in (
                ("stall", trouble.stall),
                ("reset", trouble.reset),
                ("half-close", trouble.half_close),
            ):
                if 0.0 <= dice < share:
                    what, wait_s = name, trouble.stall_s if name == "stall" else 0.0
                dice -= share
            if what:
                self.done[what] += 1
        if wait_s:
            time.sleep(wait_s)
        return what

    def _end(self, source: socket.socket, sink: socket.socket, ends: threading.Semaphore) -> None:
        """Ends a direction; after both, closes the connection, by a reset if one was asked for."""
        resets = bool(struct.unpack("ii", sink.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0])
        for each, how in () if resets else ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                each.shutdown(how)
        if not ends.acquire(blocking=False):
            ends.release()
            return
        with self._lock:  # both directions have ended
            self._sockets -= {source, sink}
        source.close()
        sink.close()
