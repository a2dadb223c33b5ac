"""Drives the membership machine: its clock, threads and stream, and the threads waiting for results.

The machine is used as a monitor: any thread with an event steps it under one lock. One thread of the client
reads the present stream, and another waits for the machine's deadline. Everything that may block (creating
unique ids, aborting communicators, closing streams) happens outside the lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from muster.communicators.base import Communicator
from muster.errors import (
    CollectiveTimeoutError,
    LeaveGranted,
    MembershipChanged,
    NotInitializedError,
    WorkerError,
)
from muster.wire import messages
from muster.wire.codec import encode
from muster.wire.json_lines import process_lines
from muster.worker import ending
from muster.worker.session import events
from muster.worker.session.failures import failure_of
from muster.worker.session.leave import LoneLeave
from muster.worker.session.live_communicators import LiveCommunicators
from muster.worker.session.machine import MembershipMachine
from muster.worker.session.news import News
from muster.worker.session.pace import Pace
from muster.worker.session.threads import LOOK_S, Loop, Threads
from muster.worker.session.training_thread import Collectives, TrainingThread
from muster.worker.session.watcher import ProbeAll, Watcher

log = logging.getLogger("muster.worker")

_QUIET = (events.StepGranted, events.StepHeld)


class Minting(Protocol):
    """The part of a :class:`~muster.communicators.base.Backend` that the client uses."""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Creates the unique ids of a generation's communicators."""


class Line(Protocol):
    """The part of a :class:`~muster.worker.session.connection.SchedulerConnection` that the client uses."""

    post: Callable[[events.Event], object]

    def open(self, number: int) -> None:
        """Begins to open a stream under this number."""

    def send(self, data: bytes) -> None:
        """Sends a message on the newest stream, once that is open."""

    def close(self, number: int) -> None:
        """Ends this stream, if it is open."""

    def close_all(self) -> None:
        """Ends all streams for good."""


