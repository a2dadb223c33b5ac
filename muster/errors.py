"""The worker's errors: one family, with facts as attributes and a remedy in each message.

``muster.WorkerError`` is the base of all of them. No error contains a key, a password or a unique id.
"""

from __future__ import annotations

from muster.wire.errors import RemediedError

SIGTERM_EXIT_CODE = 143
"""The exit code of a worker that left because of SIGTERM: 128 plus the signal's number."""


class WorkerError(RemediedError):
    """Base of all errors that Muster raises in a worker.

    Args:
        message: what happened, with the host, node id or rank if known.
        remedy: what the user can do about it; appended to the message.
    """


class SettingsError(WorkerError):
    """A variable, key or argument has a wrong value; the message names it, the value and the legal range."""

    exit_code = 2


class NotInitializedError(WorkerError):
    """A function needs ``muster.init()`` first, or was called after ``release()``."""


class SchedulerUnreachableError(WorkerError):
    """The scheduler could not be reached, or was lost for longer than the deadline."""


class SecurityError(WorkerError, RuntimeError):
    """TLS failed, or the certificate or identity of either side was not accepted."""


class RefusedError(WorkerError):
    """The scheduler gave this worker no place; ``code`` is the reason's name in the protocol."""

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code

    @property
    def declared_dead(self) -> bool:
        """Whether this worker had a place and lost it; it may then ask for another one."""
        return self.code == "SUPERSEDED"


class GpuFailedError(RefusedError):
    """This worker's GPU has failed a check, now or before; the job refuses it until an operator admits it."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, code="GPU_FAILED", remedy=remedy)


class FormationTimeoutError(WorkerError, RuntimeError):
    """The group or its communicator did not form in time; the message says who is missing."""


class JobEndedError(WorkerError):
    """The job ended before this worker finished.

    Attributes:
        ok: all necessary workers had finished, and this one was, for example, a spare. The exit code is then
            0.
    """

    def __init__(self, message: str, *, ok: bool = False, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.ok = ok
        self.exit_code = 0 if ok else 1


class MembershipChanged(WorkerError):  # noqa: N818 - an event that reaches the loop as an exception
    """The generation in which this worker was computing is over; ``session.rejoin()`` enters the next one.

    Attributes:
        generation: the generation that ended.
        lost: one sentence for each lost member.
        save: the job cannot go on for now, and this worker should save the training state.
    """

    def __init__(
        self, message: str, *, generation: int, lost: tuple[str, ...] = (), save: bool = False
    ) -> None:
        super().__init__(message, remedy="Call session.rejoin() to go on in the next generation.")
        self.generation = generation
        self.lost = lost
        self.save = save


class CommunicatorError(WorkerError, RuntimeError):
    """A communicator failed. Also a RuntimeError, because callers of torch's process groups catch that."""


class CollectiveTimeoutError(CommunicatorError):
    """A collective did not complete before its deadline; the message names the ranks waited for."""


class CollectiveMismatchError(CommunicatorError):
    """The ranks called different collectives, dtypes, shapes, roots or operations; the message names them."""


class RanksDifferError(WorkerError):
    """A setting that is not part of the common state differs between ranks; the message names it."""


class PeerLostError(CommunicatorError):
    """The connection to a peer broke; ``rank`` is its rank in the communicator's group."""

    def __init__(self, message: str, *, rank: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.rank = rank


class PeerFinishedError(CommunicatorError):
    """A rank, ``rank``, has finished while this one still needs it, because it had fewer batches."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(
            message,
            remedy="Let all ranks make as many steps: pad or drop what is left over of the data, or"
            " divide it with uneven_batch().",
        )
        self.rank = rank


class CommunicatorAbortedError(CommunicatorError):
    """The communicator was aborted or closed before or during its use."""


class ArrayError(CommunicatorError, ValueError):
    """An array has the wrong dtype, shape, memory layout or device. Raised before anything is sent."""


class GroupError(WorkerError, ValueError):
    """A group does not exist, exists already, or does not contain this rank."""


class DataNotDividedWarning(UserWarning):
    """A framework takes this rank for the only one, so that every rank trains on all of the data."""


class LeaveGranted(WorkerError):  # noqa: N818 - an event that reaches the loop as an exception
    """This worker leaves the job, as it or an operator has asked; the others go on without it.

    The current step is finished on all ranks, and only ``session.release()`` is left to do. A script that
    does not catch this exception is released and ends, without a traceback and without running the code after
    its loop.

    Attributes:
        alone: it leaves without handing over the training state, and should save that state. The reason is
            that there is no scheduler, that no next generation forms, or that none of its members holds the
            state. The current step may be incomplete, and the others may be unable to go on.
        exit_code: 143 if SIGTERM was the reason, so that no platform takes the training for complete; else 0.
        logged: whether the log already has it.
    """

    exit_code = 0

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone
        self.logged = False


class LeaveNow(BaseException):
    """SIGTERM came during ``init``, when there is no step to finish yet."""
