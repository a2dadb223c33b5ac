"""Serves the sessions of many workers on one stream, which their host's uplink opens.

Each worker has a session, as if it had a stream of its own, and the job sees no difference. The workers share
the connection, the handshake, and messages that go to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from muster.scheduler.access import Caller
from muster.scheduler.core import events
from muster.scheduler.errors import (
    LimitError,
    MalformedError,
    SchedulerError,
    StoppingError,
    TooSlowError,
    UnauthenticatedError,
    begin_stream,
    end_call,
    status_of,
)
from muster.scheduler.jobs.stream import EventSink, OutgoingStream
from muster.scheduler.serve.sessions import LARGE_MESSAGE_BYTES, Context, Sessions
from muster.wire.log_lines import one_line
from muster.wire.v1 import host_pb2 as pb

SERVICE = "rendezvous.v1.HostStream"
MAX_ITEMS = 4096
MAX_DETAIL = 500
BATCH_BYTES = 1 << 20
"""A batch is sent when it has this many bytes; a single message may be larger."""

HOST_STREAM_ENDED = "its host's stream ended"
_DROPS = (TooSlowError, UnauthenticatedError)
"""Errors that end the whole host's stream, not only one worker's session."""

_ForJob = tuple[EventSink, events.Event]


class HostStreams:
    """Serves ``rendezvous.v1.HostStream``.

    Args:
        sessions: counts the workers' sessions and converts their messages to events of their jobs.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's handlers for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE, {"Open": grpc.stream_stream_rpc_method_handler(self.open)}
        )

    async def open(self, _requests: object, context: Context) -> None:
        """Serves one host's stream from its first worker to its end."""
        caller = None
        try:
            caller = self._sessions.access.authenticate(context)
            stream = self._sessions.admit(caller)
        except SchedulerError as error:
            await self._sessions.recorder.turn_away("HostStream", context, caller, error)
            raise
        host = _HostSession(self._sessions, caller, stream)
        try:
            await begin_stream(context)
            await host.serve(context)
            # This may wait for a peer that does not read. The stream is counted until the peer is gone.
            if stream.closed is not None:
                await end_call(context, stream.closed)
        finally:
            self._sessions.release(stream)


