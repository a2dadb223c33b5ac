"""Drives the membership machine: its clock, its threads, its stream, and the threads that wait for it.

The machine is a monitor: whichever thread has news steps it under one lock. One thread of ours reads the
present stream, one waits for the machine's deadline. Whatever may block (minting ids, aborting
communicators, closing streams) happens outside the lock.

A thread of its own watches how long the training thread has waited for its peers, and probes them when asked.
It looks at a few numbers once a second; nothing of it stands in the way of a step. That something is late
goes to the scheduler, which asks all members to probe each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from muster.communicators.base import Communicator
from muster.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    FormationTimeoutError,
    JobEndedError,
    LeaveGranted,
    LeaveNow,
    MembershipChanged,
    NotInitializedError,
    PeerFinishedError,
    PeerLostError,
    RefusedError,
    SchedulerUnreachableError,
    SecurityError,
    WorkerError,
)
from muster.wire import messages as m
from muster.wire.codec import encode
from muster.wire.threads import start_thread
from muster.worker import ending
from muster.worker.session import events as e
from muster.worker.session.leave import LoneLeave
from muster.worker.session.machine import Membership
from muster.worker.session.pace import Pace


def failure_of(notice: e.Failed) -> WorkerError:
    """The error with which a script learns why its membership is over."""
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
    """Makes a text begin with a capital and end with a full stop, so that a remedy can follow."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def reason_of(error: BaseException) -> str:
    """Describes an exception in one line for the scheduler's log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if isinstance(error, LeaveNow | LeaveGranted):
        return "asked to leave"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit code {error.code}"
    text = error.message if isinstance(error, WorkerError) else str(error)  # its remedy is for its own script
    text = " ".join(text.split())
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


log = logging.getLogger("muster.worker")

LOOK_S = 1.0  # how often it is looked whether a leave waits for too long, a collective hangs, a signal came
HANG_S = 5.0  # of a collective, after which it counts as waiting for others that may not come
_QUIET = (e.StepGranted, e.StepHeld)


class Line(Protocol):
    """The methods of a :class:`~muster.worker.session.connection.Connection` that the client uses."""

    post: Callable[[e.Event], object]

    def open(self, number: int) -> None:
        """Begins to open a stream under this number."""

    def send(self, data: bytes) -> None:
        """Sends a message on the newest stream, as soon as that is open."""

    def close(self, number: int) -> None:
        """Ends this stream, if it is open."""

    def close_all(self) -> None:
        """Ends all streams for good."""


class LiveCommunicators:
    """The open communicators of the present generation.

    Args:
        lock: the one under which generations end.
        start: starts a thread, given its name and what it runs.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        start: Callable[[str, Callable[[], None]], threading.Thread],
    ) -> None:
        self._lock = lock
        self._start = start
        self._generation = 0
        self._communicators: list[Communicator] = []
        self._aborting: threading.Thread | None = None

    def add(self, generation: int, communicator: Communicator) -> None:
        """Adds a communicator; those of another generation are forgotten."""
        with self._lock:
            if self._generation != generation:
                self._generation, self._communicators = generation, []
            self._communicators.append(communicator)

    def forget(self, communicator: Communicator) -> None:
        """Forgets a communicator that needs no abort any more; idempotent."""
        with self._lock, contextlib.suppress(ValueError):
            self._communicators.remove(communicator)

    def abort(self, error: Exception) -> None:
        """Begins to abort all of them; call it under the lock.

        On a thread of its own: an abort may take a while, and the next generation's ids come meanwhile.
        It is started under the lock, so that a thread that sees the change can wait for it.
        """
        communicators = list(self._communicators)
        if not communicators:
            return

        def run() -> None:
            for communicator in communicators:
                communicator.abort(error)

        self._aborting = self._start("muster-abort", run)

    def end(self, end: Callable[[Communicator], None]) -> None:
        """Calls ``end`` with each communicator there is, the youngest first.

        That may block on a peer which dies meanwhile, so the end of the generation still aborts it.
        """
        self.settle_aborts()
        while youngest := self._communicators[-1:]:
            try:
                end(youngest[0])
            finally:
                self.forget(youngest[0])
        self.settle_aborts()

    def settle_aborts(self) -> None:
        """Waits until no thread is inside a communicator to abort it."""
        with self._lock:  # a thread that cannot be joined yet is not seen
            aborting = self._aborting
        if aborting is not None:
            aborting.join()


