"""The scheduler's errors: one family, a remedy in every message, one mapping to gRPC's codes.

No key, password or unique id ever stands in one, and foreign text in one is escaped before it is logged.
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
    """Base of everything that Muster's scheduler raises.

    Args:
        message: what happened, in one sentence.
        remedy: what the user can do about it; appended to the message.
    """

    grpc_code = "INTERNAL"
    refusal = "internal"


class SchedulerSettingsError(SchedulerError):
    """A variable, option or file has a wrong value; names it, the value and the legal range."""

    exit_code = 2


class BindError(SchedulerError):
    """The scheduler's address cannot be bound; says which and why."""


class JournalUnavailableError(SchedulerError):
    """A decision could not be made durable, so nothing of it may be sent."""


class NoSpaceError(SchedulerError):
    """What the journal is kept on has no space left: to be tried again, for space comes back."""


class DeposedError(SchedulerError):
    """Another scheduler leads, or may: nothing may be written, and no final word be said.

    Its exit code asks to be started again: see sysexits(3), EX_TEMPFAIL.
    """

    exit_code = 75


class JobFailedError(SchedulerError):
    """The scheduler's own job ended without success; says why."""


class RequestError(SchedulerError):
    """Base of a caller's errors; ``refusal`` is the short name used in metrics and the audit log."""


class MalformedError(RequestError):
    """A message breaks the protocol or a bound; names the field."""

    grpc_code = "INVALID_ARGUMENT"
    refusal = "malformed"


class UnauthenticatedError(RequestError):
    """The caller's certificate is missing, expired, revoked or says nothing usable."""

    grpc_code = "UNAUTHENTICATED"
    refusal = "unauthenticated"


class NotPermittedError(RequestError):
    """The caller's certificate is good but does not allow this call."""

    grpc_code = "PERMISSION_DENIED"
    refusal = "not_permitted"


class NotFoundError(RequestError):
    """No such job or node."""

    grpc_code = "NOT_FOUND"
    refusal = "not_found"


class LimitError(RequestError):
    """The caller, or all callers together, hold as much as they may."""

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
    """Maps an error to the gRPC code and the sentence that the caller gets.

    Of an error that is not one of ours the caller learns only that it happened.
    """
    import grpc

    if isinstance(error, SchedulerError):
        return grpc.StatusCode[error.grpc_code], str(error)
    return grpc.StatusCode.INTERNAL, "The scheduler failed on this call; its log says more."


async def begin_stream(context: Context) -> None:
    """Sends a stream's headers, apart from its first message.

    They go with that otherwise, and where its write is cut off, gRPC does not know that they are sent and can
    never end the call.
    """
    import grpc.aio

    with contextlib.suppress(grpc.aio.BaseError):  # a caller that is gone, which who reads on will notice
        await context.send_initial_metadata(())


async def end_call(context: Context, error: BaseException) -> NoReturn:
    """Ends a call with an error's code and sentence; always raises, for gRPC.

    A caller that is gone before it has its answer is no fault to log: it may do that as often as it likes.
    """
    import grpc.aio

    try:
        await context.abort(*status_of(error))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        pass
    raise asyncio.CancelledError("the caller is gone")  # which gRPC takes for what it is, and logs nothing
