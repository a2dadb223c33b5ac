"""Transfers bytes on several connections at once, under one deadline.

One thread does all transfers. A stream is a list of memory views to be sent or filled in order. ``Outgoing``
views may be held back until they are ready, and ``Incoming`` views call a function when full. So rings
pipeline themselves.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from muster.communicators.tcp.connection import EndOfStreamError, PeerConnection
from muster.communicators.tcp.frames import (
    FRAME,
    GOODBYE_BYTES,
    FrameKind,
    Reason,
    read_blocks,
    read_frame,
    read_goodbye,
)
from muster.wire.threads import start_thread

_BURST = 4
"""Number of pieces moved in one direction before it is the other direction's turn."""

_LONG_BURST = 8
"""The same number if each direction has a thread of its own."""

_MANY_VIEWS = 2
"""Number of pieces, of at most 512 KiB, from which each direction has a thread of its own."""

_CHECK_S = 0.05
_SIGNALS_S = 0.5
"""Longest single wait, in seconds: signals are handled between two waits."""

_FRAME_ROOM = 16384 + 256

_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class StoppedError(Exception):
    """Another thread has stopped the transfer, and knows why."""


class DeadlinePassedError(Exception):
    """The deadline passed before everything was transferred; ``ranks`` are the peers still waited for."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__("deadline passed")
        self.ranks = ranks


class PeerEndedError(Exception):
    """A peer hung up before everything was transferred; ``farewell`` is its goodbye, if it sent one."""

    def __init__(self, rank: int, farewell: tuple[Reason, str] | None) -> None:
        super().__init__("peer ended")
        self.rank = rank
        self.farewell = farewell


class Outgoing:
    """Views to send to one peer in order; ``ready`` returns how many of them may be sent already."""

    def __init__(
        self, connection: PeerConnection, views: Sequence[memoryview], ready: int | None = None
    ) -> None:
        self.connection = connection
        self.views = list(views)
        self.ready = len(self.views) if ready is None else ready
        self._index = 0
        self._offset = 0
        self._began = False

    def precede(self, data: bytes) -> None:
        """Inserts bytes before all the views."""
        self.views.insert(0, memoryview(data))
        self.ready += 1

    @property
    def finished(self) -> bool:
        """Whether all views are sent."""
        return self._index >= len(self.views)

    @property
    def held(self) -> bool:
        """Whether nothing may be sent now."""
        return self._index >= min(self.ready, len(self.views))

    def move(self, burst: int = _BURST) -> bool:
        """Sends what the socket accepts, at most ``burst`` pieces; returns whether anything was sent."""
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
        connection: PeerConnection,
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
        """Whether all views are filled."""
        return self._index >= len(self.views)

    def move(self, burst: int = _BURST) -> bool:
        """Receives available bytes, at most ``burst`` pieces; returns whether anything was received.

        Raises:
            EndOfStreamError: the stream has ended, or a goodbye was received.
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
        """Checks that these few bytes are not the beginning of a goodbye that came instead of data."""
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
    """One frame of blocks from one peer; the frame itself gives its length."""

    def __init__(self, connection: PeerConnection) -> None:
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
        """Whether the whole frame was received."""
        return self._finished

    def farewell(self) -> tuple[Reason, str] | None:
        """Always None: a goodbye is a frame, and raises when it is read."""
        return None

    def move(self, burst: int = _BURST) -> bool:
        """Receives available bytes; returns whether anything was received.

        Raises:
            EndOfStreamError: the frame is a goodbye.
            CommunicatorError: the bytes are not a frame.
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
    """A thread that sends while another receives: sealing and copying release the interpreter's lock.

    It does one :meth:`Outgoing.move` at a time, so that every decision is made in the other thread.
    """

    def __init__(self) -> None:
        self._begin: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        start_thread(self._serve, name="muster-tcp-send")

    def begin(self, stream: Outgoing) -> None:
        """Starts one round of sending."""
        self._begin.put(stream)

    def finish(self) -> bool:
        """Waits for the round of sending; returns whether anything was sent.

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
        second_core: whether there is a core for a second thread, which sends while this one receives.

    Attributes:
        watched: connections whose end is noticed even when nothing is expected from them.
    """

    def __init__(self, *, second_core: bool = True) -> None:
        self._second_core = second_core
        self.watched: dict[int, PeerConnection] = {}
        self._by_fd: dict[int, PeerConnection] = {}
        self._fd_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._check: Callable[[], None] | None = None
        self._sender: _Sender | None = None
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)

    def watch(self, connection: PeerConnection) -> None:
        """Notices from now on when this peer hangs up."""
        self.watched[connection.peer] = connection
        self._by_fd[connection.fd] = connection
        self._poll.register(connection.fd, select.POLLRDHUP)

    def stop(self) -> None:
        """Makes the current and all later transfers raise :class:`StoppedError`. Callable from any thread."""
        with self._fd_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Frees the multiplexer's resources; the connections stay open."""
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
        """Checks whether a peer has hung up while nothing is transferred.

        Raises:
            PeerEndedError: a peer has hung up without having finished.
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
        """Runs all given transfers.

        Args:
            outgoing: at most one stream per peer.
            incoming: at most one stream per peer.
            deadline: on the monotonic clock.
            until: the stream at whose end to return, even if others are not finished.

        Raises:
            DeadlinePassedError: the deadline passed first.
            PeerEndedError: a peer hung up before all was transferred.
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
        """Sends in another thread while this one receives; returns whether anything was transferred."""
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
    """Whether a second thread is worthwhile (a ring of many pieces) and possible."""
    one = len(outgoing) == len(incoming) == 1 and type(incoming[0]) is Incoming
    return (
        one
        and incoming[0].connection.duplex
        and min(len(outgoing[0].views), len(incoming[0].views)) >= _MANY_VIEWS
    )


def _ended(stream: Outgoing | Incoming, end: EndOfStreamError) -> PeerEndedError:
    """Returns the error for a peer that closed the connection, with its last message."""
    farewell = end.farewell
    if farewell is None:
        farewell = stream.farewell() if isinstance(stream, Incoming) else stream.connection.read_ahead()
    return PeerEndedError(stream.connection.peer, farewell)
