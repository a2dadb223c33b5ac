"""Connections to peers: what is said on them, and bytes moved on several at once, under one deadline.

Every frame starts with :data:`FRAME`. A frame of calls carries, for each of some ranks, what that rank
has called and (for small arrays) its data. A goodbye is the last thing on a connection and has a fixed
size, so that it is found at the end of a stream whatever stands in front of it.

One thread moves all. A stream is a list of memory views to be sent or filled in order. ``Outgoing`` views
may be held back until they are ready, and ``Incoming`` views call back when full: so rings pipeline
themselves.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from muster.communicators.tcp.records import RECORD_BYTES, RecordLayer, RecordLayerError
from muster.errors import CommunicatorError
from muster.forking import not_for_children
from muster.wire.log_lines import one_line
from muster.wire.threads import start_thread

RECORD = 16384
"""Most bytes in one TLS record: reads and writes go in pieces of this size."""

_MOST_AHEAD = 64 << 20
_GOODBYE_TIMEOUT_S = 1.0
_PLAIN_PIECE = 262144
_WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)

_BURST = 4
"""Pieces moved in one direction before the other has its turn."""

_LONG_BURST = 8
"""The same where each direction has a thread of its own."""

_MANY_VIEWS = 2
"""Pieces, of 512 KiB at most, from which on it has."""

_CHECK_S = 0.05
_SIGNALS_S = 0.5
"""How long one wait lasts at most: a signal that another thread takes is handled between two."""

_FRAME_ROOM = 16384 + 256

_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


# ---------------------------------------------------------------- what is said

Buffer = bytes | bytearray | memoryview

FRAME = struct.Struct("!4sBxHQ")
"""Magic, kind, number of blocks, length of what follows."""

MAGIC = b"Mus1"
MAX_FRAME = 1 << 26
CALL = struct.Struct("!BBBxiQQ")
BLOCK = struct.Struct("!Q24s")
"""Length of a block's payload, and the call (:data:`CALL`)."""

GOODBYE_BYTES = 512


class FrameKind(enum.IntEnum):
    """What a frame is."""

    CALLS = 1
    POINT = 2
    GOODBYE = 3


class Reason(enum.IntEnum):
    """Why a rank says goodbye."""

    DONE = 0
    MISMATCH = 1
    TIMEOUT = 2
    LOST = 3
    ABORTED = 4
    FAILED = 5


HAS_FINISHED = "finished"
"""Goes with ``DONE`` where the rank needs no communicator any more."""

KINDS = (
    "nothing",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "split",
    "connect",
)
OPS = ("", "sum", "mean", "min", "max", "prod")
DTYPES = (
    *("", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "bfloat16"),
)
_ROOTED = {"reduce", "broadcast", "gather", "scatter"}


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank has called.

    ``sequence`` counts collectives from 0 (point-to-point calls are counted per pair); ``root`` is the
    root or, of a point-to-point call, the peer.
    """

    kind: str
    dtype: str = ""
    op: str = ""
    root: int = -1
    count: int = 0
    sequence: int = 0

    def encode(self) -> bytes:
        """The call in its 24 bytes."""
        return CALL.pack(
            KINDS.index(self.kind),
            DTYPES.index(self.dtype),
            OPS.index(self.op),
            self.root,
            self.count,
            self.sequence,
        )

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """Reads what :meth:`encode` wrote.

        Raises:
            CommunicatorError: not a call.
        """
        kind, dtype, op, root, count, sequence = CALL.unpack(data)
        if kind >= len(KINDS) or dtype >= len(DTYPES) or op >= len(OPS):
            raise CommunicatorError("A peer sent a call that is not known here.")
        return cls(KINDS[kind], DTYPES[dtype], OPS[op], root, count, sequence)

    def __str__(self) -> str:
        """The call as messages show it."""
        parts = [self.op] if self.op else []
        if self.dtype:
            parts += [self.dtype, f"{self.count} elements"]
        if self.kind in _ROOTED:
            parts.append(f"root {self.root}")
        if self.kind in ("send", "recv"):
            parts.append(f"{'to' if self.kind == 'send' else 'from'} rank {self.root}")
        return f"{self.kind}({', '.join(parts)})"


def frame(kind: FrameKind, blocks: int, length: int) -> bytes:
    """A frame's first 16 bytes."""
    return FRAME.pack(MAGIC, kind, blocks, length)


