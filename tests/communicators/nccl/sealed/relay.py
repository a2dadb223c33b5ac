"""A man in the middle on loopback: passes what two ranks send each other, and changes it as a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

HELLO, ANSWER, FINISH = 152, 104, 32
HEADER, TAG = 24 + 16, 16

Edit = Callable[[int, bytes], bytes | None]
"""What becomes of a piece that the dialer sends on the connection of this number; None cuts it."""


def port_of(handle: str) -> int:
    """The port that a handle names."""
    return int.from_bytes(bytes.fromhex(handle)[34:36], "big")


def with_port(handle: str, port: int) -> str:
    """The handle, as who changes NCCL's bootstrap would have it."""
    raw = bytearray.fromhex(handle)
    raw[34:36] = port.to_bytes(2, "big")
    return raw.hex()


def record(size: int) -> int:
    """A record's bytes on the wire, of a message of `size`."""
    return HEADER + (size + TAG if size else 0)


class Pieces:
    """Cuts a stream into pieces of known sizes, so that an edit sees whole messages and records."""

    def __init__(self, *sizes: int) -> None:
        self._sizes, self._held = list(sizes), b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """The pieces that are whole now; what follows the last size comes as it comes."""
        self._held += data
        while self._sizes and len(self._held) >= self._sizes[0]:
            size = self._sizes.pop(0)
            piece, self._held = self._held[:size], self._held[size:]
            yield piece
        if not self._sizes and self._held:
            yield self._held
            self._held = b""

    def rest(self) -> bytes:
        """What no piece was made of."""
        rest, self._held = self._held, b""
        return rest


class Relay:
    """Stands between; `edit` sees what the dialer sends, `edit_back` what comes back, cut into sizes."""

    def __init__(
        self,
        handle: str,
        edit: Edit | None = None,
        sizes: tuple[int, ...] = (),
        *,
        edit_back: Edit | None = None,
        back_sizes: tuple[int, ...] = (),
    ) -> None:
        self._to = port_of(handle)
        self._ways = ((edit, sizes), (edit_back, back_sizes))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self.seen: list[bytes] = []  # by connection: what the dialer sent
        self.handle = with_port(handle, self._listener.getsockname()[1])
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                dialer, _ = self._listener.accept()
                listener = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [dialer, listener]
                number = len(self.seen)
                self.seen.append(b"")
                self._start(self._pass_on, number, dialer, listener, 0)
                self._start(self._pass_on, number, listener, dialer, 1)

    def _pass_on(self, number: int, source: socket.socket, target: socket.socket, way: int) -> None:
        edit, sizes = self._ways[way]
        pieces = Pieces(*sizes)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if way == 0:
                    self.seen[number] += data
                for piece in pieces.add(data):
                    changed = piece if edit is None else edit(number, piece)
                    if changed is None:
                        source.shutdown(socket.SHUT_RDWR)
                        target.shutdown(socket.SHUT_RDWR)
                        return
                    target.sendall(changed)
            target.sendall(pieces.rest())
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends all connections."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Counted:
    """An edit of the piece of one number (from 0) on each connection; the others pass."""

    def __init__(self, at: int, change: Callable[[bytes], bytes | None]) -> None:
        self._at, self._change = at, change
        self._seen: dict[int, int] = {}

    def __call__(self, number: int, piece: bytes) -> bytes | None:
        """The piece, changed where it is its turn."""
        index = self._seen.get(number, 0)
        self._seen[number] = index + 1
        return self._change(piece) if index == self._at else piece


def flip(at: int) -> Callable[[bytes], bytes]:
    """Flips the lowest bit of one byte."""

    def change(piece: bytes) -> bytes:
        return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]

    return change
