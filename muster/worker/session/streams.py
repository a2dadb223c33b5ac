"""One stream to the scheduler over gRPC, and the errors with which it ends."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

SESSION_METHOD = "/rendezvous.v1.Rendezvous/Session"

_closed_calls: deque[Any] = deque(maxlen=8)
"""The last calls, which are not freed until the interpreter ends; see :func:`_keep_library_up`."""

Stream = tuple[Iterable[bytes], Callable[[], None]]
"""An iterable of serialized SchedulerMessages, and a function that closes the stream (idempotent, callable
from any thread).

Iterating raises DeniedError or MessageRejectedError if the scheduler refused the stream, and OSError if it
broke.
"""

Dial = Callable[[SimpleQueue[bytes | None]], Stream]
"""A function that opens a stream, which sends the messages from a queue; None in the queue ends the stream.

Raises DeniedError if TLS or identity failed, and OSError if nobody answers yet.
"""


class DeniedError(Exception):
    """TLS or identity failed, or the scheduler refused the stream; the message says why.

    Args:
        message: the reason, as a sentence.
        by_scheduler: whether the scheduler itself refused the stream.
    """

    def __init__(self, message: str, *, by_scheduler: bool) -> None:
        super().__init__(message)
        self.by_scheduler = by_scheduler


class MessageRejectedError(Exception):
    """The scheduler did not understand a message of this worker."""


def stream_on(
    channel: Any,
    outbox: SimpleQueue[bytes | None],
    is_revoked: Callable[[], bool] = lambda: False,
    method: str = SESSION_METHOD,
) -> Stream:
    """Opens a stream on a separate channel; ends it if the scheduler's certificate is revoked."""
    _keep_library_up()

    def requests() -> Iterator[bytes]:
        first = True  # The check before the connection has just been made.
        for data in iter(outbox.get, None):
            if not first and is_revoked():
                # When the worker connects to the scheduler again, it gets the reason as a sentence.
                call.cancel()
                return
            first = False
            yield data

    def replies() -> Iterator[bytes]:
        import grpc

        try:
            yield from call
        except grpc.RpcError as error:
            raise error_of(error.code().name, error.details() or "") from None

    def close() -> None:
        _closed_calls.append(call)
        # This must be set before the requests end, or the scheduler may end the call as a success.
        call.cancel()
        outbox.put(None)
        channel.close()

    call = channel.stream_stream(method)(requests())
    return replies(), close


def error_of(code: str, details: str) -> Exception:
    """Returns the error for a stream that ended with this gRPC status."""
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return DeniedError(details, by_scheduler=True)
    if code == "INVALID_ARGUMENT":
        return MessageRejectedError(details)
    if code == "UNIMPLEMENTED":
        return MessageRejectedError(f"What answers there is not a scheduler of Muster ({details}).")
    return ConnectionError(f"{code.lower()}: {details}")


@functools.cache
def _keep_library_up() -> None:
    """Keeps gRPC's library from shutting down before the process ends.

    In rare cases, processes have waited forever while the interpreter was tearing down its modules and no
    other thread was left. One cause was gRPC's shutdown. Another was the lock of a call that was being freed:
    a thread of gRPC held it when the interpreter stopped that thread. Objects that are never freed prevent
    both.
    """
    import ctypes

    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    for kept in (cygrpc.CompletionQueue(), _closed_calls):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
