"""What a worker has been told of its membership so far, and what follows for a generation."""

from __future__ import annotations

from muster.worker.control import events as e
from muster.worker.control.failures import failure_of, sentence
from muster.worker.errors import LeaveGranted, MembershipChanged, WorkerError


class Standing:
    """The news that the membership machine gives about this worker, until it asks for a place anew.

    Attributes:
        failure: why the membership is over for good.
        dismissal: that this worker leaves as asked, once its generation is over.
        pending: the planned change that is to come.
        build: the newest generation that can be built and has not been taken.
        running: the newest generation that all members have built.
        no_verdict: the generation of which the scheduler knows no change.
        left: the goodbye was heard, or its deadline is over.
    """

    def __init__(self) -> None:
        self.failure: WorkerError | None = None
        self.dismissal: LeaveGranted | None = None
        self.pending: e.ChangePending | None = None
        self.build: e.Build | None = None
        self.running = 0
        self.no_verdict = 0
        self.left = False
        self._interruption: MembershipChanged | None = None

    def note(self, notice: e.Notice) -> Exception | None:
        """Takes note of one notice.

        Returns:
            With what the communicators of the generation are to be aborted, if they are.
        """
        if isinstance(notice, e.Build):
            self.build = notice
        elif isinstance(notice, e.Running):
            self.running = notice.generation
        elif isinstance(notice, e.NoVerdict):
            self.no_verdict = notice.generation
        elif isinstance(notice, e.ChangePending):
            self.pending = notice
        elif isinstance(notice, e.Left):
            self.left = True
        elif isinstance(notice, e.Dismissed):
            told = sentence(f"This worker leaves the job: {notice.reason}")
            self.dismissal = LeaveGranted(told, alone=notice.alone)
        elif isinstance(notice, e.Interrupt):
            return self._interrupted(notice)
        elif isinstance(notice, e.Failed):
            self.failure = failure_of(notice)
            return self.failure
        return None

    def _interrupted(self, notice: e.Interrupt) -> Exception | None:
        self.pending = None
        over = f"Generation {notice.generation} is over: "  # a suspension's reason says so itself
        self._interruption = MembershipChanged(
            sentence(over + notice.reason.removeprefix(over)),
            generation=notice.generation,
            lost=notice.lost,
            save=notice.save,
        )
        return None if notice.planned else self.dismissal or self._interruption

    def change_of(self, generation: int) -> Exception | None:
        """Why the generation is over, or None while it stands."""
        if self.failure is not None:
            return self.failure
        interruption = self._interruption
        if interruption is not None and interruption.generation >= generation:
            return self.dismissal or interruption
        return None

    def take_build(self) -> e.Build | None:
        """The newest generation that can be built, once; None while there is none.

        Raises:
            WorkerError: there will be none.
        """
        if self.build is None:
            error = self.failure or self.dismissal
            if error is not None:
                raise error.with_traceback(None)  # each raise would add to that of the last one
            return None
        build, self.build, self.pending = self.build, None, None
        return build

    @property
    def leave_granted(self) -> bool:
        """Whether this worker leaves as asked."""
        return self.dismissal is not None or isinstance(self.failure, LeaveGranted)
