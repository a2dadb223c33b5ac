"""A training loop that goes on when members come and go.

::

    state = TrainingState(arrays, sampler)
    loop = ElasticLoop(session, state, epochs=10)
    for step in loop:
        with step:
            ...  # forward, backward, update on step.batch

A block ``with step`` is redone when a change of members breaks it: the next iteration gives the same batch
again, divided among the new members. A step counts as done when the block ends without an error; then the
position moves on. Change the state (parameters, optimizer) only after the last collective of the block, and
read the session's rank and communicator in each step.

In a worker that is asked to leave, by SIGTERM or a drain, the loop raises LeaveGranted, so that code after it
does not run as if the training were complete.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from muster.errors import (
    SIGTERM_EXIT_CODE,
    ArrayError,
    CommunicatorError,
    JobEndedError,
    LeaveGranted,
    MembershipChanged,
    PeerFinishedError,
    PeerLostError,
    RefusedError,
    SchedulerUnreachableError,
    WorkerError,
)
from muster.training.loading import Loading, Source
from muster.training.state import StateHolder, TrainingState, share_state
from muster.worker.ending import on_sigterm

log = logging.getLogger("muster.worker")


class ElasticSession(StateHolder, Protocol):
    """The part of a :class:`muster.worker.session.session.Session` that the loop needs."""

    @property
    def rank(self) -> int:
        """Rank in the present generation."""

    @property
    def world_size(self) -> int:
        """Ranks in the present generation."""

    @property
    def launch(self) -> int:
        """A number that names this launch of the job; 0: not known."""

    @property
    def membership_event(self) -> object | None:
        """The planned change of members that comes next; None: none is known."""

    def step_boundary(self, step: int) -> None:
        """Called between two steps, with ``step`` finished ones; raises MembershipChanged or LeaveGranted."""

    def report(
        self, step: int, samples_per_s: float, *, steps: int, epoch: int, epochs: int, data_s: float
    ) -> None:
        """Reports this worker's progress, the total of steps and epochs, and how long it waited for data."""

    def request_leave(self, reason: str) -> None:
        """Asks to leave at a step boundary."""

    def expect_leave(self, reason: str) -> None:
        """Does the same as :meth:`request_leave` in another thread; callable from a signal handler."""

    def note_left(self) -> None:
        """Notes that this worker leaves before the training's end."""

    def rejoin(self) -> None:
        """Enters the next generation."""


