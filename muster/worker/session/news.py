"""The machine's notices about the membership; replaced as a whole when the worker has lost its place."""

from __future__ import annotations

from dataclasses import dataclass

from muster.errors import LeaveGranted, MembershipChanged, PeerFinishedError, WorkerError
from muster.wire import messages
from muster.worker.session import events
from muster.worker.session.failures import sentence


@dataclass(slots=True)
class News:
    """The reports of one incarnation's machine to its client.

    Attributes:
        failure: why the membership is over for good; None if it is not.
        pending: the next planned change; None if there is none.
        dismissal: the notice that the worker leaves as asked, once its generation is over.
        change: the last change of members.
        build: the newest generation to be built that no thread has taken yet.
        running: the newest generation that all members have built.
        no_verdict: the generation for which the scheduler knows of no change.
        finished: the rank that has finished while this one waited in that generation.
        snapshot_word: the scheduler's newest message on snapshots.
        left: whether the Leave was confirmed, or its deadline has passed.
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
        """Returns the error with which the generation ended, or None while it goes on."""
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
        """Records that the scheduler knows of no change, or which rank has finished."""
        self.no_verdict, self.finished = notice.generation, None
        if notice.finished_rank >= 0:
            self.finished = PeerFinishedError(notice.sentence.rstrip("."), rank=notice.finished_rank)

    def note_dismissed(self, notice: events.Dismissed) -> None:
        """Records that the worker leaves as asked."""
        why = sentence(f"This worker leaves the job: {notice.reason}")
        self.dismissal = LeaveGranted(why, alone=notice.alone)

    def note_over(self, notice: events.Over) -> WorkerError:
        """Records that the generation has ended.

        Returns the error with which its communicators are aborted.
        """
        self.pending = None
        # The reason for a suspension contains this already.
        over = f"Generation {notice.generation} is over: "
        self.change = MembershipChanged(
            sentence(over + notice.reason.removeprefix(over)),
            generation=notice.generation,
            lost=notice.lost,
            save=notice.save,
        )
        return self.dismissal or self.change