def read_frame(data: bytes | bytearray | memoryview) -> tuple[FrameKind, int, int]:
    """Reads a frame's first 16 bytes: kind, number of blocks, length of the rest.

    Raises:
        CommunicatorError: this is no frame.
    """
    magic, kind, blocks, length = FRAME.unpack(data)
    if magic != MAGIC or kind not in FrameKind._value2member_map_ or length > MAX_FRAME:
        raise CommunicatorError("A peer sent data that is no frame: the two ranks are out of step.")
    return FrameKind(kind), blocks, length


def blocks_frame(kind: FrameKind, blocks: Sequence[tuple[bytes, Buffer]]) -> bytes:
    """A whole frame of blocks: what ranks have called, each with its payload."""
    parts: list[Buffer] = [b""]
    length = 0
    for call, payload in blocks:
        parts += (BLOCK.pack(len(payload), call), payload)
        length += BLOCK.size + len(payload)
    parts[0] = frame(kind, len(blocks), length)
    return b"".join(parts)


def read_blocks(data: memoryview, count: int) -> list[tuple[bytes, memoryview]]:
    """Reads a frame's blocks.

    Raises:
        CommunicatorError: the blocks do not fill the frame.
    """
    blocks = []
    offset = 0
    for _ in range(count):
        if offset + BLOCK.size > len(data):
            break
        size, call = BLOCK.unpack_from(data, offset)
        offset += BLOCK.size
        blocks.append((call, data[offset : offset + size]))
        offset += size
    if len(blocks) != count or offset != len(data):
        raise CommunicatorError("A peer sent a frame whose blocks do not fill it.")
    return blocks


def goodbye(reason: Reason, message: str) -> bytes:
    """The last 512 bytes on a connection."""
    room = GOODBYE_BYTES - FRAME.size - 2
    text = message.encode()[:room].decode(errors="ignore").encode()
    head = frame(FrameKind.GOODBYE, int(reason), GOODBYE_BYTES - FRAME.size)
    return (head + len(text).to_bytes(2, "big") + text).ljust(GOODBYE_BYTES, b"\0")


def read_goodbye(data: bytes) -> tuple[Reason, str] | None:
    """Reads a goodbye; None if these bytes are none."""
    if len(data) != GOODBYE_BYTES:
        return None
    magic, kind, reason, length = FRAME.unpack(data[: FRAME.size])
    if magic != MAGIC or kind != FrameKind.GOODBYE or length != GOODBYE_BYTES - FRAME.size:
        return None
    size = int.from_bytes(data[FRAME.size : FRAME.size + 2], "big")
    text = data[FRAME.size + 2 : FRAME.size + 2 + size].decode(errors="replace")
    known = reason in Reason._value2member_map_
    return (Reason(reason) if known else Reason.FAILED), one_line(text)


def end_in_words(reason: Reason, text: str) -> str:
    """How a connection ended, as what follows its name in a message."""
    if reason is Reason.LOST:
        return f"broke: {text or 'the process ended or the network failed'}"
    if reason is Reason.DONE:
        return "was closed by it in good order, while this rank still needed it"
    return f"was closed by it: {text}"


# ---------------------------------------------------------------- one connection


class EndOfStreamError(Exception):
    """The peer's side of the connection has ended; ``farewell`` is what it said last, if anything."""

    def __init__(self, farewell: tuple[Reason, str] | None) -> None:
        super().__init__("the connection ended")
        self.farewell = farewell