class Step:
    """One step of the loop; use it as a context.

    Attributes:
        batch: this rank's samples: ``indices`` (int64), ``global_size`` (samples over all ranks), ``share``
            (this rank's part of them), ``last`` (whether the batch ends the epoch).
        data: the result of the loop's ``load`` for the batch; None without ``load``, or without samples.
        epoch: number of the epoch, from 1.
        number: number of the step within the epoch, from 1.
        done: whether it was finished; False after a change of members broke it.
    """

    def __init__(self, loop: ElasticLoop) -> None:
        self._loop = loop
        self.batch = loop.state.sampler.batch()
        self.data: Any = None if loop._loading is None else loop._loading.take()
        self.epoch = self.batch.epoch + 1
        self.number = self.batch.step + 1
        self.done = False

    def __enter__(self) -> Step:
        """Begins the step."""
        self._loop.state.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Counts the step as finished, or recovers from a change of members; other errors propagate."""
        if error is not None:
            return self._overcome(error)
        try:
            self._loop._finish(self)
        except WorkerError as late:
            if not self._overcome(late):
                raise
        return False

    def _overcome(self, error: BaseException) -> bool:
        """Handles the error that broke the step; returns whether the loop goes on, or ends well."""
        if _is_change(error):
            self._loop._recover(error)
            return True
        if isinstance(error, LeaveGranted):
            self._loop._go(error)
            return True
        self._loop._save_at_the_end(error)
        return False


class ElasticLoop:
    """Iterates over the steps of a run, through changes of members.

    At its start, and after each change, members that lack the state or are behind get it from the member that
    is furthest ahead. Planned changes (a worker that leaves or comes) happen between steps. A worker that was
    declared lost (for example while it was stopped) asks for a place as a newcomer.

    On SIGTERM this worker asks to leave, and stops at the step boundary that the scheduler names. If no other
    member holds the state yet, that is after a further change of members. If there is no scheduler, or no
    member that could take over, it saves the state and stops at once. The loop then raises LeaveGranted. If
    a script does not catch it, the script ends without a traceback: with exit code 143 after SIGTERM, with 0
    after a drain. If the group cannot go on for another reason, the state is saved and the error raised.

    Args:
        session: this worker's place in the job.
        state: the training state; overwritten in place when it comes from another member.
        epochs: number of epochs, counted from the run's very beginning.
        steps: maximum number of steps, also counted from the run's beginning; 0: all steps of the epochs.
        save: writes a checkpoint of ``state``. Called when this worker must give up, or is the last one. One
            rank also calls it when too few members are left, and when a collective has failed for good.
        take_up: reads a checkpoint of this launch into ``state``, if there is one. Called if no member holds
            the state, for example after the loss of all members that did.
        load: makes ``step.data``. Either torch's ``DataLoader(dataset, batch_sampler=state.sampler)``, whose
            processes work ahead, or a function of the batch, which must draw from no generator of the state.
            The next step's data is made before the loop waits for the end of a step. Do not change data in
            place: a step that is redone gets it again.
        clock: returns seconds on a monotonic clock, for the reported rate.

    Attributes:
        left: whether the loop ended before the run's end because this worker was asked to leave.
        samples_per_s: this worker's rate in the last step.
    """

    def __init__(
        self,
        session: ElasticSession,
        state: TrainingState,
        *,
        epochs: int,
        steps: int = 0,
        save: Callable[[], object] = lambda: None,
        take_up: Callable[[], object] = lambda: None,
        load: Source | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.state = state
        self.left = False
        self.samples_per_s = 0.0
        self._epochs = epochs
        self._steps = steps
        self._save = save
        self._take_up = take_up
        self._loading = None if load is None else Loading(load, state)
        self._clock = clock
        self._last_finish = clock()
        self._leave_reason = ""
        self._leave_sent = False
        self._got_sigterm = False
        self._granted: LeaveGranted | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Step]:
        """Yields each step until the run is over; yields a broken step again.

        Raises:
            LeaveGranted: this worker was asked to leave, and the run is not over.
            WorkerError: the group cannot go on.
        """
        # Runs before the script's own handler, which would break the step for all if it exits during a step.
        with on_sigterm(self._take_sigterm, before_own=True):
            self._attempt(self._share)
            try:
                while not (self.left or self._closed):
                    if self.is_over:
                        # No rank leaves before all are done, because one that lacks the last step needs all.
                        self._closed = self._attempt(self._meet) or self._closed
                    elif self._attempt(self._begin):
                        yield Step(self)
            finally:
                if self._loading is not None:
                    self._loading.close()
                self._await_writes()
                self.state.end()
        if self._granted is not None:
            raise self._granted.with_traceback(None)

    @property
    def is_over(self) -> bool:
        """Whether all epochs, or the given number of steps, are done."""
        return self.state.sampler.epoch >= self._epochs or 0 < self._steps <= self.state.step

    def _meet(self) -> None:
        """Waits for all ranks at the run's end."""
        self.session.communicator.barrier()
        self.state.settle()

    def leave(self, reason: str) -> None:
        """Asks to leave at the next step boundary. Callable from a signal handler."""
        self._leave_reason = self._leave_reason or reason
        self.session.expect_leave(self._leave_reason)

    def _take_sigterm(self) -> None:
        self._got_sigterm = True
        self.leave("SIGTERM")

    def _begin(self) -> None:
        if self._leave_reason and not self._leave_sent:
            self._leave_sent = True
            self.session.request_leave(self._leave_reason)
        if self.session.membership_event is not None:
            self.state.confirm()  # so that the members do not change during a step
            self._await_writes()
        self.session.step_boundary(self.state.step)

    def _await_writes(self) -> None:
        """Waits for checkpoints that are being written while the training goes on."""
        for wait in self.state.writes:
            wait()

    def _finish(self, step: Step) -> None:
        if self._loading is not None and not 0 < self._steps <= self.state.step + 1:
            self._loading.prepare()  # while the GPU still computes the step
        self.state.commit()
        self.state.sampler.advance()
        self.state.step += 1
        step.done = True
        now = self._clock()
        self.samples_per_s = len(step.batch.indices) / max(now - self._last_finish, 1e-9)
        self._last_finish = now
        data_s = 0.0 if self._loading is None else self._loading.take_waited_s()
        steps = self._total()
        epochs = min(self._epochs, max(step.epoch, -(-steps // self.state.sampler.steps_per_epoch)))
        self.session.report(
            self.state.step,
            self.samples_per_s,
            steps=steps,
            epoch=step.epoch,
            epochs=epochs,
            data_s=data_s,
        )

    def _total(self) -> int:
        """Returns the total number of steps of the run."""
        whole = self._epochs * self.state.sampler.steps_per_epoch
        return min(whole, self._steps) if self._steps else whole

    def _attempt(self, action: Callable[[], Any]) -> bool:
        """Runs an action; if a change of members breaks it, makes the change and returns False."""
        try:
            action()
            return True
        except LeaveGranted as granted:
            self._go(granted)
        except WorkerError as error:
            if not _is_change(error):
                self._save_at_the_end(error)
                raise
            self._recover(error)
        return False

    def _recover(self, change: BaseException | None) -> None:
        """Enters generations until one lasts, and takes over the state of the member furthest ahead."""
        with contextlib.suppress(MembershipChanged, CommunicatorError):
            self.state.confirm()  # while its other members still exist
        while not self._closed:
            if self._leave_reason and _is_declared_dead(change):  # it leaves, and needs no new place
                self._go(LeaveGranted(f"This worker leaves the job: {self._leave_reason}.", alone=True))
                return
            self._save_if_asked(change)
            try:
                self._rejoin()
                if not (self.left or self._closed):
                    self._share()
                return
            except LeaveGranted as granted:
                self._go(granted)
                return
            except (MembershipChanged, RefusedError) as error:
                if not _is_change(error):
                    raise
                change = error

    def _rejoin(self) -> None:
        try:
            self.session.rejoin()
        except (MembershipChanged, LeaveGranted):
            raise
        except JobEndedError as error:
            if not self.is_over:
                self._save_at_the_end(error)
                raise
            self._closed = True
        except WorkerError as error:
            if not _is_change(error):
                self._try_to_save()
            raise

    def _save_if_asked(self, change: BaseException | None) -> None:
        """Saves at once if the scheduler asks for it, because too few members are left to go on."""
        if isinstance(change, MembershipChanged) and change.save and self.state.step and not self.is_over:
            self._try_to_save()

    def _save_at_the_end(self, error: BaseException) -> None:
        """Saves the last finished step if this worker's membership is over for good.

        Saves nothing if the job has ended well, because others were further ahead. The error of a failed
        collective reaches all ranks; the lowest rank that the error does not blame saves.
        """
        completed = isinstance(error, JobEndedError) and error.ok
        last = isinstance(error, SchedulerUnreachableError | RefusedError | JobEndedError) and not completed
        if isinstance(error, CommunicatorError) and not isinstance(error, ArrayError):
            blamed = error.rank if isinstance(error, PeerLostError | PeerFinishedError) else -1
            last = self.session.rank == (1 if blamed == 0 else 0)
        if last and not self.is_over:
            if isinstance(error, CommunicatorError):
                # The generation may be intact. Without an abort, the save would wait for a GPU that hangs in
                # the collective.
                with contextlib.suppress(WorkerError):
                    self.session.communicator.abort(error)
            self._try_to_save()

    def _try_to_save(self) -> None:
        """Saves the last finished step; only logs a failure, so that it does not hide why the loop ends."""
        self.state.roll_back()
        try:
            self._save()
        except Exception as error:
            log.error("The state could not be saved: %s", error)

    def _share(self) -> None:
        state = self.state
        if self.session.state_source_rank < 0 and not state.recover(self.session) and not state.shared:
            self._take_up()
        if self.session.launch:
            state.launch = f"{self.session.launch:016x}"
            state.run = state.run or state.launch
        share_state(self.session, state)
        self._last_finish = self._clock()

    def _go(self, granted: LeaveGranted) -> None:
        """Ends the loop; saves the state if possibly no other member holds it."""
        self.state.roll_back()  # undoes a step that it cannot finish with the others
        if self.is_over:  # all steps are done, so the script may go on to its end
            self._closed = True
            return
        self.left = True
        log.info("%s", granted)
        granted.logged = True
        if self._got_sigterm:
            granted.exit_code = SIGTERM_EXIT_CODE
        self._granted = granted
        self.session.note_left()
        if granted.alone or self.session.world_size == 1:
            self._save()


def _is_change(error: BaseException | None) -> bool:
    """Whether this worker may be in a next generation, if only as a newcomer."""
    return isinstance(error, MembershipChanged) or _is_declared_dead(error)


def _is_declared_dead(error: BaseException | None) -> bool:
    return isinstance(error, RefusedError) and error.declared_dead