class Client:
    """One worker's side of the communication with the scheduler, and its results for the training thread.

    Args:
        core: the machine.
        connection: the connection to the scheduler.
        backend: creates unique ids; called on a thread of the client.
        collectives: the collectives that the training thread has called.
        prober: given addresses by node id, returns why some of those workers cannot be reached.
        lone_leave: decides when a worker that wants to leave goes without the scheduler's consent.
        pace: decides when a wait for others is too long.
        threads: starts threads.
        times: returns how the time of the steps since its last call was spent, for heartbeats.
        figures: returns, for heartbeats, the training's latest reports besides its steps: values of the
            heartbeat's fields, by name.
        gpu: returns readings of the worker's GPU since its last call, for heartbeats.
        stacks: returns this process's stacks as text within a limit in bytes; may block for seconds.

    Attributes:
        communicators: the communicators that are aborted at the end of a generation.
        training: the state of the training thread.
    """

    def __init__(
        self,
        core: MembershipMachine,
        connection: Line,
        *,
        backend: Minting,
        collectives: Collectives,
        prober: ProbeAll,
        lone_leave: LoneLeave,
        pace: Pace | None = None,
        threads: Threads | None = None,
        times: Callable[[], messages.StepTimes | None] = lambda: None,
        figures: Callable[[], Mapping[str, object]] = dict,
        gpu: Callable[[], messages.GpuReport | None] = lambda: None,
        stacks: Callable[[int], str] = lambda limit_bytes: "",
    ) -> None:
        self._core = core
        self._connection = connection
        self._backend = backend
        self._collectives = collectives
        self._times = times
        self._figures = figures
        self._gpu = gpu
        self._stacks = stacks
        self._loss_noted = False
        self._threads = threads or Threads()
        self._clock = self._threads.now
        self._lone_leave = lone_leave
        self._leave_reported = False
        self._lock = self._changed = self._threads.condition()
        self._timer: Loop | None = None
        self._deadline: float | None = None
        self._closed = False
        self.training = TrainingThread(collectives, lone_leave, over=self.over, clock=self._clock)
        self._pace = pace or Pace()
        self._watcher = Watcher(self._pace, self.training, self, prober, self._threads)
        self._wakings = 0
        self._news = News()
        self._place_reported = (0, 0, 0)
        self.communicators = LiveCommunicators(self._lock, self._threads.start)
        self._handlers = self._handled()
        connection.post = self.post

    def _handled(self) -> dict[type, Callable[[Any], Callable[[], None] | None]]:
        """Returns the handler of each of the machine's notices.

        If a handler returns a function, that function is called without the lock.
        """
        return {
            events.Connect: lambda notice: self._connection.open(notice.stream),
            events.Disconnect: lambda notice: lambda: self._connection.close(notice.stream),
            events.LogLine: self._on_log_line,
            events.MintUniqueIds: lambda notice: lambda: self._run_mint(notice),
            events.ProbeWanted: self._watcher.ask,
            events.TakeStacks: lambda notice: lambda: self._take_stacks(notice),
            events.LossKnown: self._on_loss,
            events.Build: lambda notice: setattr(self._news, "build", notice),
            events.Running: self._on_running,
            events.Over: self._on_over,
            events.Dismissed: lambda notice: self._news.note_dismissed(notice),
            events.ChangePending: lambda notice: setattr(self._news, "pending", notice),
            events.ChangePutOff: lambda _: setattr(self._news, "pending", None),
            events.NoVerdict: lambda notice: self._news.note_no_verdict(notice),
            events.SnapshotWordCame: lambda notice: setattr(self._news, "snapshot_word", notice.word),
            events.Failed: lambda notice: self._fail(failure_of(notice)),
            events.Left: lambda _: setattr(self._news, "left", True),
            events.StepGranted: lambda _: None,
            events.StepHeld: lambda _: None,
            events.GateChanged: lambda _: None,
        }

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Starts the threads and begins to look for the scheduler."""
        self._timer = self._threads.loop("muster-timer", self._make_turn)
        self._watcher.start()
        self.post(events.Started())

    def renew(self, incarnation: int, data_address: str) -> None:
        """Asks for a place again after this process has lost its own."""
        with self._lock:
            self._news = News()
        self.post(events.Renewed(incarnation, data_address))
        with self._lock:
            self._leave_reported = False  # The machine has started over, but the leave is still wanted.
            self._wake_timer()

    def expect_leave(self, reason: str) -> None:
        """Makes the timer's thread ask for leave immediately, whatever the training thread is doing.

        If no scheduler can grant the leave, or the next generation does not form, the worker soon leaves
        without consent.

        Can be called from a signal handler at any point, because it takes no lock.
        """
        if self._lone_leave.wanted is None:
            self._lone_leave.wanted = (self._clock(), reason)
            self._wake_timer()

    def leave_now(self, reason: str) -> None:
        """Like :meth:`expect_leave`, for a worker that has begun nothing and need not wait for anybody."""
        self._lone_leave.at_once = True
        self.expect_leave(reason)

    def leave(
        self,
        *,
        finished: bool,
        reason: str,
        consequence: bool = False,
        exit_code: int = 0,
        gpu_fault: str = "",
    ) -> bool:
        """Sends Leave and waits until the scheduler has confirmed it, or its deadline has passed."""
        self.post(events.Goodbye(finished, reason, consequence, exit_code, gpu_fault))
        with self._lock:
            while not self._news.left and not self._closed:
                self._wait()
        return self._news.left

    def close(self) -> None:
        """Ends everything immediately; idempotent. Afterwards no thread of the client is in gRPC.

        The interpreter may hang if it ends while a daemon thread holds one of gRPC's locks.
        """
        with self._lock:
            self._closed = True
            self._wake_timer()
            self._changed.notify_all()
        self._watcher.close()
        self._connection.close_all()
        if self._timer is not None:
            self._timer.close()

    # ------------------------------------------------------------ the monitor

    def post(self, event: events.Event) -> events.Effects:
        """Passes an event to the machine and carries out the decision. Can be called from any thread."""
        later: list[Callable[[], None]] = []
        with self._lock:
            if self._closed:
                return events.Effects()
            decision = self._core.step(event, self._clock())
            if decision.reason:
                log.debug("%s", decision.reason)
            for notice in decision.notices:
                action = self._handlers[type(notice)](notice)
                if action is not None:  # The action may block, so it is called without the lock.
                    later.append(action)
            for message in decision.messages:
                if isinstance(message, messages.Heartbeat):
                    message = self._with_collectives(message)
                self._connection.send(encode(message))
            if any(type(notice) not in _QUIET for notice in decision.notices):
                self._wake_waiters()
            deadline = self._core.deadline()
            if deadline is not None and (self._deadline is None or deadline < self._deadline):
                self._wake_timer()
            self._deadline = deadline
        for action in later:
            action()
        return decision

    def _wake_waiters(self) -> None:
        self._wakings += 1
        self._changed.notify_all()

    def _with_collectives(self, beat: messages.Heartbeat) -> messages.Heartbeat:
        """Adds the last collective to a heartbeat, or all kept ones if there was no progress."""
        place = (beat.generation, beat.started_step, beat.step)
        moved, self._place_reported = place != self._place_reported, place
        return beat.replaced(
            recent=self._collectives.recent(last_only=moved),
            pid=os.getpid(),
            times=self._times(),
            gpu=self._gpu(),
            **self._figures(),
        )

    def _wake_timer(self) -> None:
        if self._timer is not None:
            self._timer.put()

    def _make_turn(self) -> float | None:
        """Does what is due; returns after how many seconds something may be due again."""
        with self._lock:
            if self._closed:
                return None
            self._leave_alone_if_due()
            wanted = self._lone_leave.wanted
            wait_s = None if self._deadline is None else self._deadline - self._clock()
        if wanted is not None and not self._leave_reported:
            self._leave_reported = True
            self.post(events.LeaveWanted(wanted[1]))
            return 0.0
        if wait_s is None or wait_s > 0:
            looks = wanted is not None or self._core.is_away
            return min(wait_s or LOOK_S, LOOK_S) if looks else wait_s
        if self._core.is_away:
            self.post(events.CollectivesStuck(self.training.is_hanging))
        self.post(events.DeadlineReached())
        return 0.0

    def _leave_alone_if_due(self) -> None:
        """Lets a worker leave on its own if the scheduler cannot plan the leave in time."""
        wanted = self._lone_leave.wanted
        if wanted is None or self._news.failure is not None:
            return
        if self._lone_leave.at_once:
            self._fail(LeaveGranted(f"This worker leaves the job: {wanted[1]}."))
            return
        waits = self.training.is_held or self.training.is_hanging
        obstacle = self._lone_leave.obstacle(self._clock(), away=self._core.is_away, waits=waits)
        if obstacle:
            why = f"This worker leaves the job as asked, by itself: {obstacle}."
            self._fail(LeaveGranted(why, alone=True))

    def _fail(self, error: WorkerError) -> None:
        self._news.failure = error
        self.communicators.abort(error)
        self._wake_waiters()

    # ------------------------------------------------------------ news of the membership, under the lock

    def _on_log_line(self, notice: events.LogLine) -> None:
        log.info("%s", notice.sentence)
        said = notice.sentence
        ending.note(
            waits=said if notice.waits else "", goes_on="" if notice.waits else said, phase=self._core.phase
        )

    def _on_loss(self, notice: events.LossKnown) -> None:
        self._loss_noted = True
        _note_loss(notice.loss)

    def _on_running(self, notice: events.Running) -> None:
        self._news.running = notice.generation
        if self._loss_noted:
            self._loss_noted = False
            ending.note(first=None)

    def _on_over(self, notice: events.Over) -> None:
        error = self._news.note_over(notice)
        process_lines.over()
        if not notice.planned:
            self.communicators.abort(error)

    def _run_mint(self, notice: events.MintUniqueIds) -> None:
        try:
            self.post(events.UniqueIdsMinted(notice.generation, self._backend.mint_unique_ids(notice.count)))
        except Exception as error:
            failure = error if isinstance(error, WorkerError) else WorkerError(f"No unique ids: {error!r}.")
            with self._lock:
                self._fail(failure)

    def _take_stacks(self, notice: events.TakeStacks) -> None:
        """Takes the stacks on a separate thread, so that a slow source delays no messages."""

        def take() -> None:
            try:
                text = self._stacks(notice.limit_bytes)
            except Exception as error:  # Taking stacks must not end anything.
                log.debug("no stacks", exc_info=error)
                text = f"No stacks were taken: {error!r}."
            self.post(events.StacksTaken(notice.request, text or "This worker says nothing of its stacks."))

        self._threads.start("muster-stacks", take)

    # ------------------------------------------------------------ the training thread

    @property
    def failure(self) -> WorkerError | None:
        """The error that ended the membership for good; None if it has not ended."""
        return self._news.failure

    @property
    def pending(self) -> events.ChangePending | None:
        """The next planned change; None if there is none."""
        return self._news.pending

    @property
    def snapshot_word(self) -> messages.SnapshotWord | None:
        """The scheduler's newest message on snapshots; None if there is none yet."""
        return self._news.snapshot_word

    def adopt(self, generation: int, communicator: Communicator) -> None:
        """Registers a communicator, to be aborted when ``generation`` ends.

        If the generation has already ended, aborts the communicator immediately.
        """
        with self._lock:
            self.communicators.add(generation, communicator)
            error = self.over(generation)
        if error is not None:
            communicator.abort(error)

    def over(self, generation: int) -> WorkerError | None:
        """Returns the error with which the generation ended, or None while it goes on."""
        return self._news.over(generation)

    def check(self, generation: int) -> None:
        """Raises the error with which the generation ended, if it has."""
        if (error := self.over(generation)) is not None:
            raise error.with_traceback(None)  # Each raise would extend the traceback of the last one.

    @property
    def news_of_members(self) -> object:
        """A value that changes with the members, with a new group, and when the scheduler is undecided."""
        return self._news.change, self.training.is_building, self._core.times_put_off

    def is_outdated(self, generation: int) -> bool:
        """Whether the generation is over, or a newer one is known."""
        return self._core.is_over(generation)

    @property
    def leave_granted(self) -> bool:
        """Whether this worker leaves as asked."""
        return self._news.leave_granted

    def next_build(self) -> events.Build:
        """Waits for the newest generation whose communicator can be built, and returns it.

        Raises:
            WorkerError: there will be no further generation.
        """
        self.post(events.EntryRequested())
        with self._lock:
            self.training.note_entering()
            while (news := self._news).build is None:
                error = news.failure or news.dismissal
                if error is not None:
                    raise error.with_traceback(None)
                self._wait_unless_closed()
            build, news.build, news.pending = news.build, None, None
            self.training.note_building(build.assignment.generation)
            return build

    def built(self, generation: int) -> bool:
        """Reports that the communicator is built and waits for all members.

        Returns False if the generation is over.

        Raises:
            WorkerError: the membership is over for good.
        """
        self.post(events.CommunicatorBuilt(generation))
        with self._lock:
            while True:
                error = self.over(generation)
                if isinstance(error, MembershipChanged):
                    return False
                if error is not None:
                    raise error.with_traceback(None)
                if self._news.running >= generation:
                    self.training.note_entered()
                    return True
                self._wait_unless_closed()

    def verdict(self, generation: int, rank: int, error: Exception) -> Exception:
        """Waits for the scheduler's verdict: whether a failed collective means a change of members.

        Args:
            generation: the generation in which it failed.
            rank: world rank that seems to be at fault; -1 if unknown.
            error: the error of the collective.

        Returns:
            The error to raise. If the generation is over, it says why. If not, it is ``error``, or an error
                that names the rank that has finished.
        """
        self._news.no_verdict = 0
        if self.over(generation) is None:
            detail = getattr(error, "message", str(error)).rstrip(".")
            timed_out = isinstance(error, CollectiveTimeoutError)
            self.post(events.CommunicatorFailed(generation, rank, detail, timed_out))
        with self._lock:
            while not self._closed and self._news.no_verdict != generation:
                change = self.over(generation)
                if change is not None:
                    return change.with_traceback(None)
                self._wait()
            return self._news.finished or error

    def start_step(self, step: int, generation: int) -> None:
        """Asks whether the step after ``step`` may begin; waits while a planned change is being prepared.

        Raises:
            MembershipChanged: the next step belongs to the next generation.
            WorkerError: the membership is over for good.
        """
        event = events.StepStarting(step)
        self._pace.note_step(step, self._clock())
        while True:
            self.check(generation)
            seen = self._wakings
            notices = self.post(event).notices
            if notices and type(notices[-1]) is events.StepGranted:
                return
            with self._lock:
                self.training.is_held = True
                while self._wakings == seen and not self._closed and self.over(generation) is None:
                    self._wait()
                self.training.is_held = False
            self._refuse_if_closed()

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Waits for news for a limited time, because a signal in another thread does not end the wait.

        This happens if a process is stopped, gets a signal, and is continued. Python runs signal handlers
        only in the main thread, between two bytecode instructions.
        """
        self._changed.wait(LOOK_S)

    def _wait_unless_closed(self) -> None:
        self._refuse_if_closed()
        self._wait()

    def _refuse_if_closed(self) -> None:
        if self._closed:  # No further notices are handled, so nothing could end a wait any more.
            raise NotInitializedError("The session was released.")


def _note_loss(loss: messages.FirstLoss) -> None:
    first = {"node_id": loss.node_id, "incarnation": loss.incarnation}
    ending.note(first={**first, "sentence": loss.sentence, "exit_code": loss.exit_code})
