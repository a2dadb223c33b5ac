"""The uplink's batches to the scheduler: messages are sent immediately, heartbeats are collected."""

from __future__ import annotations

from collections import deque

from muster.wire.messages import Value

BATCH_BYTES = 256 * 1024
"""The largest batch in bytes, except that a single message may be larger."""

MAX_WAITING = 64
"""How many messages of one worker may wait; beyond that, its stream is not read."""


class Sent(Value):
    """A worker's serialized message."""

    secret_fields = ("message",)

    worker: int
    message: bytes


class StreamEnded(Value):
    """A worker's stream has ended without a Leave; ``may_return``: the worker continues on another stream."""

    worker: int
    detail: str = ""
    may_return: bool = False


Item = Sent | StreamEnded


class Batches:
    """The messages that wait to be sent, by worker.

    A heartbeat waits for the heartbeats of the other workers, because one message for eight workers costs the
    scheduler a quarter of eight messages. It waits at most until one of the waiting workers sends its next
    heartbeat, which is one heartbeat interval. If a worker sends no more heartbeats, the others wait for it
    only once.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Item]] = {}
        self._beats: set[int] = set()  # Workers with a waiting heartbeat.
        self._beating: set[int] = set()  # Workers with a heartbeat in the last batch of heartbeats.
        self._urgent = False

    def add(self, worker: int, message: bytes, *, heartbeat: bool) -> None:
        """Adds a worker's message; messages of one worker stay in order."""
        if heartbeat:
            self._urgent = self._urgent or worker in self._beats
            self._beats.add(worker)
        else:
            self._urgent = True
        self._waiting.setdefault(worker, deque()).append(Sent(worker, message))

    def end(self, worker: int, detail: str, *, may_return: bool) -> None:
        """Adds the end of a worker's stream; no message of it may follow."""
        self._urgent = True
        self._beating.discard(worker)
        self._beats.discard(worker)
        self._waiting.setdefault(worker, deque()).append(StreamEnded(worker, detail, may_return))

    def forget(self, worker: int) -> None:
        """Drops a worker's messages, because the scheduler has ended its session."""
        self._waiting.pop(worker, None)
        self._beating.discard(worker)
        self._beats.discard(worker)

    def has_room(self, worker: int) -> bool:
        """Whether another message of this worker is accepted."""
        return len(self._waiting.get(worker, ())) < MAX_WAITING

    @property
    def due(self) -> bool:
        """Whether something must be sent now."""
        return self._urgent or (bool(self._beats) and self._beats >= self._beating)

    def take(self) -> list[Item]:
        """Takes the next batch: from each worker in turn, so that none delays the others."""
        items: list[Item] = []
        size = 0
        while self._waiting and size < BATCH_BYTES:
            for worker, waiting in list(self._waiting.items()):
                item = waiting[0]
                length = len(item.message) if isinstance(item, Sent) else len(item.detail)
                if items and size + length > BATCH_BYTES:
                    size = BATCH_BYTES
                    break
                items.append(waiting.popleft())
                size += length
                if not waiting:
                    del self._waiting[worker]
        self._urgent = bool(self._waiting)
        if self._beats:
            self._beating, self._beats = self._beats, set()
        return items
