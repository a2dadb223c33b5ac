"""The worker's errors: one family, facts as attributes, a remedy in every message.

``muster.WorkerError`` catches them all. No key, password or unique id ever stands in one.
"""

from __future__ import annotations

from muster.wire.errors import RemediedError

SIGTERM_EXIT_CODE = 143
"""The exit code of a worker that left because of SIGTERM, which is 128 and the signal's number."""


class WorkerError(RemediedError):
    """Base of everything that Muster raises in a worker.

    Args:
        message: what happened, naming host, node id or rank where known.
        remedy: what the user can do about it; appended to the message.
    """


class SettingsError(WorkerError):
    """A variable, key or argument has a wrong value; names it, the value and the legal range."""

    exit_code = 2


class NotInitializedError(WorkerError):
    """A function needs ``muster.init()`` first, or was called after ``release()``."""


class SchedulerUnreachableError(WorkerError):
    """The scheduler could not be reached, or was lost for longer than the deadline."""


class SecurityError(WorkerError, RuntimeError):
    """TLS, certificate or identity failed on either side."""


class RefusedError(WorkerError):
    """The scheduler gave this worker no place; ``code`` is the wire's name of the reason."""

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code

    @property
    def declared_dead(self) -> bool:
        """Whether this worker had a place and lost it; it may ask for another."""
        return self.code == "SUPERSEDED"


class GpuFailedError(RefusedError):
    """This worker's GPU has failed a check, now or before; the job refuses it until an operator admits it."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, code="GPU_FAILED", remedy=remedy)


class FormationTimeoutError(WorkerError, RuntimeError):
    """The group or its communicator did not form in time; says who is missing."""


class JobEndedError(WorkerError):
    """The job ended before this worker finished.

    Attributes:
        ok: all who were needed had finished; this worker was a spare, say. The exit code is 0 then.
    """

    def __init__(self, message: str, *, ok: bool = False, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.ok = ok
        self.exit_code = 0 if ok else 1


class MembershipChanged(WorkerError):  # noqa: N818 - an event that reaches the loop as an exception
    """The generation this worker was computing in is over; ``session.rejoin()`` enters the next.

    Attributes:
        generation: the generation that ended.
        lost: one sentence for each member that is gone.
        save: the job cannot go on for now, and this worker is the one that should save its state.
    """

    def __init__(
        self, message: str, *, generation: int, lost: tuple[str, ...] = (), save: bool = False
    ) -> None:
        super().__init__(message, remedy="Call session.rejoin() to go on in the next generation.")
        self.generation = generation
        self.lost = lost
        self.save = save


class CommunicatorError(WorkerError, RuntimeError):
    """A communicator failed. A RuntimeError, too: what callers of torch's own process groups catch."""


class CollectiveTimeoutError(CommunicatorError):
    """A collective did not complete before its deadline; names the ranks waited for."""


class CollectiveMismatchError(CommunicatorError):
    """The ranks called different collectives, dtypes, shapes, roots or operations; names who called what."""


class RanksDifferError(WorkerError):
    """The ranks train apart: a setting that is not part of their common state differs; names it."""


class PeerLostError(CommunicatorError):
    """The connection to a peer broke; ``rank`` is its rank in the communicator's group."""

    def __init__(self, message: str, *, rank: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.rank = rank


class PeerFinishedError(CommunicatorError):
    """A rank has finished while this one still needs it: it had fewer batches; ``rank`` is its rank."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(
            message,
            remedy="Let all ranks make as many steps: pad or drop what is left over of the data, or"
            " divide it with uneven_batch().",
        )
        self.rank = rank


class CommunicatorAbortedError(CommunicatorError):
    """The communicator was aborted or closed while, or before, it was used."""


class ArrayError(CommunicatorError, ValueError):
    """An array cannot be used here: dtype, shape, contiguity, device. Raised before anything is sent."""


class GroupError(WorkerError, ValueError):
    """A group does not exist, exists already, or this rank is not in it."""


class DataNotDividedWarning(UserWarning):
    """A framework runs the training and takes this rank for the only one: every rank gets all the data."""


class LeaveGranted(WorkerError):  # noqa: N818 - an event that reaches the loop as an exception
    """This worker leaves the job as it, or an operator, asked: the others go on without it.

    The step under way is finished and shared; what is left to do is ``session.release()``. A script that does
    not catch it ends with that, without a traceback and without what stands after its loop.

    Attributes:
        alone: it leaves without having handed over, since there is no scheduler, or there is no next
            generation, or nobody in that holds the training state: it should save that. The step under way
            may be broken, and the others may be unable to go on.
        exit_code: 143 where SIGTERM asked for it, so that no platform takes the training for complete; or 0.
        logged: the log has it already.
    """

    exit_code = 0

    def __init__(self, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.alone = alone
        self.logged = False


class LeaveNow(BaseException):
    """SIGTERM came during ``init``, while there is no step to finish."""
