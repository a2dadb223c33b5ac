"""Drives the membership machine: its clock, its threads, its stream, and whoever waits for it.

The machine is a monitor: whichever thread has news steps it under one lock. One thread of ours reads the
present stream, one waits for the machine's deadline. Whatever may block (minting ids, aborting
communicators, closing streams) happens outside the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from muster.worker.communicators.base import Communicator
from muster.worker.communicators.live import LiveCommunicators
from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.control.connection import JOIN_TIMEOUT_S, Connector, Streams
from muster.worker.control.leave import LoneLeave
from muster.worker.control.machine import Membership
from muster.worker.control.pace import Pace
from muster.worker.control.watcher import Watcher
from muster.worker.control.wire import encode
from muster.worker.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    FormationTimeoutError,
    JobEndedError,
    LeaveGranted,
    LeaveNow,
    MembershipChanged,
    NotInitializedError,
    PeerLostError,
    RefusedError,
    SchedulerUnreachableError,
    SecurityError,
    WorkerError,
)


def failure_of(notice: e.Failed) -> WorkerError:
    """The error that tells a script why its membership is over."""
    text = sentence(notice.sentence)
    if notice.kind is e.FailureKind.SECURITY:
        return SecurityError(text)
    if notice.kind is e.FailureKind.UNREACHABLE:
        return SchedulerUnreachableError(
            text,
            remedy="Check that it runs, and MS_SCHED_HOST and MS_SCHED_PORT.",
        )
    if notice.kind is e.FailureKind.FORMATION_TIMEOUT:
        return FormationTimeoutError(text)
    if notice.kind is e.FailureKind.LEAVE:
        return LeaveGranted(text, alone=True)
    if notice.kind is e.FailureKind.JOB_ENDED:
        return JobEndedError(text, ok=notice.ok)
    return RefusedError(text, code=notice.code.name)


def sentence(text: str) -> str:
    """Begins with a capital and ends with a full stop, so that a remedy can follow."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def reason_of(error: BaseException) -> str:
    """An exception in one line, fit for the scheduler's log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if isinstance(error, LeaveNow | LeaveGranted):
        return "asked to leave"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit code {error.code}"
    told = error.message if isinstance(error, WorkerError) else str(error)  # its remedy is for its own script
    text = " ".join(told.split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def is_consequence(error: BaseException | None) -> bool:
    """Whether an error comes from what other processes did, or was raised while such an error was handled."""
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
    """The code with which Python, or Muster's hook, ends a process that ``error`` ends: 0 to 255."""
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
    """Whether this is a SystemExit without a code or with 0; Python ends with 1 on whatever is no integer."""
    return isinstance(error, SystemExit) and (
        error.code is None or (isinstance(error.code, int) and error.code == 0)
    )


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


log = logging.getLogger("muster.worker")

LOOK_S = 1.0  # how often it is looked whether a leave waits for too long, a collective hangs, a signal came
HANG_S = 5.0  # of a collective, after which it counts as waiting for others that may not come
_QUIET = (e.StepGranted, e.StepHeld)


