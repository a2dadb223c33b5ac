"""A worker's session: its place in the job, and the communicators of the present generation."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from muster.worker.communicators.base import Backend, Communicator
from muster.worker.communicators.flight_recorder import CollectiveLog
from muster.worker.communicators.groups import Groups
from muster.worker.control import events as e
from muster.worker.control import machine as machine
from muster.worker.control import messages as m
from muster.worker.control.builder import CommunicatorBuilder
from muster.worker.control.client import Client, exit_code_of, is_consequence, is_good_exit, reason_of
from muster.worker.control.leave import LoneLeave
from muster.worker.errors import (
    CommunicatorError,
    MembershipChanged,
    NotInitializedError,
    RefusedError,
    SettingsError,
)
from muster.worker.launch import last_words
from muster.worker.sigterm import on_sigterm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muster.worker.communicators.base import Backend
    from muster.worker.communicators.tcp.probe import Probes
    from muster.worker.config import Settings
    from muster.worker.control.connection import Connector
    from muster.worker.host import DeviceChoice


class SessionFacts:
    """The part of a :class:`~muster.worker.control.session.Session` that only tells.

    Attributes:
        settings: what this worker was told at its start.
        device: the device chosen for it.
        backend: the data plane.
    """

    def __init__(
        self, settings: Settings, *, profile: m.Profile, device: DeviceChoice, backend: Backend
    ) -> None:
        self.settings = settings
        self.device = device
        self.backend = backend
        self._profile = profile
        self._assignment: m.Assignment | None = None
        self._first_ordinal: int | None = None
        self._released = False

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """How many workers there are in this generation."""
        return len(self._place.members)

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its host."""
        return self.me.local_rank

    @property
    def local_world_size(self) -> int:
        """How many workers there are on this host."""
        return self.me.local_world_size

    @property
    def generation(self) -> int:
        """Number of the present membership; grows with every change."""
        return self._place.generation

    @property
    def members(self) -> tuple[m.Member, ...]:
        """All members, in order of rank."""
        return self._place.members

    @property
    def me(self) -> m.Member:
        """This worker as a member."""
        place = self._place
        return place.members[place.rank]

    @property
    def job_id(self) -> str:
        """The job."""
        return self._profile.job_id

    @property
    def node_id(self) -> str:
        """This worker's stable name."""
        return self._profile.node_id

    @property
    def device_ordinal(self) -> int:
        """Index of this worker's GPU as CUDA counts in this process; -1 on a CPU."""
        return self._ordinal(self.local_rank)

    def _ordinal(self, local_rank: int) -> int:
        device = self.device
        if device.visible_count == 0 or device.ordinal >= 0:
            return device.ordinal if device.visible_count else -1
        if self._first_ordinal is None:  # local ranks move up when others die; the arrays stay where they are
            self._first_ordinal = local_rank % device.visible_count
        return self._first_ordinal

    @property
    def state_source_rank(self) -> int:
        """Whose parameters the newcomers take; -1: there are none to take, all start anew."""
        return self._place.state_source_rank

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        """Ranks that were not members of the generation before."""
        return self._place.newcomer_ranks

    @property
    def launch(self) -> int:
        """Names this launch of the job, the same in all its generations; 0: not known."""
        return self._place.launch

    @property
    def change_reason(self) -> str:
        """Why the present generation exists, in words."""
        return self._place.reason

    @property
    def _place(self) -> m.Assignment:
        if self._assignment is None or self._released:
            raise NotInitializedError("There is no session.", remedy="Call worker.init() first.")
        return self._assignment


log = logging.getLogger("muster.worker")


