"""The state of a worker's machine: its knowledge about its membership.

The state is replaced as a whole when the worker has lost its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.wire import messages
from muster.worker.session import events


@dataclass(slots=True)
class Incarnation:
    """The state of one incarnation of a worker's membership.

    Attributes:
        ended: whether the membership is over for good.
        welcome: the scheduler's latest Welcome; None if it has not answered.
        renewed: whether the worker has lost its place and has not been welcomed since.
        heartbeat_at: when the next heartbeat is due.
        waiting_sentence: what the worker waits for, as last reported.
        times_put_off: how often the scheduler has reported that it cannot decide anything.
        absent: whether the scheduler's absence was logged.
        seen: the newest known generation.
        over: generations up to this one are over.
        current: the generation that the training thread is in.
        next: a newer generation that it has not entered yet.
        ids: the unique ids of ``next``.
        minted: the unique ids that this worker has created as rank 0.
        wants_entry: whether the training thread waits for a generation.
        built: whether the worker has built its communicator of ``current``.
        running: whether all members have built their communicators.
        suspended: whether the job waits for workers.
        held: the generation in which no further step may begin.
        uses_steps: whether the training thread asks before each step.
        stepped_in: the last generation in which a step was begun.
        leave_reason: why the worker will leave; None if it will not.
        goodbye: the event with which the worker has begun to leave.
        leave_at: when it stops waiting for the scheduler to confirm its Leave.
        suspicion_since: since when the worker waits for a verdict on a failed collective.
        suspicion: the report on a peer at that time; None if no peer was named.
        timed_out_step: the step in which collectives have already timed out.
        late_reported_at: when the scheduler was last told that a collective is late.
        stuck: whether the worker is cut off from the scheduler and from some peer.
        need_since: since when the worker needs something from the scheduler.
    """

    ended: bool = False
    welcome: messages.Welcome | None = None
    renewed: bool = False
    heartbeat_at: float | None = None
    waiting_sentence: str = ""
    times_put_off: int = 0
    absent: bool = False
    seen: int = 0
    over: int = 0
    current: messages.Assignment | None = None
    next: messages.Assignment | None = None
    ids: messages.UniqueIds | None = None
    minted: events.UniqueIdsMinted | None = None
    wants_entry: bool = False
    built: bool = False
    running: bool = False
    suspended: bool = False
    held: int = 0
    uses_steps: bool = False
    stepped_in: int = 0
    leave_reason: str | None = None
    goodbye: events.Goodbye | None = None
    leave_at: float | None = None
    suspicion_since: float | None = None
    suspicion: messages.SuspectPeer | None = None
    timed_out_step: int = -1
    late_reported_at: float | None = None
    stuck: bool = False
    need_since: float | None = None

    @property
    def generation(self) -> int:
        """The generation that the training thread is in; 0 before the first."""
        return self.current.generation if self.current is not None else 0

    @property
    def newest(self) -> messages.Assignment | None:
        """The newest generation with a place for this worker."""
        return self.next if self.next is not None else self.current

    @property
    def standing(self) -> messages.Assignment | None:
        """The generation that the training thread is in, unless it is over."""
        current = self.current
        return None if current is None or self.ended or current.generation <= self.over else current

    @property
    def is_calm(self) -> bool:
        """Whether the worker needs nothing from the scheduler, so that training may go on without it."""
        return (
            self.running
            and self.next is None
            and self.standing is not None
            and self.held != self.generation
            and self.suspicion_since is None
            and not self.stuck
            and self.goodbye is None
        )

    def is_over(self, generation: int) -> bool:
        """Whether ``generation`` has ended, or a newer one is known."""
        return self.ended or generation <= self.over or generation < self.seen

    def is_by_steps(self, new: messages.Assignment, step: int) -> bool:
        """Whether the change happens at a step boundary that is still to come after ``step`` steps."""
        return new.switch_after_step >= 0 and (self.uses_steps or new.switch_after_step > step)

    def take_up(self, new: messages.Assignment) -> None:
        """Records a newer generation, which the training thread has to enter."""
        self.seen = new.generation
        self.next, self.ids, self.minted = new, None, None
        self.suspended = False

    def suspend(self, generation: int) -> None:
        """Records that everything up to ``generation`` is over, and that the job waits for workers."""
        self.seen = self.over = generation
        self.next = self.ids = self.minted = None
        self.suspended = True

    def enter(self, new: messages.Assignment) -> None:
        """Records that the training thread enters ``new``, which was the next generation."""
        self.current, self.next, self.wants_entry = new, None, False
        self.built = self.running = False
        self.suspicion_since = None
        self.over = max(self.over, new.generation - 1)

    def end(self) -> None:
        """Records that the membership is over for good."""
        self.ended = True
        self.leave_at = None
        self.minted = self.ids = None
