"""Messages between two ranks of a group, by tag, which are independent of the group's collectives.

Torch's process groups use them. A communicator's own ``send`` and ``recv`` are different: they are calls in
order with its collectives, on the same connections, so that a rank that calls something else is found.

One thread sends and receives all messages of a group over separate connections, which are made when two ranks
first need them. As with Gloo, a send ends when the other side has called recv. A small message is sent at
once and waits there; a large one is offered, and sent when recv is called. So neither side holds unwanted
data. Messages of one pair and tag arrive in the order in which they were sent.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from muster.communicators.membership import Membership
from muster.communicators.tcp.connection import EndOfStreamError, PeerConnection
from muster.communicators.tcp.endpoint import Endpoint, dials
from muster.communicators.tcp.frames import (
    DTYPES,
    FRAME,
    GOODBYE_BYTES,
    MAGIC,
    Buffer,
    Reason,
    end_in_words,
    read_goodbye,
)
from muster.communicators.tcp.handshake import group_label, peer_name
from muster.communicators.tcp.pending_group import PendingGroup
from muster.communicators.tcp.transfer import Outgoing
from muster.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorError,
    PeerLostError,
)
from muster.wire.log_lines import one_line
from muster.wire.threads import start_thread

SMALL_BYTES = 32768
"""Messages up to this size, in bytes, are sent before the peer has called recv."""

MOST_WAITING_BYTES = 1 << 20
"""Bytes of small messages that may wait at one peer; further messages are offered."""

MOST_ARRIVED = 1 << 16
"""Maximum number of messages of one peer that may wait for a recv; a peer that exceeds it is dropped."""

USER, BARRIER = 0, 1
"""Channels: the program's messages, and those of a monitored barrier."""

_HEADER = struct.Struct("!4sBBBxiIQ")
"""Magic, kind, dtype, channel, tag, the sender's number of the message, and its size in bytes."""

_MAGIC = b"MusM"
_OFFER, _SMALL, _ACCEPT, _DATA, _TAKEN, _REFUSED = range(1, 7)
_LAST_WORDS = (_DATA, _TAKEN, _REFUSED)
_MOST_REFUSAL_BYTES = 4096
_ROUNDS = 16
_LONGEST_WAIT_S = 1.0


