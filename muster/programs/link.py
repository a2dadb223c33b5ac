"""One member's stream to a generation's store: sends operations in batches, takes answers in any order.

A stream that breaks is opened again, and operations without an answer are repeated; the scheduler carries
each change out once. When the scheduler says that the generation is over, the link ends, and all pending
operations fail with that reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from muster.errors import WorkerError
from muster.programs.history import ChangeHistory
from muster.wire.v1 import store_pb2 as pb

log = logging.getLogger("muster.worker")

METHOD = "/rendezvous.v1.Store/Open"
MESSAGE_BYTES = 900_000
MESSAGE_OPERATIONS = 512
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)

Connect = Callable[[], Awaitable[grpc.aio.Channel]]


class StoreEndedError(WorkerError):
    """The store has ended: its generation is over, or this process may not use it; the message says why."""


class StoreLostError(StoreEndedError):
    """The store's content is lost, although its generation goes on."""


@dataclass(slots=True)
class _Pending:
    operation: pb.StoreOperation
    answer: asyncio.Future[pb.StoreAnswer]


_FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class StoreLink:
    """One member's access to a generation's store. All of it runs on one event loop.

    Args:
        opening: names the member and the namespace.
        connect: opens a channel to the scheduler; if it raises OSError, it is called again after a pause.
    """

    def __init__(self, opening: pb.StoreOpen, connect: Connect) -> None:
        self._opening = opening
        self._connect = connect
        self._history = ChangeHistory()
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1
        self._unsent: list[pb.StoreOperation] = []
        self._cancelled: list[int] = []
        self._wake = asyncio.Event()
        self._error: StoreEndedError | None = None
        self._task = asyncio.ensure_future(self._run())

    @property
    def error(self) -> StoreEndedError | None:
        """Why the store has ended; None if it has not."""
        return self._error

    @property
    def pending(self) -> int:
        """The number of operations without an answer."""
        return len(self._pending)

    def submit(
        self,
        kind: pb.StoreKind,
        keys: Sequence[bytes] = (),
        values: Sequence[bytes] = (),
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> asyncio.Future[pb.StoreAnswer]:
        """Starts an operation; returns a future of its answer, or of StoreEndedError if the store ends."""
        answer: asyncio.Future[pb.StoreAnswer] = asyncio.get_running_loop().create_future()
        if self._error is not None:
            answer.set_exception(self._error)
            return answer
        operation = pb.StoreOperation(
            id=self._next_id, kind=kind, keys=keys, values=values, amount=amount, timeout_s=timeout_s
        )
        self._next_id += 1
        self._pending[operation.id] = _Pending(operation, answer)
        self._unsent.append(operation)
        self._wake.set()
        return answer

    def cancel(self, answer: asyncio.Future[pb.StoreAnswer]) -> None:
        """Cancels an operation and its future."""
        for operation_id, pending in self._pending.items():
            if pending.answer is answer:
                del self._pending[operation_id]
                self._unsent = [each for each in self._unsent if each.id != operation_id]
                self._cancelled.append(operation_id)
                self._wake.set()
                break
        answer.cancel()

    async def close(self, reason: str = "The store was closed.") -> None:
        """Ends the stream, and fails pending operations with the reason; idempotent."""
        self._end(StoreEndedError(reason))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ streams

    async def _run(self) -> None:
        failures = 0
        while self._error is None:
            try:
                async with await self._connect() as channel:
                    call: Any = channel.stream_stream(METHOD)()
                    try:
                        opened = await self._open(call)
                        failures = 0 if opened else failures
                        if opened:
                            await self._converse(call)
                    finally:
                        call.cancel()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DATA_LOSS:
                    self._end(StoreLostError(error.details() or error.code().name))
                    return
                if error.code() in _FINAL:
                    self._end(StoreEndedError(error.details() or error.code().name))
                    return
                log.debug("the store's stream broke: %s", error.details())
            except OSError as error:
                log.debug("the store is not reached: %s", error)
            except WorkerError as error:
                self._end(StoreEndedError(error.message, remedy=error.remedy))
                return
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.exception("fault on the store's stream")
                self._end(StoreEndedError(f"The store failed: {type(error).__name__}: {error}."))
                return
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1

    async def _open(self, call: Any) -> bool:
        await call.write(pb.StoreRequest(open=self._opening).SerializeToString())
        data = await call.read()
        if data is grpc.aio.EOF:
            await _raise_status(call)
            return False
        reply = pb.StoreReply.FromString(data)
        if reply.opened.replay:
            for part in self._history.parts():
                await call.write(pb.StoreRequest(replay=part).SerializeToString())
        self._history.hear(reply.seen)
        self._unsent = [pending.operation for pending in self._pending.values()]
        self._cancelled = []
        self._wake.set()
        return True

    async def _converse(self, call: Any) -> None:
        writer = asyncio.ensure_future(self._write(call))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                self._take(pb.StoreReply.FromString(data))
            await _raise_status(call)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent or self._cancelled:
                await call.write(self._next_message().SerializeToString())

    def _next_message(self) -> pb.StoreRequest:
        request = pb.StoreRequest(cancelled=self._cancelled)
        self._cancelled = []
        size = count = 0
        for operation in self._unsent:
            size += 64 + sum(map(len, operation.keys)) + sum(map(len, operation.values))
            if count and size > MESSAGE_BYTES:
                break
            count += 1
            if count == MESSAGE_OPERATIONS:
                break
        request.operations.extend(self._unsent[:count])
        del self._unsent[:count]
        request.answered_below = next(iter(self._pending), self._next_id)
        return request

    def _take(self, reply: pb.StoreReply) -> None:
        for answer in reply.answers:
            pending = self._pending.pop(answer.id, None)
            if pending is None:
                continue
            self._history.note(pending.operation, answer)
            if not pending.answer.done():
                pending.answer.set_result(answer)
        self._history.hear(reply.seen)

    def _end(self, error: StoreEndedError) -> None:
        self._error = self._error or error
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if not each.answer.done():
                each.answer.set_exception(self._error)
                each.answer.exception()  # otherwise asyncio complains if nobody reads it


async def _raise_status(call: Any) -> None:
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