class Client:
    """One worker's side of the conversation with the scheduler, and its results for the training thread.

    Args:
        core: the machine.
        connection: to the scheduler.
        mint: makes unique ids; called on a thread of the client.
        lone_leave: when a worker that is to leave goes without consent.
        recent: the last collectives, for heartbeats; only the very last while the training goes on.
        hanging_s: for how long the oldest collective under way has been so.
        note_loss: called with who was the first to go, as soon as the scheduler says so; None: they go on.
        late_s: the same, as far as it is known on a device.
        waits: whether the training thread waits for other ranks in a collective.
        probe_all: takes addresses by node id, and returns why some of those workers cannot be reached.
        pace: when a wait for others is too long.
        threads: starts threads.

    Attributes:
        failure: why the membership is over for good; None: it is not.
        pending: the planned change that is to come; None: there is none.
        communicators: those that the end of a generation aborts.
    """

    def __init__(
        self,
        core: Membership,
        connection: Line,
        *,
        mint: Callable[[int], tuple[bytes, ...]],
        lone_leave: LoneLeave,
        recent: Callable[..., tuple[m.Collective, ...]] = lambda *, last_only: (),
        hanging_s: Callable[[], float] = lambda: 0.0,
        note_loss: Callable[[m.FirstLoss | None], None] = lambda _: None,
        late_s: Callable[[], float] = lambda: 0.0,
        waits: Callable[[], bool] = lambda: False,
        probe_all: Callable[[dict[str, str]], dict[str, str]] = lambda targets: {},
        pace: Pace | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._core = core
        self._connection = connection
        self._mint = mint
        self._recent = recent
        self._hanging_s = hanging_s
        self._note_loss = note_loss
        self._loss_noted = False
        self._threads = threads or Threads()
        self._clock = self._threads.now
        self._lone_leave = lone_leave
        self._leave_reported = False
        self._is_held = False  # at a step boundary, until a planned change is worked out
        self._lock = self._changed = self._threads.condition()
        self._timer: Loop | None = None
        self._deadline: float | None = None
        self._closed = False
        self._building_since: float | None = None
        self._taken = 0  # the last generation that was to be built
        self._late_s = late_s
        self._waits = waits
        self._busy: list[str] = []
        self._pace = pace or Pace()
        self._watcher = Watcher(
            self._pace,
            hanging_s=self._peers_late_s,
            waits=self._waits_for_others,
            busy=lambda: ", ".join(self._busy),
            broken=lambda: (self._change, self._core.times_put_off),
            probe_all=probe_all,
            post=self.post,
            threads=self._threads,
        )
        self._news = 0
        self._place_reported = (0, 0, 0)
        self.communicators = LiveCommunicators(self._lock, self._threads.start)
        self._handlers = self._handled()
        self._forget()
        connection.post = self.post

    def _handled(self) -> dict[type, Callable[[Any], Callable[[], None] | None]]:
        """What follows each of the machine's notices; what is returned is called without the lock."""
        return {
            e.Connect: lambda notice: self._connection.open(notice.stream),
            e.Disconnect: lambda notice: lambda: self._connection.close(notice.stream),
            e.LogLine: self._on_log_line,
            e.MintUniqueIds: lambda notice: lambda: self._run_mint(notice),
            e.ProbeWanted: self._watcher.ask,
            e.LossKnown: self._on_loss,
            e.Build: lambda notice: setattr(self, "_build", notice),
            e.Running: self._on_running,
            e.Over: self._on_over,
            e.Dismissed: self._on_dismissed,
            e.ChangePending: lambda notice: setattr(self, "pending", notice),
            e.ChangePutOff: lambda _: setattr(self, "pending", None),
            e.NoVerdict: self._on_no_verdict,
            e.Failed: lambda notice: self._fail(failure_of(notice)),
            e.Left: lambda _: setattr(self, "_left", True),
            e.StepGranted: lambda _: None,
            e.StepHeld: lambda _: None,
            e.GateChanged: lambda _: None,
        }

    def _forget(self) -> None:
        """Resets all that is known of the membership."""
        self.failure: WorkerError | None = None
        self.pending: e.ChangePending | None = None
        self._dismissal: LeaveGranted | None = None  # it leaves as asked, once its generation is over
        self._change: MembershipChanged | None = None  # the last one
        self._build: e.Build | None = None  # the newest one that has not been taken
        self._running = 0  # the newest generation that all members have built
        self._no_verdict = 0  # the generation of which the scheduler knows no change
        self._finished: PeerFinishedError | None = None  # which rank has, while this one waited in that
        self._left = False  # the goodbye was heard, or its deadline is over

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Starts the threads and begins to look for the scheduler."""
        self._timer = self._threads.loop("muster-timer", self._make_turn)
        self._watcher.start()
        self.post(e.Started())

    def renew(self, incarnation: int, data_address: str) -> None:
        """Asks for a place anew after this process has lost its own."""
        with self._lock:
            self._forget()
        self.post(e.Renewed(incarnation, data_address))
        with self._lock:
            self._leave_reported = False  # the machine has begun anew, and the leave has not
            self._wake_timer()

    def expect_leave(self, reason: str) -> None:
        """Lets the timer's thread ask for leave at once, whatever the training thread is in.

        If no scheduler can let this worker go, or the next generation does not form, it soon goes without.

        Callable from a signal handler, wherever that interrupts this thread: it takes no lock.
        """
        if self._lone_leave.wanted is None:
            self._lone_leave.wanted = (self._clock(), reason)
            self._wake_timer()

    def leave_now(self, reason: str) -> None:
        """As :meth:`expect_leave`, for a worker that has begun nothing yet and need wait for nobody."""
        self._lone_leave.at_once = True
        self.expect_leave(reason)

    def leave(self, *, finished: bool, reason: str, consequence: bool = False, exit_code: int = 0) -> bool:
        """Says goodbye and waits until that is heard, or its deadline is over."""
        self.post(e.Goodbye(finished, reason, consequence, exit_code))
        with self._lock:
            while not self._left and not self._closed:
                self._wait()
        return self._left

    def close(self) -> None:
        """Ends everything at once; idempotent. No thread of ours is in gRPC afterwards.

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

    def post(self, event: e.Event) -> e.Decision:
        """Feeds the machine with an event and carries out its decision. Callable from any thread."""
        later: list[Callable[[], None]] = []
        with self._lock:
            if self._closed:
                return e.Decision()
            decision = self._core.step(event, self._clock())
            if decision.reason:
                log.debug("%s", decision.reason)
            for notice in decision.notices:
                action = self._handlers[type(notice)](notice)
                if action is not None:  # it may block: not under the lock
                    later.append(action)
            for message in decision.messages:
                if isinstance(message, m.Heartbeat):
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
        self._news += 1
        self._changed.notify_all()

    def _with_collectives(self, beat: m.Heartbeat) -> m.Heartbeat:
        """Adds the last collective to a heartbeat, or all kept ones if nothing has moved since the last."""
        place = (beat.generation, beat.started_step, beat.step)
        moved, self._place_reported = place != self._place_reported, place
        return beat.replaced(recent=self._recent(last_only=moved), pid=os.getpid())

    def _wake_timer(self) -> None:
        if self._timer is not None:
            self._timer.put()

    def _make_turn(self) -> float | None:
        """Does what is due; returns in how many seconds something may be due again."""
        with self._lock:
            if self._closed:
                return None
            self._leave_alone_if_due()
            wanted = self._lone_leave.wanted
            wait_s = None if self._deadline is None else self._deadline - self._clock()
        if wanted is not None and not self._leave_reported:
            self._leave_reported = True
            self.post(e.LeaveRequested(wanted[1]))
            return 0.0
        if wait_s is None or wait_s > 0:
            looks = wanted is not None or self._core.is_away
            return min(wait_s or LOOK_S, LOOK_S) if looks else wait_s
        if self._core.is_away:
            self.post(e.CollectivesStuck(self._hanging_s() > HANG_S))
        self.post(e.Tick())
        return 0.0

    def _leave_alone_if_due(self) -> None:
        """Lets a worker leave by itself where the scheduler cannot plan it in time."""
        wanted = self._lone_leave.wanted
        if wanted is None or self.failure is not None:
            return
        if self._lone_leave.at_once:
            self._fail(LeaveGranted(f"This worker leaves the job: {wanted[1]}."))
            return
        waits = self._is_held or self._hanging_s() > HANG_S
        obstacle = self._lone_leave.obstacle(self._clock(), away=self._core.is_away, waits=waits)
        if obstacle:
            why = f"This worker leaves the job as asked, by itself: {obstacle}."
            self._fail(LeaveGranted(why, alone=True))

    def _fail(self, error: WorkerError) -> None:
        self.failure = error
        self.communicators.abort(error)
        self._wake_waiters()

    # ------------------------------------------------------------ news of the membership, under the lock

    def _on_log_line(self, notice: e.LogLine) -> None:
        log.info("%s", notice.sentence)
        said = notice.sentence
        ending.note(
            waits=said if notice.waits else "", goes_on="" if notice.waits else said, phase=self._core.phase
        )

    def _on_loss(self, notice: e.LossKnown) -> None:
        self._loss_noted = True
        self._note_loss(notice.loss)

    def _on_running(self, notice: e.Running) -> None:
        self._running = notice.generation
        if self._loss_noted:
            self._loss_noted = False
            self._note_loss(None)

    def _on_no_verdict(self, notice: e.NoVerdict) -> None:
        self._no_verdict, self._finished = notice.generation, None
        if notice.finished_rank >= 0:
            self._finished = PeerFinishedError(notice.sentence.rstrip("."), rank=notice.finished_rank)

    def _on_dismissed(self, notice: e.Dismissed) -> None:
        why = sentence(f"This worker leaves the job: {notice.reason}")
        self._dismissal = LeaveGranted(why, alone=notice.alone)

    def _on_over(self, notice: e.Over) -> None:
        self.pending = None
        over = f"Generation {notice.generation} is over: "  # a suspension's reason says so itself
        self._change = MembershipChanged(
            sentence(over + notice.reason.removeprefix(over)),
            generation=notice.generation,
            lost=notice.lost,
            save=notice.save,
        )
        if not notice.planned:
            self.communicators.abort(self._dismissal or self._change)

    def _run_mint(self, notice: e.MintUniqueIds) -> None:
        try:
            self.post(e.UniqueIdsMinted(notice.generation, self._mint(notice.count)))
        except Exception as error:
            failure = error if isinstance(error, WorkerError) else WorkerError(f"No unique ids: {error!r}.")
            with self._lock:
                self._fail(failure)

    # ------------------------------------------------------------ the training thread

    def adopt(self, generation: int, communicator: Communicator) -> None:
        """Registers a communicator that is aborted when ``generation`` ends; at once if it has."""
        with self._lock:
            self.communicators.add(generation, communicator)
            error = self.over(generation)
        if error is not None:
            communicator.abort(error)

    def over(self, generation: int) -> WorkerError | None:
        """The error with which the generation ended, or None while it goes on."""
        if self.failure is not None:
            return self.failure
        if self._change is not None and self._change.generation >= generation:
            return self._dismissal or self._change
        return None

    def check(self, generation: int) -> None:
        """Raises the error with which the generation ended, if it has."""
        if (error := self.over(generation)) is not None:
            raise error.with_traceback(None)  # each raise would add to that of the last one

    def is_outdated(self, generation: int) -> bool:
        """Whether the generation is over, or a newer one is known."""
        return self._core.is_over(generation)

    @property
    def leave_granted(self) -> bool:
        """Whether this worker leaves as asked."""
        return self._dismissal is not None or isinstance(self.failure, LeaveGranted)

    def next_build(self) -> e.Build:
        """Waits for the newest generation that can be built, and takes it.

        Raises:
            WorkerError: there will be none.
        """
        self.post(e.EntryRequested())
        with self._lock:
            self._lone_leave.note_entering(self._clock())
            self._building_since = None
            while self._build is None:
                error = self.failure or self._dismissal
                if error is not None:
                    raise error.with_traceback(None)
                self._wait_unless_closed()
            build, self._build, self.pending = self._build, None, None
            self._building_since = self._clock()
            self._taken = build.assignment.generation
            return build

    def built(self, generation: int) -> bool:
        """Reports the communicator built and waits for all members; False: the generation is over.

        Raises:
            WorkerError: the membership is over for good.
        """
        self.post(e.CommunicatorBuilt(generation))
        with self._lock:
            while True:
                error = self.over(generation)
                if isinstance(error, MembershipChanged):
                    return False
                if error is not None:
                    raise error.with_traceback(None)
                if self._running >= generation:
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
            What to raise: why the generation is over; if it stands, ``error``, or who has finished.
        """
        self._no_verdict = 0
        if self.over(generation) is None:
            detail = getattr(error, "message", str(error)).rstrip(".")
            timed_out = isinstance(error, CollectiveTimeoutError)
            self.post(e.CommunicatorFailed(generation, rank, detail, timed_out))
        with self._lock:
            while not self._closed and self._no_verdict != generation:
                change = self.over(generation)
                if change is not None:
                    return change.with_traceback(None)
                self._wait()
            return self._finished or error

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
                while self._news == seen and not self._closed and self.over(generation) is None:
                    self._wait()
                self._is_held = False
            self._refuse_if_closed()

    # ------------------------------------------------------------ waits for others

    def begin_busy(self, what: str) -> None:
        """Notes that the training thread does something alone from now on, for as long as it takes."""
        self._busy.append(what)

    def end_busy(self, what: str) -> None:
        """Notes the end of what :meth:`begin_busy` began."""
        self._busy.remove(what)

    def _peers_late_s(self) -> float:
        """How long the training thread has waited for other members, in seconds."""
        if self.over(self._taken) is not None:
            return 0.0
        building_since = self._building_since
        building_s = 0.0 if building_since is None else self._clock() - building_since
        return max(self._late_s(), building_s)

    def _waits_for_others(self) -> bool:
        return self._is_held or self._is_entering() or self._waits()

    def _is_entering(self) -> bool:
        """Whether the training thread waits for a generation, or builds one that is not over.

        A generation that ended before it stood has cut the thread off: until it asks for the next one, others
        wait for it.
        """
        return self._lone_leave.entering and (self._building_since is None or self.over(self._taken) is None)

    def _wait(self) -> None:
        """Waits for news, for a bounded time, because a signal in another thread does not end the wait.

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


# ---------------------------------------------------------------- its threads, and the watcher of collectives

JOIN_TIMEOUT_S = 1.0
TICK_S = 0.1

STOOD_STILL_S = 1.0
"""A thread that did not run for this time was stopped, or its machine was, in seconds."""

TRIES = 3
"""How often probes are repeated if this process stood still meanwhile; then it sends no answer."""


class Loop:
    """A thread that calls a function whenever something is due or was put into its queue.

    Args:
        threads: starts it.
        name: of the thread.
        turn: does what is due; returns after how many seconds it is to be called again at the latest, None:
            when something is put. Never blocks.
        take: takes what was put, and may block.
    """

    def __init__(
        self,
        threads: Threads,
        name: str,
        turn: Callable[[], float | None],
        take: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._turn = turn
        self._take = take
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._closed = False
        self._thread = threads.start(name, self._run)

    def put(self, item: Any = None) -> None:
        """Puts an item into the queue; callable from any thread, and from a signal handler."""
        self._queue.put(item)

    def close(self) -> None:
        """Ends the thread after its present call, for which it waits a while."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                item = self._queue.get(timeout=self._turn())
            except Empty:
                continue
            if item is not None and not self._closed:
                self._take(item)


class Threads:
    """Threads, conditions, queues and their clock; a simulation brings its own."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def start(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Starts a thread that does not keep the process alive."""
        return start_thread(body, name=name)

    def loop(
        self, name: str, turn: Callable[[], float | None], take: Callable[[Any], None] = lambda _: None
    ) -> Loop:
        """Starts a :class:`Loop`."""
        return Loop(self, name, turn, take)

    def condition(self) -> threading.Condition:
        """A condition, with a lock that a thread may take several times."""
        return threading.Condition(threading.RLock())

    def queue(self) -> SimpleQueue[Any]:
        """A queue."""
        return SimpleQueue()


class Watcher:
    """Reports late collectives of one worker, and probes others when asked.

    Args:
        pace: how long they may take.
        hanging_s: for how long the training thread has waited for something that others must do, in seconds;
            0: it does not wait.
        waits: whether the training thread can do nothing without others.
        busy: what it does alone; empty: nothing.
        broken: differs after a change of members, or once the scheduler could decide nothing: how long a wait
            was in which that happened says nothing of the steps.
        probe_all: takes addresses by node id, returns why some cannot be reached.
        post: feeds the membership machine.
        threads: starts threads.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        hanging_s: Callable[[], float],
        waits: Callable[[], bool],
        busy: Callable[[], str],
        broken: Callable[[], object],
        probe_all: Callable[[dict[str, str]], dict[str, str]],
        post: Callable[[e.Event], object],
        threads: Threads,
    ) -> None:
        self._pace = pace
        self._hanging_s = hanging_s
        self._waits = waits
        self._busy = busy
        self._broken = broken
        self._late_in: object = None
        self._probe_all = probe_all
        self._post = post
        self._late_s = 0.0
        self._threads = threads
        self._loop: Loop | None = None
        self._look_at = 0.0

    def start(self) -> None:
        """Starts the thread."""
        self._look_at = self._threads.now() + LOOK_S
        self._loop = self._threads.loop("muster-watcher", self._look_again, self._answer)

    def ask(self, wanted: e.ProbeWanted) -> None:
        """Has some workers probed; callable from any thread, returns at once."""
        if self._loop is not None:
            self._loop.put(wanted)

    def close(self) -> None:
        """Ends the thread; one that probes ends by itself."""
        if self._loop is not None:
            self._loop.close()

    def _look_again(self) -> float:
        now = self._threads.now()
        if now >= self._look_at:
            self.look()
            self._look_at = now + LOOK_S
        return self._look_at - now

    def look(self) -> None:
        """Reports to the machine if the training thread has waited for too long."""
        hanging_s = self._hanging_s()
        if hanging_s > self._pace.limit_s:
            self._late_s, self._late_in = hanging_s, self._broken()
            self._post(e.PeersLate(hanging_s))
        elif self._late_s:
            if self._late_in == self._broken():
                self._pace.note_wait(self._late_s)
            self._late_s = 0.0

    def _answer(self, wanted: e.ProbeWanted) -> None:
        targets = dict(wanted.targets)
        for _ in range(TRIES):
            unreached, seconds, stood_still = self._probe(targets)
            if unreached is None:
                return
            if not (stood_still and unreached):
                late = self._hanging_s() > self._pace.limit_s
                failed = tuple(unreached.items())
                self._post(e.ProbesDone(wanted.round, failed, late, self._waits(), self._busy(), seconds))
                return
            # ``seconds`` would say nothing of when it failed.
            targets = {node_id: targets[node_id] for node_id in unreached}

    def _probe(self, targets: dict[str, str]) -> tuple[dict[str, str] | None, float, bool]:
        """Probes once; returns failures by node id, seconds since the start, and whether it stood still."""
        clock, found = self._threads.now, self._threads.queue()
        self._threads.start("muster-probes", lambda: self._try(targets, found))
        began = lived_since = seen_at = clock()
        while True:
            try:
                unreached = found.get(timeout=TICK_S)
                break
            except Empty:
                pass
            finally:
                now = clock()
                lived_since = now if now > seen_at + STOOD_STILL_S else lived_since
                seen_at = now
        return unreached, clock() - lived_since, lived_since > began

    def _try(self, targets: dict[str, str], found: SimpleQueue[Any]) -> None:
        try:
            found.put(self._probe_all(dict(targets)))
        except Exception:
            log.exception("Fault while probing the other workers.")
            found.put(None)