class Message:
    """One message to send or receive.

    Attributes:
        peer: the rank at the other end; -1: any rank, and after the first message the one that sent it.
    """

    def __init__(
        self, peer: int, channel: int, tag: int, dtype: str, view: memoryview, deadline: float, is_send: bool
    ) -> None:
        self.peer = peer
        self.channel = channel
        self.tag = tag
        self.dtype = dtype
        self.view = view
        self.deadline = deadline
        self.is_send = is_send
        self.number = -1
        self.is_small = False
        self.error: Exception | None = None
        self._is_settled = False
        self._done = threading.Event()
        self._callbacks: list[Callable[[Exception | None], None]] = []
        self._lock = threading.Lock()

    @property
    def key(self) -> tuple[int, int]:
        """Channel and tag, which must be the same at both ends."""
        return self.channel, self.tag

    def done(self) -> bool:
        """Whether the message has ended, successfully or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the message has ended; returns False if it has not in time."""
        return self._done.wait(timeout_s)

    def when_done(self, callback: Callable[[Exception | None], None]) -> None:
        """Calls ``callback`` with the error or None when the message ends; at once if it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self.error)

    def settle(self, error: Exception | None = None) -> None:
        """Fixes the message's outcome; it ends once the other side has been told.

        Otherwise a receiver that exits at once would look like a loss to the sender.
        """
        self._is_settled, self.error = True, error

    def end(self, error: Exception | None = None) -> None:
        """Ends the message, with the outcome of :meth:`settle` if that was called, else with this one."""
        with self._lock:
            if self._done.is_set():
                return
            if not self._is_settled:
                self.error = error
            self._done.set()
        for callback in self._callbacks:
            callback(self.error)


class _Arrived:
    """A message that a peer has sent or offered, and for which no recv was called here yet."""

    def __init__(self, peer: int, dtype: str, number: int, size: int, data: bytearray | None) -> None:
        self.peer = peer
        self.dtype = dtype
        self.number = number
        self.size = size
        self.data = data


class _PeerLine:
    """The connection to one peer, with its outgoing and incoming messages."""

    def __init__(self, connection: PeerConnection) -> None:
        self.connection = connection
        self.out: collections.deque[tuple[Outgoing, Message | None]] = collections.deque()
        self.header = memoryview(bytearray(GOODBYE_BYTES))
        self.header_size = _HEADER.size
        self.have = 0
        self.body: memoryview | None = None
        self.body_have = 0
        self.body_done: Callable[[], None] | None = None


class Messages:
    """All messages of this process within one group.

    Args:
        membership: the group.
        endpoint: makes and accepts connections.
        path: the group's name on the wire.
        timeout_s: the time limit of a message, in seconds.
        others: the group's other connections by rank. The end of one shows that a peer is gone, even before
            it has a connection for messages.
    """

    def __init__(
        self,
        membership: Membership,
        endpoint: Endpoint,
        *,
        path: str,
        timeout_s: float,
        others: Callable[[], Mapping[int, PeerConnection]],
    ) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._endpoint = endpoint
        self._others = others
        self._lock = threading.Lock()
        self._posted: list[Message] = []
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._fd_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pending_group = _WakingGroup(
            membership, group_label(membership, f"{path}/messages"), self._wake
        )
        # What follows belongs to the thread.
        self._lines: dict[int, _PeerLine] = {}
        self._dialed: dict[int, float] = {}  # until when to dial, by rank
        self._lost: dict[int, Exception] = {}
        self._left: set[int] = set()
        self._unsent: dict[int, list[Message]] = {}
        self._sent: dict[tuple[int, int], Message] = {}
        self._next_number: dict[int, int] = {}
        self._waiting_bytes: dict[int, int] = {}
        self._held: dict[int, tuple[int, int]] = {}  # by peer: messages and bytes that wait here
        self._wanted: list[Message] = []
        self._coming: dict[tuple[int, int], Message] = {}
        self._arrived: dict[tuple[int, int], list[_Arrived]] = {}
        if membership.world_size > 1:
            endpoint.gather(self._pending_group)

    def send(self, view: memoryview, peer: int, tag: int, dtype: str, channel: int = USER) -> Message:
        """Starts to send bytes, which must not change until the message has ended."""
        return self._post(Message(peer, channel, tag, dtype, view, self._deadline(), True))

    def receive(self, view: memoryview, peer: int, tag: int, dtype: str, channel: int = USER) -> Message:
        """Starts to receive into ``view`` from ``peer``; -1: from the rank that sends first."""
        return self._post(Message(peer, channel, tag, dtype, view, self._deadline(), False))

    def abort(self, error: Exception) -> None:
        """Ends all messages with an error, now and later."""
        with self._lock:
            self._error = self._error or error
            thread = self._thread
        self._wake()
        if thread is None:  # peers may have connected already, and wait
            self._finish()

    def close(self) -> None:
        """Ends the thread and the connections; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._error = self._error or CommunicatorAbortedError("The process group was destroyed.")
            thread = self._thread
        self._wake()
        if thread is None:
            self._finish()
        elif thread is not threading.current_thread():
            thread.join()

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout_s

    def _post(self, message: Message) -> Message:
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._posted.append(message)
            if self._thread is None:
                self._thread = start_thread(self._run, name="muster-messages")
        self._wake()
        return message

    def _wake(self) -> None:
        with self._fd_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._error is None:
                self._take_up()
                moved = self._move_all()
                self._note_time()
                self._wait(0.0 if moved else self._pause())
        except Exception as error:  # all messages would wait for ever
            self._error = self._error or CommunicatorError(
                f"Messages failed: {type(error).__name__}: {error}"
            )
        finally:
            self._finish()

    def _finish(self) -> None:
        error = self._error
        assert error is not None
        self._endpoint.forget(self._pending_group)
        reason = Reason.DONE if self._closed else Reason.ABORTED
        lines = {rank: line.connection for rank, line in self._lines.items()}
        for connection in {**self._pending_group.arrived, **lines}.values():
            connection.close(reason, "" if self._closed else str(error))
        with self._lock:
            posted, self._posted = self._posted, []
        for message in [*posted, *self._open_messages()]:
            message.end(error)
        with self._fd_lock:
            if self._wake_fd >= 0:  # an abort may have closed it before
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _open_messages(self) -> Iterable[Message]:
        unsent = [each for messages in self._unsent.values() for each in messages]
        going = [each for line in self._lines.values() for _, each in line.out if each and not each.done()]
        return [*unsent, *self._sent.values(), *self._wanted, *self._coming.values(), *going]

    def _take_up(self) -> None:
        """Handles new messages and new connections."""
        with self._lock:
            posted, self._posted = self._posted, []
        with self._pending_group.changed:
            arrived = {
                rank: link for rank, link in self._pending_group.arrived.items() if rank not in self._lines
            }
            failures = dict(self._pending_group.failures)
        for rank, connection in arrived.items():
            self._lines[rank] = _PeerLine(connection)
            for message in self._unsent.pop(rank, ()):
                self._begin(message)
        for rank, failure in failures.items():
            self._lose(rank, failure)
        for message in posted:
            self._accept_post(message)

    def _accept_post(self, message: Message) -> None:
        if not message.is_send:
            self._call_for(message)
            if message.peer < 0:
                self._connect_for(message)
                if not message.done() and (gone := self._nobody_may_send()) is not None:
                    self._drop(message, gone)
                return
        lost = self._lost.get(message.peer)
        if lost is not None:
            self._drop(message, lost)
            return
        if message.is_send and message.peer in self._lines:
            self._begin(message)
        elif message.is_send:
            self._unsent.setdefault(message.peer, []).append(message)
        self._connect_for(message)

    def _connect_for(self, message: Message) -> None:
        """Dials the peers that a message needs, if this side has to dial and has not done so."""
        me, now = self.membership.rank, time.monotonic()
        for rank in range(self.membership.world_size) if message.peer < 0 else (message.peer,):
            known = rank == me or rank in self._lines or rank in self._lost
            if not known and dials(me, rank) and self._dialed.get(rank, 0.0) <= now:
                self._dialed[rank] = message.deadline
                self._endpoint.dial(self._pending_group, rank, message.deadline)

    # ------------------------------------------------------------ sending

    def _begin(self, message: Message) -> None:
        """Sends a small message, or offers a large one."""
        peer = message.peer
        message.number = self._next_number.get(peer, 0)
        self._next_number[peer] = message.number + 1
        self._sent[peer, message.number] = message
        waiting, size = self._waiting_bytes.get(peer, 0), len(message.view)
        small = size <= SMALL_BYTES and waiting + size <= MOST_WAITING_BYTES
        message.is_small = small
        if small:
            self._waiting_bytes[peer] = waiting + size
            self._say(peer, _SMALL, message, message.number, size, message.view)
        else:
            self._say(peer, _OFFER, message, message.number, size)

    def _say(
        self, peer: int, kind: int, message: Message, number: int, size: int, content: Buffer = b""
    ) -> None:
        """Queues a notice about a message, with its data; some notices end the message on this side."""
        dtype, channel = DTYPES.index(message.dtype), message.channel
        header = _HEADER.pack(_MAGIC, kind, dtype, channel, message.tag, number, size)
        if len(content) <= SMALL_BYTES:  # a copy costs less than a record of its own
            views = [memoryview(header + content)]
        else:
            views = [memoryview(header), memoryview(content)]
        line = self._lines[peer]
        line.out.append((Outgoing(line.connection, views), message if kind in _LAST_WORDS else None))

    # ------------------------------------------------------------ receiving

    def _call_for(self, message: Message) -> None:
        """Takes the first matching message that has arrived, or waits for one."""
        arrived = self._arrived.get(message.key, [])
        for each in arrived:
            if message.peer in (-1, each.peer):
                arrived.remove(each)
                self._hold(each, -1)
                self._match(message, each)
                return
        self._wanted.append(message)

    def _arrive(self, key: tuple[int, int], arrived: _Arrived) -> None:
        for message in self._wanted:
            if message.key == key and message.peer in (-1, arrived.peer):
                self._wanted.remove(message)
                self._match(message, arrived)
                return
        self._arrived.setdefault(key, []).append(arrived)
        self._hold(arrived, 1)

    def _hold(self, arrived: _Arrived, change: int) -> None:
        """Counts messages that wait here for a recv; the peer also counts them, and respects the limit."""
        count, size = self._held.get(arrived.peer, (0, 0))
        count, size = count + change, size + change * len(arrived.data or b"")
        self._held[arrived.peer] = count, size
        if count > MOST_ARRIVED or size > MOST_WAITING_BYTES:
            raise CommunicatorError(
                f"{self._name(arrived.peer)} has sent too much for which no recv was called here: {count}"
                f" messages, {size} bytes."
            )

    def _match(self, message: Message, arrived: _Arrived) -> None:
        peer = message.peer = arrived.peer
        if (arrived.size, arrived.dtype) != (len(message.view), message.dtype):
            name, other = (peer_name(self.membership.peers[r]) for r in (self.membership.rank, peer))
            error = CollectiveMismatchError(
                f"{other} has sent {arrived.size} bytes of {arrived.dtype} with tag {message.tag}, and {name}"
                f" has called for {len(message.view)} bytes of {message.dtype}.",
                remedy="send and recv must have the same shape and dtype.",
            )
            message.settle(error)
            self._refuse(peer, message, arrived.number, error)
        elif arrived.data is None:
            self._coming[peer, arrived.number] = message
            self._say(peer, _ACCEPT, message, arrived.number, 0)
        else:
            message.view[:] = arrived.data
            message.settle()
            self._say(peer, _TAKEN, message, arrived.number, arrived.size)

    def _refuse(self, peer: int, message: Message, number: int, error: CollectiveMismatchError) -> None:
        text = error.message.encode()[:_MOST_REFUSAL_BYTES]
        self._say(peer, _REFUSED, message, number, len(text), text)

    # ------------------------------------------------------------ bytes

    def _move_all(self) -> bool:
        moved = False
        for peer, line in list(self._lines.items()):
            if peer in self._lost:
                continue
            try:
                moved = self._read(peer, line) or moved
                moved = self._write(line) or moved
            except EndOfStreamError as end:
                farewell = end.farewell or line.connection.read_ahead()
                in_order = farewell is not None and farewell[0] is Reason.DONE
                self._lose(peer, self._ended(peer, farewell), in_order=in_order)
            except CommunicatorError as error:
                self._lose(peer, error)
        return moved

    def _write(self, line: _PeerLine) -> bool:
        moved = False
        while line.out:
            stream, message = line.out[0]
            moved = stream.move(_ROUNDS) or moved
            if not stream.finished:
                break
            line.out.popleft()
            if message is not None:
                message.end()
        return moved

    def _read(self, peer: int, line: _PeerLine) -> bool:
        moved = False
        for _ in range(_ROUNDS):
            body = line.body
            if body is not None:
                if line.body_have < len(body):
                    count = line.connection.read_into(body[line.body_have :])
                    if not count:
                        break
                    line.body_have += count
                    moved = True
                if line.body_have == len(body):
                    done, line.body, line.body_done = line.body_done, None, None
                    assert done is not None
                    done()
                continue
            count = line.connection.read_into(line.header[line.have : line.header_size])
            if not count:
                break
            moved = True
            line.have += count
            if line.have == line.header_size:
                self._heard(peer, line)
        return moved

    def _heard(self, peer: int, line: _PeerLine) -> None:
        header = bytes(line.header[: line.have])
        if header.startswith(MAGIC):  # a goodbye, which is longer
            if line.have < GOODBYE_BYTES:
                line.header_size = GOODBYE_BYTES
                return
            raise EndOfStreamError(read_goodbye(header))
        line.have = 0
        magic, kind, dtype_index, channel, tag, number, size = _HEADER.unpack(header)
        if magic != _MAGIC or dtype_index >= len(DTYPES):
            raise CommunicatorError(f"{self._name(peer)} has sent what is no message.")
        dtype, key = DTYPES[dtype_index], (channel, tag)
        if kind == _OFFER:
            self._arrive(key, _Arrived(peer, dtype, number, size, None))
        elif kind == _SMALL and size <= SMALL_BYTES:
            data = bytearray(size)
            arrived = _Arrived(peer, dtype, number, size, data)
            self._expect(line, memoryview(data), lambda: self._arrive(key, arrived))
        elif kind == _ACCEPT and self._has_sent(peer, number, small=False):
            message = self._sent.pop((peer, number))
            self._say(peer, _DATA, message, number, len(message.view), message.view)
        elif kind == _TAKEN and self._has_sent(peer, number, small=True):
            self._no_longer_sent(peer, number).end()
        elif kind == _DATA and (peer, number) in self._coming:
            if not fills(self._coming[peer, number].view, size):
                raise CommunicatorError(f"{self._name(peer)} has sent another size than it had offered.")
            coming = self._coming[peer, number]

            def filled() -> None:
                del self._coming[peer, number]
                coming.end()

            self._expect(line, coming.view, filled)
        elif kind == _REFUSED and size <= _MOST_REFUSAL_BYTES and (peer, number) in self._sent:
            refused, text = self._no_longer_sent(peer, number), bytearray(size)
            self._expect(
                line,
                memoryview(text),
                lambda: refused.end(CollectiveMismatchError(one_line(text.decode(errors="replace")))),
            )
        else:
            raise CommunicatorError(f"{self._name(peer)} has sent a message that is out of step.")

    def _has_sent(self, peer: int, number: int, *, small: bool) -> bool:
        message = self._sent.get((peer, number))
        return message is not None and message.is_small == small

    def _no_longer_sent(self, peer: int, number: int) -> Message:
        message = self._sent.pop((peer, number))
        if message.is_small:
            self._waiting_bytes[peer] -= len(message.view)
        return message

    def _expect(self, line: _PeerLine, body: memoryview, done: Callable[[], None]) -> None:
        line.body, line.body_have, line.body_done = body, 0, done

    # ------------------------------------------------------------ waiting, and what went wrong

    def _pause(self) -> float:
        deadlines = [message.deadline for message in self._open_messages()]
        until = min(deadlines, default=time.monotonic() + _LONGEST_WAIT_S)
        return max(0.0, min(_LONGEST_WAIT_S, until - time.monotonic()))

    def _wait(self, pause_s: float) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for peer, line in self._lines.items():
            if peer not in self._lost:
                poll.register(line.connection.fd, select.POLLIN | (select.POLLOUT if line.out else 0))
        watched = {}
        awaited = {message.peer for message in self._open_messages()}
        everybody = -1 in awaited
        for peer, connection in self._others().items():
            known = peer in self._lines or peer in self._lost
            if not known and (everybody or peer in awaited) and connection.sock.fileno() >= 0:
                watched[connection.fd] = peer
                poll.register(connection.fd, select.POLLRDHUP)
        for fd, events in poll.poll(1000 * pause_s):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd in watched and events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                self._take_up()  # the peer may have connected and sent before it left
                if watched[fd] not in self._lines:
                    self._lose(watched[fd], self._ended(watched[fd], None))

    def _note_time(self) -> None:
        now = time.monotonic()
        for message in self._open_messages():
            peer = message.peer
            if now < message.deadline:
                self._connect_for(message)  # an older message's dialing may have ended
                continue
            partner = self._name(peer) if peer >= 0 else "any rank"
            what = (
                f"send with tag {message.tag} to" if message.is_send else f"recv with tag {message.tag} from"
            )
            note = self._pending_group.notes.get(peer, "") if peer not in self._lines else ""
            error = CollectiveTimeoutError(
                f"{what} {partner} in group {self.membership.group!r} did not end in {self.timeout_s:g} s"
                + (f" [{note}]." if note else "."),
                remedy="See that worker's log, or raise the group's timeout.",
            )
            if (peer, message.number) in self._coming or message.number >= 0:
                self._lose(peer, error)  # the other side may be in the middle of this message
            else:
                self._drop(message, error)

    def _drop(self, message: Message, error: Exception) -> None:
        if message in self._wanted:
            self._wanted.remove(message)
        unsent = self._unsent.get(message.peer, [])
        if message in unsent:
            unsent.remove(message)
        message.end(error)

    def _nobody_may_send(self) -> Exception | None:
        """Returns why a receive from any rank cannot succeed: a peer failed, or all left. None: it can."""
        broken = next((self._lost[peer] for peer in self._lost if peer not in self._left), None)
        if broken is None and len(self._lost) == self.membership.world_size - 1:
            broken = next(iter(self._lost.values()), None)
        return broken

    def _lose(self, peer: int, error: Exception, *, in_order: bool = False) -> None:
        """Ends the messages of a lost peer, and receives from any rank."""
        if peer in self._lost:
            return
        self._lost[peer] = error
        if in_order:
            self._left.add(peer)
        line = self._lines.get(peer)
        if line is not None:
            line.connection.in_payload = True  # nothing more can be said on it
            line.connection.close(Reason.FAILED)
        whose = (peer,) if self._nobody_may_send() is None else (peer, -1)
        ended = [*self._unsent.pop(peer, ()), *(each for each in self._wanted if each.peer in whose)]
        for held in (self._sent, self._coming):
            ended += [held.pop(place) for place in list(held) if place[0] == peer]
        if line is not None:
            ended += [message for _, message in line.out if message is not None]
            line.out.clear()
        for message in ended:
            self._drop(message, error)

    def _ended(self, peer: int, farewell: tuple[Reason, str] | None) -> Exception:
        reason, text = farewell or (Reason.LOST, "")
        how = end_in_words(reason, text)
        where = f"group {self.membership.group!r} of generation {self.membership.generation}"
        return PeerLostError(f"The connection to {self._name(peer)} in {where} {how}.", rank=peer)

    def _name(self, peer: int) -> str:
        return peer_name(self.membership.peers[peer])


def fills(view: memoryview, size: int) -> bool:
    """Whether ``size`` bytes fill ``view`` exactly: a longer message would run into the next one."""
    return size == len(view)


class _WakingGroup(PendingGroup):
    """A group that wakes the messages' thread when a peer has connected."""

    def __init__(self, membership: Membership, label: bytes, wake: Callable[[], None]) -> None:
        super().__init__(membership, label)
        self._wake_up = wake

    def arrive(self, connection: PeerConnection) -> None:
        """See :class:`PendingGroup`."""
        super().arrive(connection)
        self._wake_up()

    def fail(self, rank: int, error: Exception) -> None:
        """See :class:`PendingGroup`."""
        super().fail(rank, error)
        self._wake_up()


assert _HEADER.size < GOODBYE_BYTES and FRAME.size <= _HEADER.size
