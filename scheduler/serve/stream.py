"""One worker's stream as the scheduler sees it: who is at its other end and what waits to be sent."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from muster.scheduler.core import events as e
from muster.scheduler.core import messages as v
from muster.scheduler.errors import SchedulerError, TooSlowError

if TYPE_CHECKING:
    from muster.scheduler.serve.access import Caller

MAX_WAITING_MESSAGES = 256
MAX_WAITING_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Outgoing:
    parts: tuple[bytes, ...]
    size: int
    of_generation: bool


class Driver(Protocol):
    """What a stream needs of the driver of its job."""

    sessions: dict[v.SessionId, Session]

    def post(self, event: e.Event) -> object:
        """Feeds the job's machine; does not wait."""

    async def submit(self, event: e.Event) -> str:
        """Feeds the job's machine and waits until its decision is carried out; returns why."""


@dataclass
class Session:
    """A stream with its bounded queue of outgoing messages.

    Nothing here waits: a peer that does not read fills its own queue and is dropped, and nobody else
    notices.

    Attributes:
        id: the number by which the job's machine knows the stream.
        caller: who the TLS layer says is at the other end.
        candidate: who the worker says it is, once its Join was allowed.
        driver: the job that must be told when the stream is lost; None before the Join and after the loss.
        closed: what to tell the peer after the last message; None within ``over`` is a good end.
        expiry_reported: the log has said that the peer's certificate ended.
        over: no further message is taken; what waits is still sent.
        dropped: set when the stream must end at once, sent or not.
    """

    id: v.SessionId
    caller: Caller
    job_id: str = ""
    candidate: v.Candidate | None = None
    driver: Driver | None = field(default=None, repr=False)
    generation: int = 0
    rank: int = -1
    over: bool = False
    expiry_reported: bool = False
    closed: SchedulerError | None = None
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: deque[_Outgoing] = field(default_factory=deque, repr=False)
    _waiting_bytes: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def send(self, *parts: bytes, of_generation: bool = False, supersedes: bool = False) -> None:
        """Queues one serialized message; drops the session when it is too far behind.

        Args:
            parts: the message in pieces, joined only when it leaves: receivers of the same membership
                share the piece that holds it, so that a thousand queues do not hold it a thousand times.
            of_generation: the message is void once a newer generation exists.
            supersedes: the message begins a newer generation: void ones that still wait are dropped.
        """
        if self.over:
            return
        if supersedes:
            self._forget_void()
        size = sum(map(len, parts))
        if len(self._waiting) >= MAX_WAITING_MESSAGES or self._waiting_bytes + size > MAX_WAITING_BYTES:
            self.drop(TooSlowError(f"The worker does not read: {len(self._waiting)} messages wait for it."))
            return
        self._waiting.append(_Outgoing(parts, size, of_generation))
        self._waiting_bytes += size
        self._wake.set()

    def _forget_void(self) -> None:
        kept = [each for each in self._waiting if not each.of_generation]
        self._waiting = deque(kept)
        self._waiting_bytes = sum(each.size for each in kept)

    def close(self, error: SchedulerError | None = None) -> None:
        """Ends the stream once everything queued is sent; ``error`` is the status that the peer gets."""
        if not self.over:
            self.over, self.closed = True, error
            self._wake.set()

    def drop(self, error: SchedulerError) -> None:
        """Ends the stream at once."""
        self._waiting.clear()
        self.over, self.closed = True, error
        self.dropped.set()
        self._wake.set()

    async def has_next(self) -> bool:
        """Waits for a message to send; False after the last."""
        while not self._waiting:
            if self.over:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    def next_size(self) -> int:
        """Bytes of the next message; 0 when none waits."""
        return self._waiting[0].size if self._waiting else 0

    async def next(self) -> bytes | None:
        """Waits for the next message to send; None after the last."""
        if not await self.has_next():
            return None
        outgoing = self._waiting.popleft()
        self._waiting_bytes -= outgoing.size
        return b"".join(outgoing.parts)
