"""The scheduler's errors, all of one base class, and their mapping to gRPC's codes.

A message says what the user can do. It never contains a key, password or unique id, and text from peers is
escaped before it is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

from muster.wire.errors import RemediedError

if TYPE_CHECKING:
    import grpc
    import grpc.aio

    Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerError(RemediedError):
    """Base class of all errors that Muster's scheduler raises.

    Args:
        message: what happened, in one sentence.
        remedy: what the user can do about it; appended to the message.
    """

    grpc_code = "INTERNAL"
    refusal = "internal"


class SchedulerSettingsError(SchedulerError):
    """A variable, option or file has a wrong value; the message names it, the value and the legal range."""

    exit_code = 2


class BindError(SchedulerError):
    """The scheduler's address cannot be bound; the message says which address and why."""


class JournalUnavailableError(SchedulerError):
    """A decision could not be made durable, so none of its messages may be sent."""


class NoSpaceError(SchedulerError):
    """The journal has no space. The caller should repeat the write, because there may be space later."""


class DeposedError(SchedulerError):
    """Another scheduler leads or may lead, so that this one may neither write nor send final messages.

    Its exit code asks for a restart: EX_TEMPFAIL of sysexits(3).
    """

    exit_code = 75


class JobFailedError(SchedulerError):
    """The scheduler's own job ended without success; the message says why."""


class RequestError(SchedulerError):
    """Base class of a caller's errors; ``refusal`` is the short name for metrics and the audit log."""


class MalformedError(RequestError):
    """A message violates the protocol or exceeds a limit; the error's message names the field."""

    grpc_code = "INVALID_ARGUMENT"
    refusal = "malformed"


class UnauthenticatedError(RequestError):
    """The caller's certificate is missing, expired, revoked or names no identity."""

    grpc_code = "UNAUTHENTICATED"
    refusal = "unauthenticated"


class NotPermittedError(RequestError):
    """The caller's certificate is valid but does not allow this call."""

    grpc_code = "PERMISSION_DENIED"
    refusal = "not_permitted"


class NotFoundError(RequestError):
    """The job, node or GPU that the caller names does not exist."""

    grpc_code = "NOT_FOUND"
    refusal = "not_found"


class LimitError(RequestError):
    """The caller, or all callers together, have reached a limit."""

    grpc_code = "RESOURCE_EXHAUSTED"
    refusal = "limit"


class TooSlowError(RequestError):
    """The caller sends or reads too slowly."""

    grpc_code = "DEADLINE_EXCEEDED"
    refusal = "too_slow"


class StoppingError(RequestError):
    """The scheduler is stopping."""

    grpc_code = "UNAVAILABLE"
    refusal = "stopping"


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Maps an error to the gRPC code and the message that the caller gets.

    If the error is not one of Muster's, the caller learns only that there was an error.
    """
    import grpc

    if isinstance(error, SchedulerError):
        return grpc.StatusCode[error.grpc_code], str(error)
    return grpc.StatusCode.INTERNAL, "The scheduler failed on this call; its log says more."


async def begin_stream(context: Context) -> None:
    """Sends a stream's headers separately from its first message.

    Otherwise, gRPC sends them with the first message. If that write is interrupted, gRPC does not know that
    the headers were sent and can never end the call.
    """
    import grpc.aio

    with contextlib.suppress(grpc.aio.BaseError):  # The caller is gone; the reader of the stream will notice.
        await context.send_initial_metadata(())


async def end_call(context: Context, error: BaseException) -> NoReturn:
    """Ends a call with an error's code and sentence; always raises, for gRPC.

    If the caller has disconnected before it gets the answer, no fault is logged, because a caller can
    disconnect as often as it likes.
    """
    import grpc.aio

    try:
        await context.abort(*status_of(error))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        pass
    raise asyncio.CancelledError("the caller is gone")  # gRPC recognizes this exception and logs nothing.