class Session(SessionFacts):
    """One worker process's membership of a job. Made by :func:`muster.init`.

    All properties tell of the present generation; :meth:`rejoin` changes them. As a context manager it
    says goodbye at the end of the block: finished if the block ended well, failed if not.

    Attributes:
        interrupted: Ctrl-C ended it, or came while it ended.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        profile: m.Profile,
        device: DeviceChoice,
        backend: Backend,
        connector: Connector,
        probes: Probes | None = None,
    ) -> None:
        super().__init__(settings, profile=profile, device=device, backend=backend)
        self.interrupted = False
        self._probes = probes
        self._recorder = CollectiveLog()
        self._groups = Groups()
        self._left = False
        self._error: BaseException | None = None
        self._release_lock = threading.Lock()
        self._rejoin_lock = threading.Lock()
        timing = e.Timing(
            topo_timeout_s=settings.topo_timeout_s, reconnect_timeout_s=settings.reconnect_timeout_s
        )
        self._client = Client(
            machine.Membership(profile, timing, _jitter, settings.scheduler_address),
            connector,
            mint=backend.mint_unique_ids,
            recent=self._recorder.recent,
            hanging_s=self._recorder.hanging_s,
            late_s=self._recorder.late_s,
            waits=self._recorder.waits,
            probe_all=probes.try_all if probes is not None else _unreached_none,
            lone_leave=LoneLeave(unfinished_s=settings.leave_timeout_s),
            note_loss=_note_loss,
        )
        self._builder = CommunicatorBuilder(settings, backend, self._client, self._recorder)

    def open(self) -> None:
        """Joins the job and returns when all members can communicate.

        If it is declared dead meanwhile, because it was stopped, say, it asks again as a newcomer.

        Raises:
            WorkerError: refused, not reachable, not trusted, or not formed in time.
        """
        self._note_place()
        self._client.start()
        try:
            self.backend.prepare(-1 if self.settings.spare else self.device.ordinal)
            self._enter()
        except BaseException as error:
            self._end_as_failed(error)
            raise

    def _note_place(self) -> None:
        last_words.note(node_id=self._profile.node_id, incarnation=self._profile.incarnation)

    # ------------------------------------------------------------ groups

    @property
    def communicator(self) -> Communicator:
        """The communicator of all members."""
        return self.group(None)

    def group(self, name: str | None) -> Communicator:
        """The communicator of a group; None: of all members.

        Raises:
            GroupError: there is no such group, or this worker is not in it.
        """
        if self._released:
            raise NotInitializedError("The session was released.", remedy="Call worker.init() again.")
        self._client.check(self._place.generation)
        return self._groups.communicator(name)

    @property
    def groups(self) -> Groups:
        """The named groups."""
        self._client.check(self._place.generation)
        return self._groups

    # ------------------------------------------------------------ training

    @property
    def membership_event(self) -> e.ChangePending | None:
        """A planned change that is to come, with ``reason`` and ``after_step`` (-1: not known yet)."""
        return self._client.standing.pending

    def step_boundary(self, step: int) -> None:
        """Call before each step: planned changes of members happen here and nowhere else.

        Usually returns at once. While a planned change is being worked out it may wait a moment, so that
        all ranks switch after the same step.

        Args:
            step: how many steps are finished.

        Raises:
            MembershipChanged: the generation is over; ``rejoin()`` and go on from ``step``.
            LeaveGranted: this worker leaves as asked; ``release()`` and exit.
            WorkerError: the membership is over for good.
        """
        self._client.start_step(step, self._place.generation)

    def report(self, step: int, samples_per_s: float) -> None:
        """Tells the scheduler how far the training is; shown by ``python -m scheduler status``.

        Args:
            step: how many steps are finished.
            samples_per_s: this worker's speed.
        """
        self._client.post(e.Progress(step, samples_per_s))

    @contextlib.contextmanager
    def busy(self, what: str = "works alone") -> Iterator[None]:
        """Says that this rank does something alone, for as long as it takes, while the others wait for it.

        A rank that does not come to a step for which others wait is expelled after MS_HANG_TIMEOUT; not
        while it is in here::

            if session.rank == 0:
                with session.busy("evaluation"):
                    evaluate(model)

        Args:
            what: in words, for the scheduler's log.
        """
        self._client.begin_busy(what)
        try:
            yield
        finally:
            self._client.end_busy(what)

    def request_leave(self, reason: str) -> None:
        """Asks to leave at the next step boundary, which then raises LeaveGranted. Returns at once.

        Callable from any thread; the others re-form without an abort. Whoever alone holds the training
        state is let go once others have it: MembershipChanged comes first. If the scheduler is lost and does
        not come back within seconds, no next generation forms, or others do not come to the step's end
        within MS_LEAVE_TIMEOUT, LeaveGranted comes all the same, with ``alone``, also amid a step.
        """
        self.expect_leave(reason)
        self._client.post(e.LeaveRequested(reason))

    def expect_leave(self, reason: str) -> None:
        """Does what ``request_leave`` does, by another thread; callable from a signal handler."""
        self._client.expect_leave(reason)

    def leave_now(self, reason: str) -> None:
        """Ends :meth:`open` with LeaveGranted, whatever it waits for; callable from a signal handler."""
        self._client.leave_now(reason)

    def note_left(self) -> None:
        """Says that this worker leaves before the training's end: ``release()`` must not call it finished."""
        self._left = True

    @property
    def error(self) -> BaseException | None:
        """What this session has ended with; None: it has not, or well."""
        return self._error

    @property
    def leaves(self) -> bool:
        """Whether this worker leaves, or has left, as asked."""
        return self._left or self._client.standing.leave_granted

    # ------------------------------------------------------------ change

    def rejoin(self) -> None:
        """Enters the next generation after MembershipChanged: new ranks, communicators and groups.

        Waits until it has formed, as long as the scheduler lets the job wait. Returns at once if the
        generation still stands. After RefusedError with the code SUPERSEDED (this worker was declared dead)
        it asks for a place as a newcomer. Of several threads that call it one does so, and the others wait.

        Raises:
            MembershipChanged: with ``save``: too few members are left, and this worker should save the state
                before it calls this again and waits for more.
            WorkerError: there will be no next generation, or not with this worker.
        """
        with self._rejoin_lock:
            self._rejoin()

    def _rejoin(self) -> None:
        place = self._place
        failure = self._client.standing.failure
        if isinstance(failure, RefusedError) and failure.declared_dead:
            self._ask_anew(failure)
        elif failure is not None:
            raise failure.with_traceback(None)
        elif not self._client.generation_changing(place.generation):
            return
        else:
            self._leave_generation()
        self._enter()

    def _ask_anew(self, refusal: RefusedError) -> None:
        log.warning("this worker has lost its place and asks for one as a newcomer: %s", refusal)
        self._leave_generation()
        self._profile = self._profile.replaced(incarnation=new_incarnation())
        self._note_place()
        self._client.renew(self._profile.incarnation, self._profile.data_address)

    def _leave_generation(self) -> None:
        self._groups.leave()
        self._client.communicators.end(_close)

    def _enter(self) -> None:
        while True:
            try:
                build = self._client.next_build()
                place = build.assignment
                if self._probes is not None:
                    self._probes.know(member.host.address for member in place.members)
                if self._assignment is None:
                    self._check_rank_id(place)
                ordinal = self._ordinal(place.members[place.rank].local_rank)
                communicator = self._builder.build(build, ordinal)
                if not self._client.built(place.generation):
                    self._client.check(place.generation)  # it is over
                self._assignment = place
                self._groups.enter(communicator)
            except MembershipChanged as change:  # before it began: the next is formed already, or will be
                self._leave_generation()
                if change.save:
                    raise
                continue
            except RefusedError as refusal:
                # Stopped for too long before its first place: it has computed nothing that could be lost.
                # A new incarnation is not refused so before it was silent again for as long.
                if not refusal.declared_dead or self._assignment is not None:
                    raise
                self._ask_anew(refusal)
                continue
            log.info(
                "rank %d of %d in generation %d of job %s: %s",
                place.rank,
                len(place.members),
                place.generation,
                self.job_id,
                place.reason,
            )
            return

    def _check_rank_id(self, place: m.Assignment) -> None:
        """Refuses a RANK_ID that is not this worker's rank; with members missing, ranks may move up."""
        told = self.settings.rank_id
        if told not in (-1, place.rank) and len(place.members) == self.settings.worker_num:
            raise SettingsError(
                f"RANK_ID is {told}, but this worker, node {self._profile.node_id}, has rank {place.rank}.",
                remedy="Unset it, or set MS_NODE_ID, or RANK_TABLE_FILE, such that the ranks agree.",
            )

    # ------------------------------------------------------------ the end

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._released

    def release(self, *, finished: bool | None = None, reason: str = "") -> None:
        """Says goodbye and frees everything; idempotent.

        Args:
            finished: the training is complete. False tells the others at once that this worker is gone.
                None: it is complete unless this worker leaves as asked.
            reason: why, in words, for the scheduler's log.
        """
        with self._release_lock:
            if self._released:
                return
            self._released = True
        asked = finished is None and self.leaves
        if finished is None:  # who says so in vain keeps newcomers out of a job with steps to do
            finished = not asked
        default = "finished" if finished else "asked to leave" if asked else "gave up"
        try:
            # SIGTERM must not make a failure of a worker that says it has finished.
            with on_sigterm(lambda: None) if finished else contextlib.nullcontext():
                self._depart(finished, reason or default)
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def end(self, error: BaseException | None) -> None:
        """Releases as what ended the script or block tells: without an error, as ``release()`` does.

        Args:
            error: what ended it. SystemExit says how in its code: 0 or none is no error.
        """
        if isinstance(error, KeyboardInterrupt) and not self._released:
            self.interrupted = True
        if error is None or is_good_exit(error):
            self.release()
        else:
            self._end_as_failed(error)

    def _end_as_failed(self, error: BaseException) -> None:
        if not self._released:
            self._error = error
        self.release(finished=False, reason=reason_of(error))

    def _depart(self, finished: bool, reason: str) -> None:
        if finished:
            self._groups.leave()
            self._client.communicators.end(_finish)
        self._client.leave(
            finished=finished,
            reason=reason,
            consequence=is_consequence(self._error),
            exit_code=exit_code_of(self._error),
        )
        self._client.close()
        if not finished:
            self._groups.leave()
            self._client.communicators.end(_abandon)
        self.backend.close()
        if self._probes is not None:
            self._probes.close()

    def __enter__(self) -> Session:
        """Nothing more to do: the session is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases; an exception means that the training is not finished."""
        self.end(error)


def _unreached_none(targets: dict[str, str]) -> dict[str, str]:
    return {}


def new_incarnation() -> int:
    """A random number from 1 to 2**64 - 1 that no other process has."""
    return int.from_bytes(os.urandom(8), "big") or 1


def _note_loss(loss: m.FirstLoss | None) -> None:
    if loss is None:
        last_words.note(first=None)
        return
    first = {"node_id": loss.node_id, "incarnation": loss.incarnation}
    last_words.note(first={**first, "sentence": loss.sentence, "exit_code": loss.exit_code})


def _jitter() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32


def _abandon(communicator: Communicator) -> None:
    communicator.abort(NotInitializedError("The session was released."))
    _close(communicator)


def _finish(communicator: Communicator) -> None:
    communicator.finished = True
    _close(communicator)


def _close(communicator: Communicator) -> None:
    try:
        communicator.close()
    except CommunicatorError as error:
        log.debug("closing a communicator: %s", error)