class _HostSession:
    """One host's stream and its workers, by the numbers that the host gave them.

    ``_stream`` stands for the host's stream itself, without a worker.
    """

    def __init__(self, sessions: Sessions, caller: Caller, stream: OutgoingStream) -> None:
        self._sessions = sessions
        self._caller = caller
        self._stream = stream
        self._workers: dict[int, OutgoingStream] = {}
        self._highest = 0
        self._ending = False
        self._turned_away: list[tuple[int, SchedulerError]] = []

    async def serve(self, context: Context) -> None:
        """Reads and writes until one of the two ends."""
        writer = asyncio.ensure_future(self._write(context))
        dropped = asyncio.ensure_future(self._stream.dropped.wait())
        tasks = {asyncio.ensure_future(self._read(context)), writer, dropped}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = None if task.cancelled() else task.exception()
                if error is not None and not self._stream.over:
                    self._sessions.refuse(self._stream, error)
            if self._stream.dropped.is_set() and self._stream.closed is None:
                drops = [each.closed for each in self._workers.values() if isinstance(each.closed, _DROPS)]
                self._stream.closed = next(iter(drops), None)
            # The writer must finish its message: gRPC could never end the call after an interrupted write.
            self._ending = True
            self._stream.wake.set()
            limit_s = self._sessions.limits.farewell_timeout_s
            await asyncio.wait({writer, dropped}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:  # This also runs when gRPC cancels the call because its connection broke.
            for task in tasks:
                task.cancel()
            self._turned_away.clear()
            # The host's stream may have ended while its workers live: they may come back on another stream.
            for number in list(self._workers):
                self._let_go(number, HOST_STREAM_ENDED, may_return=True)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _let_go(self, number: int, detail: str, *, may_return: bool = False) -> None:
        loss = self._removed(number, detail, may_return=may_return)
        if loss is not None:
            driver, event = loss
            driver.post(event)

    def _removed(self, number: int, detail: str, *, may_return: bool) -> _ForJob | None:
        """Removes a worker; returns the event to send to its job, None if the job knows already."""
        session = self._workers.pop(number)
        session.over = True
        self._sessions.release(session)
        return self._sessions.loss(session, detail, may_return=may_return)

    # ------------------------------------------------------------ from the host

    async def _read(self, context: Context) -> None:
        while True:
            limit_s = None if self._workers else self._sessions.limits.join_timeout_s
            try:
                data = await asyncio.wait_for(context.read(), limit_s)
            except TimeoutError:
                raise TooSlowError("The host opened a stream and has no worker on it.") from None
            if data is grpc.aio.EOF:
                return
            await self._take(_parsed(data))

    async def _take(self, items: Iterable[pb.FromWorker]) -> None:
        """Passes a batch of messages to the jobs and waits for them, so that no host floods the jobs."""
        events: defaultdict[int, list[_ForJob]] = defaultdict(list)
        for item in items:
            found = await self._event(item)
            if found is not None:
                events[id(found[0])].append(found)
        for of_job in events.values():
            for driver, event in of_job[:-1]:
                driver.post(event)
        with contextlib.suppress(StoppingError):
            for of_job in events.values():
                driver, event = of_job[-1]
                await driver.submit(event)

    async def _event(self, item: pb.FromWorker) -> _ForJob | None:
        """Converts an item to an event and the job that must get it; None if there is no event."""
        number, session = item.worker, self._workers.get(item.worker)
        if session is None and number > self._highest:
            self._highest = number
            session = self._begin(number)
        if session is None or session.over:  # The host sent this before it knew that the session has ended.
            return None
        if item.HasField("gone"):
            detail = one_line(item.gone.detail[:MAX_DETAIL]) or "no goodbye was said"
            return self._removed(number, detail, may_return=item.gone.may_return)
        try:
            if session.driver is None:
                event = await self._sessions.join(session, item.message)
            else:
                event = self._sessions.event(session, item.message)
        except Exception as error:
            return self._sessions.loss(session, self._sessions.refuse(session, error))
        if session.driver is None:  # The session has ended in between.
            return None
        return session.driver, event

    def _begin(self, number: int) -> OutgoingStream | None:
        try:
            session = self._sessions.admit(self._caller, on=self._stream)
        except LimitError as error:
            if len(self._turned_away) >= 2 * MAX_ITEMS:
                raise TooSlowError(
                    "The host does not read which workers the scheduler turns away."
                ) from error
            self._sessions.recorder.denied(
                "HostStream", self._caller, self._caller.address, error.refusal, str(error)
            )
            self._turned_away.append((number, error))
            self._stream.wake.set()
            return None
        self._workers[number] = session
        return session

    # ------------------------------------------------------------ to the host

    async def _write(self, context: Context) -> None:
        wake = self._stream.wake
        while not self._ending:
            await wake.wait()
            wake.clear()
            while self._has_more():
                large = any(each.next_size() >= LARGE_MESSAGE_BYTES for each in self._workers.values())
                # While a large message waits for its turn here, a newer generation may replace it.
                async with self._sessions.large_writes if large else contextlib.nullcontext():
                    batch = self._collect()
                    if batch is not None:
                        await context.write(batch)

    def _has_more(self) -> bool:
        return bool(self._turned_away) or any(
            session.over or session.next_size() for session in self._workers.values()
        )

    def _collect(self) -> bytes | None:
        """Collects waiting messages, and the ends of sessions that are over, into one serialized ToHost."""
        batch = MessageBatch()
        for number, error in self._turned_away:
            batch.close(number, error)
        self._turned_away.clear()
        for number, session in list(self._workers.items()):
            while batch.size < BATCH_BYTES and (parts := session.take()):
                batch.add(number, parts)
            if session.over and not session.next_size():
                batch.close(number, session.closed)
                self._let_go(number, str(session.closed or "no goodbye was said"))
        return batch.serialized()


class MessageBatch:
    """Collects messages to workers, so that a part that several workers get is sent only once.

    Attributes:
        size: the approximate size in bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._items: list[pb.ToWorkers] = []
        self._of_message: dict[bytes, int] = {}
        self._last_of: dict[int, int] = {}

    def add(self, number: int, parts: tuple[bytes, ...]) -> None:
        """Adds a worker's next message: the part that all receivers share, then the worker's own parts."""
        message, own = parts[0], b"".join(parts[1:])
        at = self._of_message.get(message, -1)
        # A worker's messages must stay in order, and in one item, either all workers have a part of their
        # own or none has.
        if at <= self._last_of.get(number, -1) or bool(self._items[at].own) != bool(own):
            at = len(self._items)
            self._of_message[message] = at
            self._items.append(pb.ToWorkers(message=message))
            self.size += len(message)
        item = self._items[at]
        item.workers.append(number)
        if own:
            item.own.append(own)
        self.size += len(own)
        self._last_of[number] = at

    def close(self, number: int, error: SchedulerError | None) -> None:
        """Adds the end of a worker's session; ``error`` is the status that the worker gets."""
        closed = pb.Closed()
        if error is not None:
            code, detail = status_of(error)
            closed = pb.Closed(code=code.value[0], detail=detail)
        self._items.append(pb.ToWorkers(workers=[number], closed=closed))

    def serialized(self) -> bytes | None:
        """A serialized ToHost; None if the batch is empty."""
        return pb.ToHost(items=self._items).SerializeToString() if self._items else None


def _parsed(data: bytes) -> Iterator[pb.FromWorker]:
    try:
        message = pb.FromHost.FromString(data)
    except DecodeError as error:
        raise MalformedError("The message is not a FromHost of rendezvous.v1.") from error
    if len(message.items) > MAX_ITEMS:
        raise MalformedError(
            f"A FromHost holds at most {MAX_ITEMS} items; this one has {len(message.items)}."
        )
    return iter(message.items)
