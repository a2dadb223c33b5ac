"""One stream to the scheduler over gRPC, and the errors with which it ends."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

SESSION_METHOD = "/rendezvous.v1.Rendezvous/Session"

_closed_calls: deque[Any] = deque(maxlen=8)
"""The last calls, kept from being freed at the end of the interpreter; see :func:`_keep_library_up`."""

Stream = tuple[Iterable[bytes], Callable[[], None]]
"""What comes, as serialized SchedulerMessages; and what ends it: idempotent, callable from any thread.

Iterating raises DeniedError or MessageRejectedError where the scheduler turned it down, and OSError
where it broke.
"""

Dial = Callable[[SimpleQueue[bytes | None]], Stream]
"""A function that opens a stream, which sends what is put into the queue; None ends it.

Raises DeniedError where TLS or identity failed, OSError where nobody is there yet.
"""


class DeniedError(Exception):
    """TLS or identity failed, or the scheduler turned the stream down; the message says why.

    Args:
        message: a sentence.
        by_scheduler: the scheduler itself said so.
    """

    def __init__(self, message: str, *, by_scheduler: bool) -> None:
        super().__init__(message)
        self.by_scheduler = by_scheduler


class MessageRejectedError(Exception):
    """The scheduler did not understand a message of ours."""


def stream_on(
    channel: Any,
    outbox: SimpleQueue[bytes | None],
    is_revoked: Callable[[], bool] = lambda: False,
    method: str = SESSION_METHOD,
) -> Stream:
    """Opens a stream on a channel of its own; ends it if the scheduler's certificate is revoked."""
    _keep_library_up()

    def requests() -> Iterator[bytes]:
        first = True  # the look before the connection has just checked
        for data in iter(outbox.get, None):
            if not first and is_revoked():
                call.cancel()  # looking for the scheduler again gives the reason in words
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
        call.cancel()  # before the requests end, or the scheduler may end the call as a success
        outbox.put(None)
        channel.close()

    call = channel.stream_stream(method)(requests())
    return replies(), close


def error_of(code: str, details: str) -> Exception:
    """The error for a stream that the scheduler has ended with this gRPC status."""
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

    Processes were seen, rarely, to wait for ever while the interpreter takes its modules apart, with no other
    thread left: where gRPC shuts itself down, and where a freed call takes its lock, which a thread of gRPC
    held when the interpreter stopped it. Objects that are never freed keep both from being run.
    """
    import ctypes

    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    for kept in (cygrpc.CompletionQueue(), _closed_calls):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
