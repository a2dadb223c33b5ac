"""What leaves for a worker: the messages that wait on its stream, and how that ends."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from muster.scheduler.core import events
from muster.scheduler.errors import SchedulerError, TooSlowError
from muster.wire import messages

if TYPE_CHECKING:
    from muster.scheduler.access import Caller

MAX_WAITING_MESSAGES = 256
MAX_WAITING_BYTES = 16 * 1024 * 1024


class EventSink(Protocol):
    """What takes the events of a stream: the driver of its job."""

    def carries(self, session: events.SessionId) -> bool:
        """Whether messages to this stream still leave by it."""

    def post(self, event: events.Event) -> None:
        """Takes an event."""

    async def submit(self, event: events.Event) -> str:
        """Takes an event; returns once it is carried out."""


@dataclass(frozen=True, slots=True)
class _Outgoing:
    parts: tuple[bytes, ...]
    size: int
    of_generation: bool
    assigns: int


@dataclass
class OutgoingStream:
    """A worker's stream with its bounded queue of outgoing messages.

    Nothing here waits: a peer that does not read fills its own queue and is dropped, and nobody else
    notices.

    Attributes:
        id: the number by which the job's machine knows the stream.
        caller: who the TLS layer says is at the other end.
        candidate: who the worker says it is, once its Join was allowed.
        driver: the job that must learn when the stream is lost; None before the Join and after the loss.
        closed: what the peer gets after the last message; None within ``over`` is a good end.
        takes_deltas: an assignment may build on the last one that was sent.
        held: the generation of that one; 0: none was sent.
        expiry_reported: the log has said that the peer's certificate ended.
        over: no further message is taken; what waits is still sent.
        dropped: set when the stream must end at once, sent or not.
        wake: set when there is something to send, or the end has come. Those on one connection share both.
    """

    id: events.SessionId
    caller: Caller
    job_id: str = ""
    candidate: messages.Candidate | None = None
    driver: EventSink | None = field(default=None, repr=False)
    generation: int = 0
    rank: int = -1
    takes_deltas: bool = False
    held: int = 0
    over: bool = False
    expiry_reported: bool = False
    closed: SchedulerError | None = None
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    wake: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _waiting: deque[_Outgoing] = field(default_factory=deque, repr=False)
    _waiting_bytes: int = 0

    def send(self, *parts: bytes, of_generation: bool = False, assigns: int = 0) -> None:
        """Queues one serialized message; drops the stream when it is too far behind.

        Args:
            parts: the message in pieces, joined only when it leaves: receivers of the same membership
                share the piece that holds it, so that a thousand queues do not hold it a thousand times.
            of_generation: the message is void once a newer generation exists.
            assigns: the generation that the message begins: void ones that still wait are dropped. 0: none.
        """
        if self.over:
            return
        if assigns:
            self._forget_void()
        size = sum(map(len, parts))
        if len(self._waiting) >= MAX_WAITING_MESSAGES or self._waiting_bytes + size > MAX_WAITING_BYTES:
            self.drop(TooSlowError(f"The worker does not read: {len(self._waiting)} messages wait for it."))
            return
        self._waiting.append(_Outgoing(parts, size, of_generation, assigns))
        self._waiting_bytes += size
        self.wake.set()

    def _forget_void(self) -> None:
        kept = [each for each in self._waiting if not each.of_generation]
        self._waiting = deque(kept)
        self._waiting_bytes = sum(each.size for each in kept)

    def close(self, error: SchedulerError | None = None) -> None:
        """Ends the stream once everything queued is sent; ``error`` is the status that the peer gets."""
        if not self.over:
            self.over, self.closed = True, error
            self.wake.set()

    def drop(self, error: SchedulerError) -> None:
        """Ends the stream at once."""
        self._waiting.clear()
        self.over, self.closed = True, error
        self.dropped.set()
        self.wake.set()

    async def has_next(self) -> bool:
        """Waits for a message to send; False after the last."""
        while not self._waiting:
            if self.over:
                return False
            self.wake.clear()
            await self.wake.wait()
        return True

    def next_size(self) -> int:
        """Bytes of the next message; 0 when none waits."""
        return self._waiting[0].size if self._waiting else 0

    async def next(self) -> bytes | None:
        """Waits for the next message to send; None after the last."""
        if not await self.has_next():
            return None
        return b"".join(self.take())

    def take(self) -> tuple[bytes, ...]:
        """The next message in its pieces; empty where none waits."""
        if not self._waiting:
            return ()
        outgoing = self._waiting.popleft()
        self._waiting_bytes -= outgoing.size
        self.held = outgoing.assigns or self.held
        return outgoing.parts