class Connection:
    """A connection to the process of rank ``peer``, handshakes done. One thread at a time reads; one writes.

    Args:
        sock: the socket, TLS or plain.
        peer: the rank at the other end.
        records: carry the data instead of the socket's own TLS.

    Attributes:
        peer: the rank at the other end.
        in_payload: whether a payload was begun and not finished, so that no goodbye can follow.
        ended: the peer has said an orderly goodbye; what it sent before may still be read.
        duplex: one thread may read while another writes; OpenSSL's own connections do not bear that.
    """

    def __init__(self, sock: socket.socket, peer: int, records: RecordLayer | None = None) -> None:
        sock.setblocking(False)
        not_for_children(sock)
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self._records = records
        self.in_payload = False
        self.ended = False
        self.duplex = records is not None or not isinstance(sock, ssl.SSLSocket)
        self._ahead = bytearray()
        self._last_word = ""
        self._blocked: memoryview | None = None
        self._piece = _PLAIN_PIECE
        self._read: Callable[[memoryview], int] = sock.recv_into
        self._write: Callable[[memoryview], int] = sock.send
        if records is not None:
            self._piece, self._read, self._write = RECORD_BYTES, records.read, records.write
        elif isinstance(sock, ssl.SSLSocket):
            self._piece, self._read, self._write = RECORD, partial(_tls_read, sock), sock.write

    def read_into(self, view: memoryview) -> int:
        """Reads what is there, at most one piece, into ``view``; 0 if nothing is.

        Raises:
            EndOfStreamError: nothing more will come.
        """
        if self._ahead:
            count = min(len(view), len(self._ahead))
            view[:count] = self._ahead[:count]
            del self._ahead[:count]
            return count
        if self.ended:
            raise EndOfStreamError((Reason.DONE, self._last_word))
        try:
            count = self._read(view)
        except _WOULD_BLOCK:
            return 0
        except OSError:
            raise EndOfStreamError(None) from None
        except RecordLayerError as error:
            raise EndOfStreamError((Reason.LOST, str(error))) from None
        if count == 0:
            raise EndOfStreamError(None)
        return count

    def unread(self, data: memoryview) -> None:
        """Gives back bytes that were read too far."""
        self._ahead[:0] = data

    def write(self, view: memoryview) -> int:
        """Writes what goes at once, at most one piece; 0 if nothing does. A retry must repeat the bytes.

        Another thread may read meanwhile.

        Raises:
            EndOfStreamError: the peer is gone; what it said last may still be read, by :meth:`read_ahead`.
        """
        piece = view if len(view) <= self._piece else view[: self._piece]
        try:
            count = self._write(piece)
        except _WOULD_BLOCK:
            count = 0
        except OSError:
            raise EndOfStreamError(None) from None
        self._blocked = None if count else piece
        return count

    def read_ahead(self) -> tuple[Reason, str] | None:
        """Reads all that is left after the peer has hung up, keeps it, and returns its goodbye."""
        view = memoryview(bytearray(RECORD))
        with contextlib.suppress(OSError, RecordLayerError):
            while len(self._ahead) < _MOST_AHEAD:
                count = self._read(view)
                if not count:
                    break
                self._ahead += view[:count]
        farewell = read_goodbye(bytes(self._ahead[-GOODBYE_BYTES:]))
        if farewell is not None:
            del self._ahead[-GOODBYE_BYTES:]
            self.ended, self._last_word = farewell[0] is Reason.DONE, farewell[1]
        return farewell

    def goodbye_from(self, head: bytes) -> tuple[Reason, str] | None:
        """The goodbye that begins with what was read last, if all of it is here; else reads no more."""
        if not head.startswith(MAGIC[: len(head)]):
            return None
        rest = memoryview(bytearray(GOODBYE_BYTES - len(head)))
        have = 0
        with contextlib.suppress(EndOfStreamError):
            while have < len(rest) and (count := self.read_into(rest[have:])):
                have += count
        farewell = read_goodbye(head + rest[:have])
        if farewell is None:
            self.unread(rest[:have])
        return farewell

    def close(self, reason: Reason, message: str = "") -> None:
        """Says goodbye, if the stream is at a place where it can be said, and closes."""
        if not self.in_payload:
            self._say(memoryview(goodbye(reason, message)), time.monotonic() + _GOODBYE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR if self.in_payload else socket.SHUT_WR)
        self.sock.close()
        self._read = self._write = _closed
        self._ahead.clear()
        if self._records is not None:
            self._records.close()

    def _say(self, rest: memoryview, until: float) -> None:
        if self._blocked is not None:
            return  # a record is half out: nothing can follow it in time
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        try:
            while rest:
                count = self.write(rest)
                rest = rest[count:]
                if not count and (
                    time.monotonic() > until or not poll.poll(1000 * (until - time.monotonic()))
                ):
                    return
        except (EndOfStreamError, ValueError):
            return


