"""The error that a script gets when its membership ends, and how others are told of a script's error."""

from __future__ import annotations

from muster.errors import (
    CommunicatorAbortedError,
    FormationTimeoutError,
    GpuFailedError,
    JobEndedError,
    LeaveGranted,
    LeaveNow,
    MembershipChanged,
    PeerLostError,
    RefusedError,
    SchedulerUnreachableError,
    SecurityError,
    WorkerError,
)
from muster.wire.messages import RefusalCode
from muster.worker.session import events


def failure_of(notice: events.Failed) -> WorkerError:
    """Returns the error with which a script learns why its membership is over."""
    text = sentence(notice.sentence)
    if notice.kind is events.FailureKind.SECURITY:
        return SecurityError(text)
    if notice.kind is events.FailureKind.UNREACHABLE:
        return SchedulerUnreachableError(
            text,
            remedy="Check that it runs, and MS_SCHED_HOST and MS_SCHED_PORT.",
        )
    if notice.kind is events.FailureKind.FORMATION_TIMEOUT:
        return FormationTimeoutError(text)
    if notice.kind is events.FailureKind.LEAVE:
        return LeaveGranted(text, alone=True)
    if notice.kind is events.FailureKind.JOB_ENDED:
        return JobEndedError(text, ok=notice.ok)
    if notice.code is RefusalCode.GPU_FAILED:
        return GpuFailedError(text)
    return RefusedError(text, code=notice.code.name)


def sentence(text: str) -> str:
    """Makes a text begin with a capital and end with a full stop, so that a remedy can follow."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def reason_of(error: BaseException) -> str:
    """Describes an exception in one line, for the scheduler's log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if isinstance(error, LeaveNow | LeaveGranted):
        return "asked to leave"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit code {error.code}"
    # The remedy is meant for the script itself.
    text = error.message if isinstance(error, WorkerError) else str(error)
    text = " ".join(text.split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def is_consequence(error: BaseException | None) -> bool:
    """Whether an error was caused by other processes, or was raised while such an error was handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _OF_OTHERS) or (isinstance(error, RefusedError) and error.code in _LATE):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


_OF_OTHERS = (
    CommunicatorAbortedError,
    JobEndedError,
    MembershipChanged,
    PeerLostError,
    SchedulerUnreachableError,
)
_LATE = ("JOB_ENDED", "SUPERSEDED")


def exit_code_of(error: BaseException | None) -> int:
    """Returns the exit code, 0 to 255, with which an uncaught ``error`` ends a process."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code & 255
        return 0 if error.code is None else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, WorkerError) else 1


def is_good_exit(error: BaseException) -> bool:
    """Whether this is a SystemExit without a code or with 0.

    Python exits with 1 for a code that is not an integer.
    """
    return isinstance(error, SystemExit) and (
        error.code is None or (isinstance(error.code, int) and error.code == 0)
    )
