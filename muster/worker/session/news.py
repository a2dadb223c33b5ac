"""What the machine has told of the membership; dropped as a whole when the worker has lost its place."""

from __future__ import annotations

from dataclasses import dataclass

from muster.errors import LeaveGranted, MembershipChanged, PeerFinishedError, WorkerError
from muster.wire import messages
from muster.worker.session import events
from muster.worker.session.failures import sentence


@dataclass(slots=True)
class News:
    """What the machine of one incarnation has told its client.

    Attributes:
        failure: why the membership is over for good; None: it is not.
        pending: the planned change that is to come; None: there is none.
        dismissal: the worker leaves as asked, once its generation is over.
        change: the last change of members.
        build: the newest generation that is to be built and was not taken yet.
        running: the newest generation that all members have built.
        no_verdict: the generation of which the scheduler knows no change.
        finished: which rank has, while this one waited in that.
        snapshot_word: the scheduler's newest on snapshots.
        left: the goodbye was heard, or its deadline is over.
    """

    failure: WorkerError | None = None
    pending: events.ChangePending | None = None
    dismissal: LeaveGranted | None = None
    change: MembershipChanged | None = None
    build: events.Build | None = None
    running: int = 0
    no_verdict: int = 0
    finished: PeerFinishedError | None = None
    snapshot_word: messages.SnapshotWord | None = None
    left: bool = False

    def over(self, generation: int) -> WorkerError | None:
        """The error with which the generation ended, or None while it goes on."""
        if self.failure is not None:
            return self.failure
        if self.change is not None and self.change.generation >= generation:
            return self.dismissal or self.change
        return None

    @property
    def leave_granted(self) -> bool:
        """Whether this worker leaves as asked."""
        return self.dismissal is not None or isinstance(self.failure, LeaveGranted)

    def note_no_verdict(self, notice: events.NoVerdict) -> None:
        """The scheduler knows of no change, or which rank has finished."""
        self.no_verdict, self.finished = notice.generation, None
        if notice.finished_rank >= 0:
            self.finished = PeerFinishedError(notice.sentence.rstrip("."), rank=notice.finished_rank)

    def note_dismissed(self, notice: events.Dismissed) -> None:
        """The worker leaves as asked."""
        why = sentence(f"This worker leaves the job: {notice.reason}")
        self.dismissal = LeaveGranted(why, alone=notice.alone)

    def note_over(self, notice: events.Over) -> WorkerError:
        """The generation has ended; returns the error that its communicators are aborted with."""
        self.pending = None
        over = f"Generation {notice.generation} is over: "  # a suspension's reason says so itself
        self.change = MembershipChanged(
            sentence(over + notice.reason.removeprefix(over)),
            generation=notice.generation,
            lost=notice.lost,
            save=notice.save,
        )
        return self.dismissal or self.change