def _closed(_: memoryview) -> int:
    raise OSError(errno.EBADF, "the connection is closed")


def _tls_read(sock: ssl.SSLSocket, view: memoryview) -> int:
    return cast("int", sock.read(len(view), view))


# ---------------------------------------------------------------- several at once


class StoppedError(Exception):
    """The transfer was woken by another thread, which knows why."""


class DeadlinePassedError(Exception):
    """Not all came before the deadline; ``ranks`` are the peers waited for."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__("deadline passed")
        self.ranks = ranks


class PeerEndedError(Exception):
    """A peer hung up before all was there; ``farewell`` is what it said last, if anything."""

    def __init__(self, rank: int, farewell: tuple[Reason, str] | None) -> None:
        super().__init__("peer ended")
        self.rank = rank
        self.farewell = farewell


class Outgoing:
    """Views to send to one peer in order; ``ready`` says how many of them may go already."""

    def __init__(self, connection: Connection, views: Sequence[memoryview], ready: int | None = None) -> None:
        self.connection = connection
        self.views = list(views)
        self.ready = len(self.views) if ready is None else ready
        self._index = 0
        self._offset = 0
        self._began = False

    def precede(self, data: bytes) -> None:
        """Puts bytes in front of all the views."""
        self.views.insert(0, memoryview(data))
        self.ready += 1

    @property
    def finished(self) -> bool:
        """Whether all is sent."""
        return self._index >= len(self.views)

    @property
    def held(self) -> bool:
        """Whether nothing may be sent now."""
        return self._index >= min(self.ready, len(self.views))

    def move(self, burst: int = _BURST) -> bool:
        """Sends what goes, at most ``burst`` pieces; returns whether anything went."""
        moved = False
        for _ in range(burst):
            while not self.held and not self.views[self._index]:
                self._index += 1
            if self.held:
                break
            view = self.views[self._index]
            count = self.connection.write(view[self._offset :] if self._offset else view)
            if not count:
                break
            moved = self._began = True
            self._offset += count
            if self._offset == len(view):
                self._index, self._offset = self._index + 1, 0
        if self._began:
            self.connection.in_payload = not self.finished
        return moved


class Incoming:
    """Views to fill from one peer in order; ``filled(i)`` is called after the i-th is full."""

    def __init__(
        self,
        connection: Connection,
        views: Sequence[memoryview],
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self.connection = connection
        self.views = views
        self._filled = filled
        self._index = 0
        self._offset = 0
        self._is_short = sum(map(len, views)) <= GOODBYE_BYTES
        self._skip()

    @property
    def finished(self) -> bool:
        """Whether all is received."""
        return self._index >= len(self.views)

    def move(self, burst: int = _BURST) -> bool:
        """Receives what is there, at most ``burst`` pieces; returns whether anything was.

        Raises:
            EndOfStreamError: nothing more will come, or what came is a goodbye.
        """
        moved = False
        for _ in range(burst):
            if self.finished:
                break
            view = self.views[self._index]
            count = self.connection.read_into(view[self._offset :] if self._offset else view)
            if not count:
                break
            moved = True
            self._offset += count
            if self._offset == len(view):
                self._done()
                self._skip()
                if self.finished and self._is_short:
                    self._refuse_goodbye()
        return moved

    def _refuse_goodbye(self) -> None:
        """Checks that so few bytes are not the beginning of a goodbye, said in the place of data."""
        farewell = self.connection.goodbye_from(b"".join(self.views))
        if farewell is not None:
            raise EndOfStreamError(farewell)

    def farewell(self) -> tuple[Reason, str] | None:
        """The goodbye that came instead of data, if one did."""
        if self.finished or self._offset < GOODBYE_BYTES:
            return None
        return read_goodbye(bytes(self.views[self._index][self._offset - GOODBYE_BYTES : self._offset]))

    def _done(self) -> None:
        index = self._index
        self._index, self._offset = index + 1, 0
        if self._filled is not None:
            self._filled(index)

    def _skip(self) -> None:
        while not self.finished and not self.views[self._index]:
            self._done()


class FrameIn(Incoming):
    """One frame of blocks from one peer, of a length that only the frame itself says."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.kind = FrameKind.CALLS
        self.blocks: list[tuple[bytes, memoryview]] = []
        self._count = 0
        self._need = -1
        self._have = 0
        self._buffer = memoryview(bytearray(_FRAME_ROOM))
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the whole frame is there."""
        return self._finished

    def farewell(self) -> tuple[Reason, str] | None:
        """None: a goodbye is a frame, and raises when it is read."""
        return None

    def move(self, burst: int = _BURST) -> bool:
        """Receives what is there; returns whether anything was.

        Raises:
            EndOfStreamError: the frame is a goodbye.
            CommunicatorError: it is no frame.
        """
        moved = False
        while not self._finished:
            count = self.connection.read_into(self._buffer[self._have :])
            if not count:
                break
            moved = True
            self._have += count
            self._look()
        return moved

    def take_rest(self) -> None:
        """Receives what the peer sent before it hung up, which may be the whole frame."""
        with contextlib.suppress(EndOfStreamError):
            self.move()

    def _look(self) -> None:
        if self._need < 0:
            if self._have < FRAME.size:
                return
            self.kind, self._count, length = read_frame(self._buffer[: FRAME.size])
            self._need = FRAME.size + length
            if self._need > len(self._buffer):
                larger = memoryview(bytearray(self._need))
                larger[: self._have] = self._buffer[: self._have]
                self._buffer = larger
        if self._have < self._need:
            return
        if self._have > self._need:
            self.connection.unread(self._buffer[self._need : self._have])
        if self.kind is FrameKind.GOODBYE:
            raise EndOfStreamError(read_goodbye(bytes(self._buffer[: self._need])))
        self.blocks = read_blocks(self._buffer[FRAME.size : self._need], self._count)
        self._finished = True


class _Sender:
    """A thread that sends while another receives: sealing and copying run outside of Python, on two cores.

    It does one :meth:`Outgoing.move` at a time, so that all that is decided is decided in the other thread.
    """

    def __init__(self) -> None:
        self._begin: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        start_thread(self._serve, name="muster-tcp-send")

    def begin(self, stream: Outgoing) -> None:
        """Lets it send what goes."""
        self._begin.put(stream)

    def finish(self) -> bool:
        """Waits until it has; returns whether anything went.

        Raises:
            EndOfStreamError: the peer is gone.
        """
        outcome = self._done.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ends the thread."""
        self._begin.put(None)

    def _serve(self) -> None:
        while (stream := self._begin.get()) is not None:
            try:
                self._done.put(stream.move(_LONG_BURST))
            except Exception as error:
                self._done.put(error)