class Client:
    """One worker's line to the scheduler, and what it makes known to the training thread.

    Args:
        core: the machine.
        connector: opens streams.
        mint: makes unique ids; called on a thread of the client.
        lone_leave: when a worker that is to leave goes without consent.
        recent: the last collectives, for heartbeats; only the very last while the training goes on.
        hanging_s: for how long the oldest collective under way has been so.
        note_loss: called with who was the first to go, as soon as the scheduler says so; None: they go on.
        late_s: the same, as far as it may be told on a device.
        waits: whether the training thread waits for other ranks in a collective.
        probe_all: takes addresses by node id, and returns why some of those workers cannot be reached.
        clock: monotonic seconds.

    Attributes:
        standing: what is known of the membership.
        communicators: those that the end of a generation aborts.
    """

    def __init__(
        self,
        core: Membership,
        connector: Connector,
        *,
        mint: Callable[[int], tuple[bytes, ...]],
        lone_leave: LoneLeave,
        recent: Callable[..., tuple[m.Collective, ...]] = lambda *, last_only: (),
        hanging_s: Callable[[], float] = lambda: 0.0,
        note_loss: Callable[[m.FirstLoss | None], None] = lambda _: None,
        late_s: Callable[[], float] = lambda: 0.0,
        waits: Callable[[], bool] = lambda: False,
        probe_all: Callable[[dict[str, str]], dict[str, str]] = lambda targets: {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._mint = mint
        self._recent = recent
        self._hanging_s = hanging_s
        self._note_loss = note_loss
        self._loss_noted = False
        self._clock = clock
        self._lone_leave = lone_leave
        self._leave_told = False
        self._is_held = False  # at a step boundary, until a planned change is worked out
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wakes: SimpleQueue[None] = SimpleQueue()  # for the timer; a signal handler may put one, too
        self._streams = Streams(connector, self.post)
        self._timer = threading.Thread(target=self._run_timer, name="muster-timer", daemon=True)
        self._deadline: float | None = None
        self._closed = False
        self._building_since: float | None = None
        self._late_s = late_s
        self._waits = waits
        self._busy: list[str] = []
        self._pace = Pace()
        self._watcher = Watcher(
            self._pace,
            hanging_s=self._peers_late_s,
            waits=self._waits_for_others,
            busy=lambda: ", ".join(self._busy),
            probe_all=probe_all,
            post=self.post,
        )
        self._news = 0
        self._place_told = (0, 0, 0)
        self.standing = Standing()
        self.communicators = LiveCommunicators(self._lock)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begins to look for the scheduler."""
        self._timer.start()
        self._watcher.start()
        self.post(e.Started())

    def renew(self, incarnation: int, data_address: str) -> None:
        """Asks for a place anew after this process has lost its own."""
        with self._lock:
            self.standing = Standing()
        self.post(e.Renewed(incarnation, data_address))
        with self._lock:
            self._leave_told = False  # the machine has begun anew, and the leave that was asked for has not
            self._wakes.put(None)

    def expect_leave(self, reason: str) -> None:
        """Lets the timer's thread ask for leave at once, whatever the training thread is in.

        If no scheduler can let this worker go, or the next generation does not form, it soon goes without.

        Callable from a signal handler, wherever that interrupts this thread: it takes no lock.
        """
        if self._lone_leave.wanted is None:
            self._lone_leave.wanted = (self._clock(), reason)
            self._wakes.put(None)

    def leave_now(self, reason: str) -> None:
        """As :meth:`expect_leave`, for a worker that has begun nothing yet and need wait for nobody."""
        self._lone_leave.at_once = True
        self.expect_leave(reason)

    def leave(self, *, finished: bool, reason: str, consequence: bool = False, exit_code: int = 0) -> bool:
        """Says goodbye and waits until that is heard, or its deadline is over."""
        self.post(e.Goodbye(finished, reason, consequence, exit_code))
        with self._lock:
            while not self.standing.left and not self._closed:
                self._wait()
        return self.standing.left

    def close(self) -> None:
        """Ends everything at once; idempotent. No thread of ours is in gRPC afterwards.

        The interpreter may hang if it ends while a daemon thread holds one of gRPC's locks.
        """
        with self._lock:
            self._closed = True
            self._wakes.put(None)
            self._changed.notify_all()
        self._watcher.close()
        self._streams.close_all()
        if self._timer.is_alive() and self._timer is not threading.current_thread():
            self._timer.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ the monitor

    def post(self, event: e.Event) -> e.Decision:
        """Feeds the machine and carries out what it decides. Callable from any thread."""
        later: list[Callable[[], None]] = []
        with self._lock:
            if self._closed:
                return e.Decision()
            decision = self._core.step(event, self._clock())
            if decision.reason:
                log.debug("%s", decision.reason)
            for notice in decision.notices:
                self._carry_out(notice, later)
            for message in decision.messages:
                if isinstance(message, m.Heartbeat):
                    message = self._with_collectives(message)
                self._streams.send(encode(message))
            if any(type(notice) not in _QUIET for notice in decision.notices):
                self._tell_waiters()
            deadline = self._core.deadline()
            if deadline is not None and (self._deadline is None or deadline < self._deadline):
                self._wakes.put(None)
            self._deadline = deadline
        for action in later:
            action()
        return decision

    def _tell_waiters(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def _with_collectives(self, beat: m.Heartbeat) -> m.Heartbeat:
        """All that is known goes along only when nothing has moved since the last heartbeat."""
        place = (beat.generation, beat.started_step, beat.step)
        moved, self._place_told = place != self._place_told, place
        return beat.replaced(recent=self._recent(last_only=moved))

    def _run_timer(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._leave_alone_if_due()
                wanted = self._lone_leave.wanted
                wait_s = None if self._deadline is None else self._deadline - self._clock()
            if wanted is not None and not self._leave_told:
                self._leave_told = True
                self.post(e.LeaveRequested(wanted[1]))
            elif wait_s is None or wait_s > 0:
                looks = wanted is not None or self._core.is_away
                with contextlib.suppress(Empty):
                    self._wakes.get(timeout=min(wait_s or LOOK_S, LOOK_S) if looks else wait_s)
            else:
                if self._core.is_away:
                    self.post(e.CollectivesStuck(self._hanging_s() > HANG_S))
                self.post(e.Tick())

    def _leave_alone_if_due(self) -> None:
        """Ends the membership of a worker that is to leave where nobody can plan it in time."""
        wanted = self._lone_leave.wanted
        if wanted is None or self.standing.failure is not None:
            return
        if self._lone_leave.at_once:
            self._fail(LeaveGranted(f"This worker leaves the job: {wanted[1]}."))
            return
        waits = self._is_held or self._hanging_s() > HANG_S
        obstacle = self._lone_leave.obstacle(self._clock(), away=self._core.is_away, waits=waits)
        if obstacle:
            told = f"This worker leaves the job as asked, by itself: {obstacle}."
            self._fail(LeaveGranted(told, alone=True))

    def _fail(self, error: WorkerError) -> None:
        self.standing.failure = error
        self.communicators.abort(error)
        self._tell_waiters()

    def _carry_out(self, notice: e.Notice, later: list[Callable[[], None]]) -> None:
        """Carries one notice out, under the lock; appends what must happen outside it."""
        if isinstance(notice, e.ProbeWanted):
            self._watcher.ask(notice)
        elif isinstance(notice, e.Connect):
            self._streams.open(notice.stream)
        elif isinstance(notice, e.Disconnect):
            later.append(lambda: self._streams.close(notice.stream))
        elif isinstance(notice, e.Tell):
            log.info("%s", notice.sentence)
        elif isinstance(notice, e.MintUniqueIds):
            later.append(lambda: self._run_mint(notice))
        elif isinstance(notice, e.LossKnown):
            self._loss_noted = True
            self._note_loss(notice.loss)
        else:
            if isinstance(notice, e.Running) and self._loss_noted:
                self._loss_noted = False
                self._note_loss(None)
            error = self.standing.note(notice)
            if error is not None:
                self.communicators.abort(error)

    def _run_mint(self, notice: e.MintUniqueIds) -> None:
        try:
            self.post(e.UniqueIdsMinted(notice.generation, self._mint(notice.count)))
        except Exception as error:
            failure = error if isinstance(error, WorkerError) else WorkerError(f"No unique ids: {error!r}.")
            with self._lock:
                self._fail(failure)

    # ------------------------------------------------------------ the training thread

    def adopt(self, generation: int, communicator: Communicator) -> None:
        """From now on ``communicator`` is aborted when ``generation`` ends; at once if it has."""
        with self._lock:
            self.communicators.add(generation, communicator)
            error = self.change_of(generation)
        if error is not None:
            communicator.abort(error)

    def change_of(self, generation: int) -> Exception | None:
        """Why the generation is over, or None while it stands."""
        return self.standing.change_of(generation)

    def check(self, generation: int) -> None:
        """Raises why the generation is over, if it is."""
        if (error := self.change_of(generation)) is not None:
            raise error.with_traceback(None)  # each raise would add to that of the last one

    def next_build(self) -> e.Build:
        """Waits for the newest generation that can be built, and takes it.

        Raises:
            WorkerError: there will be none.
        """
        self.post(e.EntryRequested())
        with self._lock:
            self._lone_leave.note_entering(self._clock())
            self._building_since = None
            while (build := self.standing.take_build()) is None:
                self._wait_unless_closed()
            self._building_since = self._clock()
            return build

    def built(self, generation: int) -> bool:
        """Reports the communicator built and waits for all members; False: the generation is over.

        Raises:
            WorkerError: the membership is over for good.
        """
        self.post(e.CommunicatorBuilt(generation))
        with self._lock:
            while True:
                error = self.change_of(generation)
                if isinstance(error, MembershipChanged):
                    return False
                if error is not None:
                    raise error.with_traceback(None)
                if self.standing.running >= generation:
                    self._lone_leave.note_entered()
                    self._building_since = None
                    return True
                self._wait_unless_closed()

    def verdict(self, generation: int, rank: int, error: Exception) -> Exception:
        """Waits to learn whether a failed collective means that the membership has changed.

        Args:
            generation: in which it failed.
            rank: world rank that seems to be at fault; -1: unknown.
            error: what it failed with.

        Returns:
            What to raise: why the generation is over, or ``error`` if it stands.
        """
        self.standing.no_verdict = 0
        if self.change_of(generation) is None:
            detail = getattr(error, "message", str(error)).rstrip(".")
            timed_out = isinstance(error, CollectiveTimeoutError)
            self.post(e.CommunicatorFailed(generation, rank, detail, timed_out))
        with self._lock:
            while not self._closed and self.standing.no_verdict != generation:
                change = self.change_of(generation)
                if change is not None:
                    return change.with_traceback(None)
                self._wait()
            return error

    def start_step(self, step: int, generation: int) -> None:
        """Asks whether the step after ``step`` may begin; waits while a planned change is worked out.

        Raises:
            MembershipChanged: the next step belongs to the next generation.
            WorkerError: the membership is over for good.
        """
        event = e.StepStarting(step)
        self._pace.note_step(step, self._clock())
        while True:
            self.check(generation)
            seen = self._news
            notices = self.post(event).notices
            if notices and type(notices[-1]) is e.StepGranted:
                return
            with self._lock:
                self._is_held = True
                while self._news == seen and not self._closed and self.change_of(generation) is None:
                    self._wait()
                self._is_held = False
            self._refuse_if_closed()

    # ------------------------------------------------------------ waits for others

    def begin_busy(self, what: str) -> None:
        """From now on the training thread does something alone, for as long as it takes."""
        self._busy.append(what)

    def end_busy(self, what: str) -> None:
        """That is over."""
        self._busy.remove(what)

    def _peers_late_s(self) -> float:
        """For how long the training thread has waited for other members, in seconds."""
        building_since = self._building_since
        building_s = 0.0 if building_since is None else self._clock() - building_since
        return max(self._late_s(), building_s)

    def _waits_for_others(self) -> bool:
        return self._is_held or self._lone_leave.entering or self._waits()

    def _wait(self) -> None:
        """Waits for news, a while: a signal may have come by another thread, which wakes nobody here.

        So it is where a process was stopped, got the signal, and was continued. Python runs handlers in the
        main thread, and only between two steps of its code.
        """
        self._changed.wait(LOOK_S)

    def _wait_unless_closed(self) -> None:
        self._refuse_if_closed()
        self._wait()

    def _refuse_if_closed(self) -> None:
        if self._closed:  # nothing is carried out any more that could end a wait
            raise NotInitializedError("The session was released.")

    @property
    def generation_changing(self) -> Callable[[int], bool]:
        """Tells whether a generation is over or a newer one is known."""
        return self._core.is_changing
