"""Drives the membership machine: its clock, its threads, its stream, and whoever waits for it.

The machine is a monitor: whichever thread has news steps it under one lock. Two threads are ours: one
reads the present stream, one waits for the machine's deadline. Whatever may block (minting ids, aborting
communicators, closing streams) happens outside the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from worker.channel import Connector, DeniedError, MalformedError, Stream
from worker.communicators.base import Communicator
from worker.core import events as e
from worker.core import messages as m
from worker.core.membership import Membership
from worker.errors import LeaveGranted, MembershipChanged, NotInitializedError, WorkerError
from worker.failures import failure_of, sentence
from worker.wire import WireError, decode, encode

log = logging.getLogger("muster.worker")

CLOSE_TIMEOUT_S = 2.0
LEAVE_ALONE_S = 3.0  # to find a lost scheduler that would let this worker go; launchers kill after 10
ENTER_ALONE_S = 5.0  # for the next generation to form, before a worker that is to leave goes without it
LOOK_S = 1.0  # how often it is looked whether that time is over, or a signal has come
LEAVE_S = 20.0  # for all to finish the step, before a worker that is to leave goes amid it
HANG_S = 5.0  # of a collective, after which it counts as waiting for others that may not come
_QUIET = (e.StepGranted, e.StepHeld)


class Client:
    """One worker's line to the scheduler, and what it makes known to the training thread.

    Args:
        core: the machine.
        connector: opens streams.
        mint: makes unique ids; called on a thread of the client.
        recent: the last collectives, for heartbeats; only the very last while the training goes on.
        hanging_s: for how long the oldest collective under way has been so.
        clock: monotonic seconds.
        leave_alone_s: how long a worker that is to leave waits for a lost scheduler's consent.
        enter_alone_s: how long it waits for a generation to form.
        leave_s: how long after it was asked it still waits for others that do not come to the step's end.
    """

    def __init__(
        self,
        core: Membership,
        connector: Connector,
        *,
        mint: Callable[[int], tuple[bytes, ...]],
        recent: Callable[..., tuple[m.Collective, ...]] = lambda *, last_only: (),
        hanging_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        leave_alone_s: float = LEAVE_ALONE_S,
        enter_alone_s: float = ENTER_ALONE_S,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._core = core
        self._connector = connector
        self._mint = mint
        self._recent = recent
        self._hanging_s = hanging_s
        self._clock = clock
        self._leave_alone_s = leave_alone_s
        self._enter_alone_s = enter_alone_s
        self._leave_s = leave_s
        self._leave_wanted: tuple[float, str] | None = None
        self._leaves_now = False
        self._leave_told = False
        self._entering_since: float | None = None
        self._is_held = False  # at a step boundary, until a planned change is worked out
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wakes: SimpleQueue[None] = SimpleQueue()  # for the timer; a signal handler may put one, too
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._streams: dict[int, Stream] = {}
        self._threads: list[threading.Thread] = []
        self._deadline: float | None = None
        self._closed = False
        self._news = 0
        self._place_told = (0, 0, 0)
        self._clear()

    def _clear(self) -> None:
        self.failure: WorkerError | None = None
        self.dismissal: LeaveGranted | None = None
        self.pending: e.ChangePending | None = None
        self._build: e.Build | None = None
        self._running = 0
        self._interruption: MembershipChanged | None = None
        self._no_verdict = 0
        self._left = False
        self._communicators: tuple[int, list[Communicator]] = (0, [])
        self._aborting: threading.Thread | None = None

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begins to look for the scheduler."""
        timer = threading.Thread(target=self._run_timer, name="muster-timer", daemon=True)
        self._threads.append(timer)
        timer.start()
        self.post(e.Started())

    def renew(self, incarnation: int, data_address: str) -> None:
        """Asks for a place anew after this process has lost its own."""
        with self._lock:
            self._clear()
        self.post(e.Renewed(incarnation, data_address))

    def expect_leave(self, reason: str) -> None:
        """Lets the timer's thread ask for leave at once, whatever the training thread is in.

        If no scheduler can let this worker go, or the next generation does not form, it soon goes without.

        Callable from a signal handler, wherever that interrupts this thread: it takes no lock.
        """
        if self._leave_wanted is None:
            self._leave_wanted = (self._clock(), reason)
            self._wakes.put(None)

    def leave_now(self, reason: str) -> None:
        """As :meth:`expect_leave`, for a worker that has begun nothing yet and need wait for nobody."""
        self._leaves_now = True
        self.expect_leave(reason)

    @property
    def leave_granted(self) -> bool:
        """Whether this worker leaves as asked."""
        return self.dismissal is not None or isinstance(self.failure, LeaveGranted)

    def leave(self, *, finished: bool, reason: str) -> bool:
        """Says goodbye and waits until that is heard, or its deadline is over."""
        self.post(e.Goodbye(finished, reason))
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
            self._wakes.put(None)
            self._changed.notify_all()
            streams, self._streams = list(self._streams.values()), {}
            threads, self._threads = self._threads, []
        for stream in streams:
            stream.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)

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
                self._outbox.put(encode(message))
            if any(type(notice) not in _QUIET for notice in decision.notices):
                self._news += 1
                self._changed.notify_all()
            deadline = self._core.deadline()
            if deadline is not None and (self._deadline is None or deadline < self._deadline):
                self._wakes.put(None)
            self._deadline = deadline
        for action in later:
            action()
        return decision

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
                wanted = self._leave_wanted
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
        if self._leave_wanted is None or self.failure is not None:
            return
        (since, reason), entering, now = self._leave_wanted, self._entering_since, self._clock()
        obstacle = ""
        if self._leaves_now:
            self._leave_alone(LeaveGranted(f"This worker leaves the job: {reason}."))
        elif self._core.is_away and now >= since + self._leave_alone_s:
            obstacle = "the scheduler cannot be reached"
        elif entering is not None and now >= max(since, entering) + self._enter_alone_s:
            obstacle = f"the next generation did not form within {self._enter_alone_s:g} s"
        elif now >= since + self._leave_s and (self._is_held or self._hanging_s() > HANG_S):
            obstacle = f"others did not finish the step with it within {self._leave_s:g} s"
        if obstacle:
            told = f"This worker leaves the job as asked, by itself: {obstacle}."
            self._leave_alone(LeaveGranted(told, alone=True))
            log.warning("%s", told)

    def _leave_alone(self, failure: LeaveGranted) -> None:
        self.failure = failure
        self._abort(failure)
        self._news += 1
        self._changed.notify_all()

    def _carry_out(self, notice: e.Notice, later: list[Callable[[], None]]) -> None:
        """Takes note of one notice, under the lock; appends what must happen outside it."""
        if isinstance(notice, e.Connect):
            outbox = self._outbox = SimpleQueue()
            thread = threading.Thread(
                target=self._run_stream, args=(notice.stream, outbox), name="muster-stream", daemon=True
            )
            self._threads = [each for each in self._threads if each.is_alive()]
            later.append(lambda: self._start(thread))
        elif isinstance(notice, e.Disconnect):
            stream = self._streams.pop(notice.stream, None)
            if stream is not None:
                later.append(stream.close)
        elif isinstance(notice, e.Tell):
            log.info("%s", notice.sentence)
        elif isinstance(notice, e.MintUniqueIds):
            later.append(lambda: self._run_mint(notice))
        elif isinstance(notice, e.Build):
            self._build = notice
        elif isinstance(notice, e.Running):
            self._running = notice.generation
        elif isinstance(notice, e.NoVerdict):
            self._no_verdict = notice.generation
        elif isinstance(notice, e.ChangePending):
            self.pending = notice
        elif isinstance(notice, e.Left):
            self._left = True
        else:
            self._end_generation(notice)

    def _end_generation(self, notice: e.Notice) -> None:
        if isinstance(notice, e.Dismissed):
            told = sentence(f"This worker leaves the job: {notice.reason}")
            self.dismissal = LeaveGranted(told, alone=notice.alone)
        elif isinstance(notice, e.Interrupt):
            self.pending = None
            over = f"Generation {notice.generation} is over: "  # a suspension's reason says so itself
            self._interruption = MembershipChanged(
                sentence(over + notice.reason.removeprefix(over)),
                generation=notice.generation,
                lost=notice.lost,
            )
            if not notice.planned:
                self._abort(self.dismissal or self._interruption)
        elif isinstance(notice, e.Failed):
            self.failure = failure_of(notice)
            self._abort(self.failure)

    # ------------------------------------------------------------ threads

    def _start(self, thread: threading.Thread) -> None:
        with self._lock:
            if not self._closed:
                thread.start()
                self._threads.append(thread)

    def _run_stream(self, number: int, outbox: SimpleQueue[bytes | None]) -> None:
        try:
            stream = self._connector.open(outbox)
            with self._lock:
                self._streams[number] = stream
                closed = self._closed
            self.post(e.StreamOpened(number))
            if closed:
                stream.close()
            for data in stream:
                self.post(e.Received(number, decode(data)))
            self.post(e.StreamLost(number, "it closed the stream"))
        except DeniedError as error:
            self.post(e.StreamDenied(number, str(error), error.by_scheduler))
        except MalformedError as error:
            self.post(e.Received(number, m.Refused(m.RefusalCode.MALFORMED, str(error))))
        except (OSError, WireError) as error:
            self.post(e.StreamLost(number, str(getattr(error, "strerror", None) or error)))
        except Exception as error:  # a fault of ours must not leave the worker waiting for nobody
            log.exception("fault on the scheduler's stream; connecting again")
            self.post(e.StreamLost(number, f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                done = self._streams.pop(number, None)
            if done is not None:
                done.close()

    def _run_mint(self, notice: e.MintUniqueIds) -> None:
        try:
            self.post(e.UniqueIdsMinted(notice.generation, self._mint(notice.count)))
        except Exception as error:
            failure = error if isinstance(error, WorkerError) else WorkerError(f"No unique ids: {error!r}.")
            with self._lock:
                self.failure = failure
                self._changed.notify_all()

    def _abort(self, error: Exception) -> None:
        communicators = list(self._communicators[1])
        if not communicators:
            return

        def run() -> None:
            for communicator in communicators:
                communicator.abort(error)

        # On a thread of its own: an abort may take a while, and the next generation's ids come meanwhile.
        # It is started under the lock, so that whoever sees the change can wait for it.
        self._aborting = threading.Thread(target=run, name="muster-abort", daemon=True)
        self._aborting.start()

    # ------------------------------------------------------------ the training thread

    def adopt(self, generation: int, communicator: Communicator) -> None:
        """From now on ``communicator`` is aborted when ``generation`` ends; at once if it has."""
        with self._lock:
            if self._communicators[0] != generation:
                self._communicators = (generation, [])
            self._communicators[1].append(communicator)
            error = self.change_of(generation)
        if error is not None:
            communicator.abort(error)

    def end_communicators(self, end: Callable[[Communicator], None]) -> None:
        """Calls ``end`` with each communicator there is, the youngest first.

        That may block on a peer which dies meanwhile, so the end of the generation still aborts it.
        """
        self.settle_aborts()
        while youngest := self._communicators[1][-1:]:
            try:
                end(youngest[0])
            finally:
                self.forget(youngest[0])
        self.settle_aborts()

    def forget(self, communicator: Communicator) -> None:
        """There is nothing left of ``communicator`` to abort; idempotent."""
        with self._lock, contextlib.suppress(ValueError):
            self._communicators[1].remove(communicator)

    def settle_aborts(self) -> None:
        """Waits until no thread is inside a communicator to abort it."""
        with self._lock:  # a thread that cannot be joined yet is not seen
            aborting = self._aborting
        if aborting is not None:
            aborting.join()

    def change_of(self, generation: int) -> Exception | None:
        """Why the generation is over, or None while it stands."""
        if self.failure is not None:
            return self.failure
        interruption = self._interruption
        if interruption is not None and interruption.generation >= generation:
            return self.dismissal or interruption
        return None

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
            if self._entering_since is None:
                self._entering_since = self._clock()
            while self._build is None:
                error = self.failure or self.dismissal
                if error is not None:
                    raise error.with_traceback(None)
                self._wait_unless_closed()
            build, self._build = self._build, None
            self.pending = None
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
                if self._running >= generation:
                    self._entering_since = None
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
        self._no_verdict = 0
        if self.change_of(generation) is None:
            detail = getattr(error, "message", str(error)).rstrip(".")
            self.post(e.CommunicatorFailed(generation, rank, detail))
        with self._lock:
            while not self._closed and self._no_verdict != generation:
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