class Multiplexer:
    """Runs transfers of one communicator; another thread can stop it.

    Args:
        second_core: whether there is one for a second thread, which sends while this one receives.

    Attributes:
        watched: connections whose end is noticed even when nothing is expected from them.
    """

    def __init__(self, *, second_core: bool = True) -> None:
        self._second_core = second_core
        self.watched: dict[int, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._fd_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._check: Callable[[], None] | None = None
        self._sender: _Sender | None = None
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)

    def watch(self, connection: Connection) -> None:
        """Notices from now on when this peer hangs up."""
        self.watched[connection.peer] = connection
        self._by_fd[connection.fd] = connection
        self._poll.register(connection.fd, select.POLLRDHUP)

    def stop(self) -> None:
        """Makes the transfer under way, and every later one, raise :class:`StoppedError`. From any thread."""
        with self._fd_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Frees what the multiplexer holds; not the connections."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        with self._fd_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def check_while_waiting(self, check: Callable[[], None] | None) -> None:
        """Calls ``check``, which may raise, every 50 ms while waiting."""
        self._check = check

    def look(self) -> None:
        """Looks whether a peer has hung up while nothing is moved.

        Raises:
            PeerEndedError: one has, and not because it is done.
            StoppedError: :meth:`stop` was called.
        """
        for fd, _ in self._poll.poll(0):
            if fd == self._wake_fd:
                raise StoppedError
            self._hung_up(fd, ())

    def run(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        deadline: float,
        until: Incoming | None = None,
    ) -> None:
        """Moves all that is given.

        Args:
            outgoing: at most one stream per peer.
            incoming: at most one stream per peer.
            deadline: on the monotonic clock.
            until: return as soon as this one is finished, whatever is left of the others.

        Raises:
            DeadlinePassedError: some was not there in time.
            PeerEndedError: a peer hung up before all was there.
            StoppedError: :meth:`stop` was called.
        """
        streams: list[Outgoing | Incoming] = [*outgoing, *incoming]
        both = self._second_core and _is_long(outgoing, incoming)
        while True:
            moved = False
            if both and len(streams) == 2 and not outgoing[0].held:
                moved = self._move_both(outgoing[0], incoming[0])
            else:
                for stream in streams:
                    try:
                        moved = stream.move() or moved
                    except EndOfStreamError as end:
                        raise _ended(stream, end) from None
            waiting = [stream for stream in streams if not stream.finished]
            if not waiting or (until is not None and until.finished):
                return
            streams = waiting
            if not moved:
                self._wait(waiting, deadline)

    def _move_both(self, outgoing: Outgoing, incoming: Incoming) -> bool:
        """Sends in another thread while this one receives; returns whether anything moved."""
        if self._sender is None:
            self._sender = _Sender()
        failure: PeerEndedError | None = None
        moved = False
        self._sender.begin(outgoing)
        try:
            moved = incoming.move(_LONG_BURST)
        except EndOfStreamError as end:
            failure = _ended(incoming, end)
        finally:
            try:
                moved = self._sender.finish() or moved
            except EndOfStreamError as end:
                failure = failure or _ended(outgoing, end)
        if failure is not None:
            raise failure
        return moved

    def _wait(self, waiting: Iterable[Outgoing | Incoming], deadline: float) -> None:
        interest: dict[int, int] = {}
        for stream in waiting:
            fd = stream.connection.fd
            if isinstance(stream, Incoming):
                interest[fd] = interest.get(fd, 0) | select.POLLIN
            elif not stream.held:
                interest[fd] = interest.get(fd, 0) | select.POLLOUT
        for fd, events in interest.items():
            self._poll.modify(fd, events | select.POLLRDHUP)
        try:
            left = max(0.0, deadline - time.monotonic())
            ready = self._poll.poll(1000 * min(left, _SIGNALS_S if self._check is None else _CHECK_S))
        finally:
            for fd in interest:
                self._poll.modify(fd, select.POLLRDHUP)
        if not ready and self._check is not None:
            self._check()
        if not ready and time.monotonic() >= deadline:
            incoming = [s.connection.peer for s in waiting if isinstance(s, Incoming)]
            raise DeadlinePassedError(tuple(sorted(set(incoming or [s.connection.peer for s in waiting]))))
        for fd, events in ready:
            if fd == self._wake_fd:
                raise StoppedError
            if events & _CLOSED and not events & interest.get(fd, 0):
                self._hung_up(fd, waiting)

    def _hung_up(self, fd: int, waiting: Iterable[Outgoing | Incoming]) -> None:
        connection = self._by_fd[fd]
        farewell = connection.read_ahead()
        if not connection.ended:
            raise PeerEndedError(connection.peer, farewell)
        self._poll.unregister(fd)
        if any(s.connection is connection and isinstance(s, Outgoing) for s in waiting):
            raise PeerEndedError(connection.peer, farewell)


def _is_long(outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> bool:
    """Whether a second thread is worth its while, for a ring of many pieces, and may be."""
    one = len(outgoing) == len(incoming) == 1 and type(incoming[0]) is Incoming
    return (
        one
        and incoming[0].connection.duplex
        and min(len(outgoing[0].views), len(incoming[0].views)) >= _MANY_VIEWS
    )


def _ended(stream: Outgoing | Incoming, end: EndOfStreamError) -> PeerEndedError:
    """What is known of a peer that hung up, with what it said last."""
    farewell = end.farewell
    if farewell is None:
        farewell = stream.farewell() if isinstance(stream, Incoming) else stream.connection.read_ahead()
    return PeerEndedError(stream.connection.peer, farewell)
