"""The scheduler's errors: one family, a remedy in every message, one mapping to gRPC's codes.

No key, password or unique id ever stands in one, and foreign text in one is escaped before it is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


class SchedulerError(Exception):
    """Base of everything that Muster's scheduler raises.

    Args:
        message: what happened, in one sentence.
        remedy: what the user can do about it; appended to the message.
    """

    exit_code = 1
    grpc_code = "INTERNAL"
    refusal = "internal"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} {remedy}".strip())


class SettingsError(SchedulerError):
    """A variable, option or file has a wrong value; names it, the value and the legal range."""

    exit_code = 2


class BindError(SchedulerError):
    """The scheduler's address cannot be bound; says which and why."""


class JournalUnavailableError(SchedulerError):
    """A decision could not be made durable, so nothing of it may be sent."""


class JobFailedError(SchedulerError):
    """The scheduler's own job ended without success; says why."""


class RequestError(SchedulerError):
    """Base of what a caller is told; ``refusal`` is the short name used in metrics and the audit log."""


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
    """The caller kept the scheduler waiting, or does not read what it is sent."""

    grpc_code = "DEADLINE_EXCEEDED"
    refusal = "too_slow"


class StoppingError(RequestError):
    """The scheduler is stopping."""

    grpc_code = "UNAVAILABLE"
    refusal = "stopping"


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Maps an error to the gRPC code and the sentence that the caller gets.

    An error that is not one of ours tells the caller nothing but that it happened.
    """
    import grpc

    if isinstance(error, SchedulerError):
        return grpc.StatusCode[error.grpc_code], str(error)
    return grpc.StatusCode.INTERNAL, "The scheduler failed on this call; its log says more."
