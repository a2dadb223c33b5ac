"""Outgoing messages of a worker's stream, and how the stream ends."""

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
    """Takes the events of a stream, as the driver of the stream's job does."""

    def carries(self, session: events.SessionId) -> bool:
        """Whether this session was admitted and has not been sent its last message yet."""

    def post(self, event: events.Event) -> None:
        """Takes an event."""

    async def submit(self, event: events.Event) -> str:
        """Takes an event; returns once it has been carried out."""


@dataclass(frozen=True, slots=True)
class _Outgoing:
    parts: tuple[bytes, ...]
    size: int
    of_generation: bool
    assigns: int


@dataclass
class OutgoingStream:
    """A worker's stream with its bounded queue of outgoing messages.

    Sending never waits. A peer that does not read fills its own queue and is then dropped, which does not
    affect other peers.

    Attributes:
        id: the number by which the job's machine knows the stream.
        caller: the peer's identity according to TLS.
        candidate: the worker's own description, once its Join was allowed.
        driver: the job that must be told when the stream is lost; None before the Join and after the loss.
        closed: the error that the peer gets after the last message; None for a normal end.
        takes_deltas: whether an assignment may be sent as its difference from the last one.
        held: the generation of the last assignment sent; 0 if none was sent.
        expiry_reported: whether the log has said that the peer's certificate has expired.
        over: whether the stream accepts no further messages; the waiting ones are still sent.
        dropped: set when the stream must end immediately, even if messages are still waiting.
        wake: set when there is a message to send, or the stream is to end. Sessions that share a host's
            stream share ``dropped`` and ``wake``.
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
            parts: the message in pieces, which are joined when it is sent. All workers that get the same
                membership share the piece that contains it, so that a thousand queues hold it only once.
            of_generation: whether the message belongs to one generation, so that it is void in the next one.
            assigns: the generation that the message assigns, 0 if none. Void messages of earlier generations
                that are still waiting are then dropped.
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
        """Ends the stream immediately."""
        self._waiting.clear()
        self.over, self.closed = True, error
        self.dropped.set()
        self.wake.set()

    async def has_next(self) -> bool:
        """Waits for a message to send; returns False after the last one."""
        while not self._waiting:
            if self.over:
                return False
            self.wake.clear()
            await self.wake.wait()
        return True

    def next_size(self) -> int:
        """The size of the next message in bytes; 0 if none is waiting."""
        return self._waiting[0].size if self._waiting else 0

    async def next(self) -> bytes | None:
        """Waits for the next message to send and returns it; None after the last one."""
        if not await self.has_next():
            return None
        return b"".join(self.take())

    def take(self) -> tuple[bytes, ...]:
        """Removes and returns the next message, in pieces; empty if none is waiting."""
        if not self._waiting:
            return ()
        outgoing = self._waiting.popleft()
        self._waiting_bytes -= outgoing.size
        self.held = outgoing.assigns or self.held
        return outgoing.parts
