"""A worker's session: its place in the job, and the communicators of the present generation."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, SupportsFloat

from muster.communicators.base import Backend, Communicator, TellsOfLinks
from muster.communicators.fault_aware import FaultAwareCommunicator, FlightRecorder
from muster.communicators.nccl.encryption import NcclProtection
from muster.errors import (
    GpuFailedError,
    MembershipChanged,
    NotInitializedError,
    PeerLostError,
    RefusedError,
    SettingsError,
    WorkerError,
)
from muster.wire import messages
from muster.wire.codec import MAX_PARTNERS
from muster.wire.json_lines import process_lines
from muster.wire.patience import verdict_margin_s
from muster.worker import ending
from muster.worker.ending import on_sigterm
from muster.worker.old_meshes import forget_meshes
from muster.worker.session import events
from muster.worker.session import machine as machine
from muster.worker.session.client import Client, Line
from muster.worker.session.devices import describe_devices
from muster.worker.session.failures import exit_code_of, is_consequence, is_good_exit, reason_of
from muster.worker.session.groups import Groups, world_membership
from muster.worker.session.incarnation_number import new_incarnation
from muster.worker.session.leave import LoneLeave
from muster.worker.session.live_communicators import abandon, close_quietly, finish
from muster.worker.session.own_gpu import OwnGpu
from muster.worker.session.progress import Progress, count_of, seconds_of
from muster.worker.session.step_clock import StepClock
from muster.worker.session.watcher import ProbeAll

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muster.communicators.tcp.endpoint import Endpoint
    from muster.worker.config import Settings
    from muster.worker.host import DeviceChoice
    from muster.worker.session.threads import Threads

log = logging.getLogger("muster.worker")

SURVIVOR_TIMEOUT_S = 7 * 86_400.0


def _unreached_none(targets: dict[str, str]) -> dict[str, str]:
    return {}


class Session:
    """One worker process's membership in a job. Created by :func:`muster.init`.

    All properties describe the present generation; :meth:`rejoin` changes them. As a context manager, the
    session leaves the job at the end of the block: as finished if the block ended without an error, otherwise
    as failed.

    Attributes:
        settings: this worker's settings, as read at its start.
        device: the device chosen for it.
        backend: the data plane.
        nccl: the decision about encrypting NCCL's traffic between hosts.
        interrupted: whether Ctrl-C ended the session, or came while it ended.
        take_stacks: a function that returns the stacks of this worker's process within a limit in bytes; in
            an agent, the stacks of its program.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        profile: messages.Profile,
        device: DeviceChoice,
        backend: Backend,
        connection: Line,
        prober: ProbeAll = _unreached_none,
        answering: Endpoint | None = None,
        prepare: Callable[[], None] | None = None,
        nccl: NcclProtection | None = None,
        timing: events.Timing | None = None,
        threads: Threads | None = None,
        gpu: OwnGpu | None = None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.backend = backend
        self.nccl = nccl or NcclProtection()
        self._profile = profile
        self._assignment: messages.Assignment | None = None
        self._first_ordinal: int | None = None
        self._released = False
        self.interrupted = False
        self._answering = answering
        self._prepare = prepare
        self._recorder = FlightRecorder()
        self._groups = Groups()
        self._world: Communicator | None = None
        self._gpu = gpu or OwnGpu()
        self._gpu_fault = ""
        self._left = False
        self._progress = Progress(time.monotonic)
        self._step_clock = StepClock(self._recorder, time.monotonic, self._sending_s)
        self.add_step_times = self._step_clock.add
        self._noted: dict[str, tuple[float, ...]] = {}  # the last snapshot and checkpoint, for the launcher
        self._snapshot_noted = (0, -1)
        self._error: BaseException | None = None
        self._release_lock = threading.Lock()
        self._rejoin_lock = threading.Lock()
        timing = (timing or events.Timing()).replaced(
            topo_timeout_s=settings.topo_timeout_s,
            reconnect_timeout_s=settings.reconnect_timeout_s,
            waits_without_limit=settings.waits_without_limit,
        )
        if len(settings.scheduler_hosts) > 1:  # While no scheduler leads, there is no verdict.
            timing = timing.replaced(verdict_margin_s=verdict_margin_s(settings.node_timeout_s))
        self.take_stacks: Callable[[int], str] = self._own_stacks
        self._client = Client(
            machine.MembershipMachine(profile, timing, _jitter, settings.scheduler_address),
            connection,
            backend=backend,
            collectives=self._recorder,
            prober=prober,
            lone_leave=LoneLeave(unfinished_s=settings.leave_timeout_s),
            threads=threads,
            times=self._step_clock.take,
            figures=self._figures,
            gpu=self._gpu.take,
            stacks=lambda limit_bytes: self.take_stacks(limit_bytes),
        )

    def _figures(self) -> dict[str, object]:
        progress = self._progress
        return {
            "checkpoints_s": self._step_clock.checkpoints_s,
            "numbers": tuple(sorted(progress.numbers.items())),
            "epoch": progress.epoch,
            "epochs": progress.epochs,
        }

    def _own_stacks(self, limit_bytes: int) -> str:
        from muster.worker.stacks.report import own_report

        return own_report(limit_bytes, os.environ, self._recorder.recent(last_only=False))

    def open(self) -> None:
        """Joins the job and returns when all members can communicate.

        If this worker is declared dead before that, for example because it was stopped, it asks for a place
        again as a newcomer.

        Raises:
            WorkerError: the scheduler refuses the worker, cannot be reached or is not trusted, or the group
                does not form in time.
        """
        self._note_place()
        fault = self._gpu.fault_before_join()
        if fault:  # The scheduler is told, and refuses this worker.
            self._client.post(events.GpuFailed(fault))
        self._client.start()
        try:
            if self._prepare is not None:  # Slow work that needs no peers.
                self._prepare()
            self._enter()
        except BaseException as error:
            self._end_as_failed(error)
            raise

    def _note_place(self) -> None:
        process_lines.node_id = self._profile.node_id
        ending.note(node_id=self._profile.node_id, incarnation=self._profile.incarnation)

    # ------------------------------------------------------------ the present generation

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Number of workers in this generation."""
        return len(self._place.members)

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its host."""
        return self.me.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of workers on this host."""
        return self.me.local_world_size

    @property
    def generation(self) -> int:
        """Number of the present membership; grows with every change."""
        return self._place.generation

    @property
    def members(self) -> tuple[messages.Member, ...]:
        """All members, in order of rank."""
        return self._place.members

    @property
    def me(self) -> messages.Member:
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
        # Local ranks move up when others die, but the arrays stay where they are.
        if self._first_ordinal is None:
            self._first_ordinal = local_rank % device.visible_count
        return self._first_ordinal

    @property
    def state_source_rank(self) -> int:
        """The rank whose parameters the newcomers take; -1 if all start from the beginning."""
        return self._place.state_source_rank

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        """Ranks that were not members of the generation before."""
        return self._place.newcomer_ranks

    @property
    def launch(self) -> int:
        """A number that identifies this launch of the job in all its generations; 0 if it is not known."""
        return self._place.launch

    @property
    def change_reason(self) -> str:
        """The reason for the present generation, as text."""
        return self._place.reason

    @property
    def _place(self) -> messages.Assignment:
        if self._assignment is None or self._released:
            raise NotInitializedError("There is no session.", remedy="Call muster.init() first.")
        return self._assignment

    def _note_group(self, place: messages.Assignment) -> None:
        group = {
            "generation": place.generation,
            "workers": len(place.members),
            "hosts": len({member.host.id for member in place.members}),
            "devices": describe_devices([(member.host.id, member.device) for member in place.members]),
            "backend": self._profile.backend,
            "tls": self.settings.config_path is not None,
            "reason": place.reason,
            "nccl_sealed": self.nccl.sealed,
            "nccl_plain_ways": ", ".join(self.nccl.plain_ways),
        }
        ending.note(group=group, waits="")
        ending.set_title(f"rank {place.rank}", sys.argv[0])

    # ------------------------------------------------------------ groups

    @property
    def communicator(self) -> Communicator:
        """The communicator of all members."""
        return self.group(None)

    def group(self, name: str | None) -> Communicator:
        """Returns the communicator of a group; None stands for all members.

        Raises:
            GroupError: there is no such group, or this worker is not in it.
        """
        if self._released:
            raise NotInitializedError("The session was released.", remedy="Call muster.init() again.")
        self._client.check(self._place.generation)
        return self._groups.communicator(name)

    @property
    def groups(self) -> Groups:
        """The named groups."""
        self._client.check(self._place.generation)
        return self._groups

    # ------------------------------------------------------------ training

    @property
    def membership_event(self) -> events.ChangePending | None:
        """The next planned change, with ``reason`` and ``after_step`` (-1 if not known yet); or None."""
        return self._client.pending

    def step_boundary(self, step: int) -> None:
        """Lets a planned change of members happen; call it before each step.

        Planned changes happen nowhere else. Usually it returns immediately. While a planned change is being
        prepared, it may wait a moment, so that all ranks switch after the same step.

        Args:
            step: the number of steps finished.

        Raises:
            MembershipChanged: the generation is over. Call ``rejoin()`` and continue from ``step``.
            LeaveGranted: this worker leaves as asked. Call ``release()`` and exit.
            WorkerError: the membership is over for good.
            TypeError, ValueError: ``step`` is not a count.
        """
        self._client.start_step(count_of("step", step), self._place.generation)

    def report(
        self,
        step: int | None = None,
        samples_per_s: float | None = None,
        *,
        loss: SupportsFloat | None = None,
        samples: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
        learning_rate: SupportsFloat | None = None,
        data_s: float = 0.0,
        **numbers: SupportsFloat,
    ) -> None:
        """Reports the training's progress.

        ``muster status`` and, on a terminal, the launcher show it.

        ElasticLoop reports steps and speed itself, so you only need to report the loss. In your own loop, one
        line in each step is enough::

            session.report(loss=loss, samples=len(batch))

        Args:
            step: the number of steps finished; None for one more, unless an ElasticLoop counts them.
            samples_per_s: this worker's speed; None to compute it from ``samples``.
            loss: loss of the last step, as a number. For a tensor on a GPU, this waits for its value.
            samples: number of samples that this worker has trained on in the step.
            steps: the total number of steps.
            epoch: the epoch that the training is in, counted from 1.
            epochs: the total number of epochs.
            learning_rate: learning rate of the last step, for the plots of ``muster web`` and ``muster
                report``.
            data_s: how long the step waited for its data, in seconds, so that a slow loader is reported.
            numbers: your own numbers, such as ``accuracy=0.97``, at most 16. If several ranks report the same
                number, its mean is shown. A number whose latest value is not finite is no longer shown.

        A report with only numbers and an epoch does not count as a step.

        Raises:
            TypeError, ValueError: ``step``, ``steps``, ``epoch`` or ``epochs`` is not a count, or one of
                ``numbers`` is not a number.
        """
        progress = self._progress
        self._step_clock.note_data(seconds_of("data_s", data_s))
        if progress.take(
            step,
            samples_per_s,
            numbers,
            loss=loss,
            samples=samples,
            steps=steps,
            epoch=epoch,
            epochs=epochs,
            learning_rate=learning_rate,
        ):
            figures = (progress.samples_per_s, progress.loss, progress.learning_rate, progress.steps)
            self._step_clock.end_step()
            self._client.post(events.ProgressReported(progress.step, *figures))
            ending.note_progress(
                step=progress.step,
                steps=progress.steps,
                epoch=progress.epoch,
                epochs=progress.epochs,
                samples_per_s=round(progress.samples_per_s, 1),
                loss=progress.loss,
                learning_rate=progress.learning_rate,
                **self._noted,
                numbers=dict(progress.numbers),
            )

    # ------------------------------------------------------------ copies of the state

    def report_snapshot(self, report: messages.SnapshotReport) -> None:
        """Reports which snapshots this worker keeps in memory, its own and its partners'.

        Returns immediately, and can be called from any thread. The report is sent with all later heartbeats.
        A snapshot counts once all members of the generation have reported it.

        Args:
            report: the result of ``Retention.report()`` in ``muster.training.snapshots.retention`` after each
                of its changes. For ``muster status``, add ``size_bytes``, ``seconds`` and ``partners`` by
                ``replaced``. ``age_s`` is filled in here.

        Raises:
            TypeError, ValueError: ``size_bytes`` or a partner's rank is not a count, or ``seconds`` is not a
                duration.
        """
        for name, counts in (("size_bytes", (report.size_bytes,)), ("partners", report.partners)):
            for count in counts:
                count_of(name, count)
        seconds_of("seconds", report.seconds)
        report = report.replaced(partners=report.partners[:MAX_PARTNERS])
        self._client.post(events.SnapshotChanged(report))
        if report.newest >= 0 and (report.generation, report.newest) != self._snapshot_noted:
            self._snapshot_noted = report.generation, report.newest
            figures = (report.size_bytes, round(report.seconds, 3), *report.partners[:1])
            self._noted["snapshot"] = (report.newest, round(time.time()), *figures)

    @property
    def snapshot_word(self) -> messages.SnapshotWord | None:
        """The scheduler's message on which snapshot is complete everywhere, and which one is next.

        None if nothing was received in this generation. While the scheduler is away, the value does not
        change. This is safe, because the snapshot that counts is kept until a newer one counts.
        """
        word = self._client.snapshot_word
        return word if word is not None and word.generation == self._place.generation else None

    def report_checkpoint(self, step: int, *, size_bytes: int = 0, seconds: float = 0.0) -> None:
        """Reports that a checkpoint of the state has been written to disk; ``muster status`` shows it.

        Args:
            step: the number of steps finished in the saved state.
            size_bytes: the checkpoint's size in bytes; 0 if not known.
            seconds: how long writing it took, in seconds.

        Raises:
            TypeError, ValueError: ``step`` or ``size_bytes`` is not a count, or ``seconds`` is not a
                duration.
        """
        size_bytes, seconds = count_of("size_bytes", size_bytes), seconds_of("seconds", seconds)
        written = events.CheckpointWritten(count_of("step", step), size_bytes, seconds)
        self._client.post(written)
        self._noted["checkpoint"] = (written.step, round(time.time()), size_bytes, round(seconds, 3))

    @contextlib.contextmanager
    def busy(self, what: str = "works alone") -> Iterator[None]:
        """Declares that this rank does something alone, for any length of time, while the others wait for it.

        A rank that does not reach a step in which others wait for it is expelled after MS_HANG_TIMEOUT, but
        not inside this block::

            if session.rank == 0:
                with session.busy("evaluation"):
                    evaluate(model)

        Args:
            what: a description for the scheduler's log. If it contains ``checkpoint``, the time counts as
                time for checkpoints in `where a job's time goes`.
        """
        self._client.training.begin_busy(what)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._step_clock.excuse(time.monotonic() - begun, for_checkpoint="checkpoint" in what)
            self._client.training.end_busy(what)

    def ask_for_new_generation(self, why: str) -> None:
        """Reports that the members cannot continue in this generation.

        The scheduler forms the next one within MS_NODE_TIMEOUT.

        Returns immediately, and may be called again.

        Args:
            why: the reason, for the logs of all members.
        """
        # No rank is at fault, so this names the world size, which is not the rank of any member.
        self._client.post(events.CommunicatorFailed(self.generation, self.world_size, why.rstrip("."), False))

    def request_leave(self, reason: str) -> None:
        """Asks to leave at the next step boundary, which then raises LeaveGranted. Returns immediately.

        Can be called from any thread; the others form the next group without an abort. If this worker is the
        only one that holds the training state, it may leave only once others have the state; until then, it
        gets MembershipChanged.

        There are three other cases in which LeaveGranted is raised, with ``alone`` and possibly during a
        step. The scheduler is lost and does not come back within seconds; no next generation forms; or others
        do not reach the end of the step within MS_LEAVE_TIMEOUT.
        """
        self.expect_leave(reason)
        self._client.post(events.LeaveWanted(reason))

    def expect_leave(self, reason: str) -> None:
        """Like ``request_leave``, but works in another thread; can be called from a signal handler."""
        self._client.expect_leave(reason)

    def leave_now(self, reason: str) -> None:
        """Makes :meth:`open` raise LeaveGranted, no matter what it waits for.

        Can be called from a signal handler.
        """
        self._client.leave_now(reason)

    def note_left(self) -> None:
        """Records that this worker leaves before training ends, so that it does not count as finished."""
        self._left = True

    @property
    def error(self) -> BaseException | None:
        """The error that this session has ended with, or None."""
        return self._error

    @property
    def leaves(self) -> bool:
        """Whether this worker leaves as asked, or has left."""
        return self._left or self._client.leave_granted

    # ------------------------------------------------------------ change

    def rejoin(self) -> None:
        """Enters the next generation after MembershipChanged, with new ranks, communicators and groups.

        Waits until the next generation has formed, for as long as the scheduler lets the job wait. Returns
        immediately if the generation is not over. After RefusedError with the code SUPERSEDED (this worker
        was declared dead), it asks for a place as a newcomer. If several threads call it, one does this and
        the others wait.

        Raises:
            MembershipChanged: too few members are left, if its ``save`` is true. This worker should then save
                the state, and call this again to wait for more.
            WorkerError: there will be no next generation with this worker.
        """
        with self._rejoin_lock:
            self._rejoin()

    def _rejoin(self) -> None:
        place = self._place
        failure = self._client.failure
        if isinstance(failure, RefusedError) and failure.declared_dead:
            self._ask_as_newcomer(failure)
        elif failure is not None:
            raise failure.with_traceback(None)
        elif not self._client.is_outdated(place.generation):
            return
        else:
            change = self._client.over(place.generation)
            self._leave_generation()
            if isinstance(change, MembershipChanged) and change.lost:
                self._check_gpu()
        self._enter()

    def _check_gpu(self) -> None:
        """Checks this worker's GPU after a loss; if it has failed, the worker leaves the job.

        Raises:
            GpuFailedError: the GPU has failed.
        """
        self._gpu_fault = self._gpu.fault_after_loss()
        if not self._gpu_fault:
            return
        host, node_id = self._profile.host.name, self._profile.node_id
        error = GpuFailedError(
            f"The GPU of node {node_id} on host {host} has failed its check: {self._gpu_fault.rstrip('.')}.",
            remedy=f"Reset or replace it, then let it in again: muster admit {host}.",
        )
        self._end_as_failed(error)
        raise error

    def _ask_as_newcomer(self, refusal: RefusedError) -> None:
        log.warning("this worker has lost its place and asks for one as a newcomer: %s", refusal)
        self._leave_generation()
        self._profile = self._profile.replaced(incarnation=new_incarnation())
        self._note_place()
        self._client.renew(self._profile.incarnation, self._profile.data_address)

    def _leave_generation(self) -> None:
        self._groups.leave()
        self._client.communicators.end(close_quietly)
        forget_meshes()

    def _enter(self) -> None:
        while True:
            try:
                build = self._client.next_build()
                place = build.assignment
                if self._answering is not None:
                    self._answering.know(member.host.address for member in place.members)
                if self._assignment is None:
                    self._check_rank_id(place)
                ordinal = self._ordinal(place.members[place.rank].local_rank)
                communicator = self._connect(build, ordinal)
                if not self._client.built(place.generation):
                    self._client.check(place.generation)  # The generation is over.
                self._assignment = place
                self._groups.enter(communicator)
            except MembershipChanged as change:  # Before it began: the next one is formed already or will be.
                self._leave_generation()
                if change.save:
                    raise
                continue
            except RefusedError as refusal:
                # The worker was stopped for too long before its first place, so it has computed nothing that
                # could be lost. A new incarnation is refused in this way only after another silence of the
                # same length.
                if not refusal.declared_dead or self._assignment is not None:
                    raise
                self._ask_as_newcomer(refusal)
                continue
            process_lines.stands(place.generation, place.rank)
            log.info(
                "rank %d of %d in generation %d of job %s: %s",
                place.rank,
                len(place.members),
                place.generation,
                self.job_id,
                place.reason,
            )
            process_lines.resolved()
            self._note_group(place)
            self._step_clock.begin(len(place.members), place.rank)
            self._gpu.watch(ordinal, len(place.members))
            return

    def _sending_s(self) -> Mapping[int, float]:
        """Returns for how long data could not be sent to each rank, if the communicator measures it."""
        communicator = self._world
        return communicator.sending_s() if isinstance(communicator, TellsOfLinks) else {}

    def _connect(self, build: events.Build, ordinal: int) -> Communicator:
        """Connects this worker with the other members of a generation.

        Args:
            build: the generation, and its unique ids.
            ordinal: CUDA's number of this worker's GPU in this process; -1 on a CPU.

        Raises:
            MembershipChanged: the generation ended before they were connected.
            WorkerError: the members cannot be connected.
        """
        generation, members = build.assignment.generation, build.assignment.members
        inner = self._connect_backend(build, ordinal)
        inner.timeout_s = self.settings.collective_timeout_s
        self._world = inner
        self._client.adopt(generation, inner)
        self._recorder.clear()
        return FaultAwareCommunicator(
            inner,
            world_ranks=range(len(members)),
            verdict=lambda rank, error: self._client.verdict(generation, rank, error),
            recorder=self._recorder,
            adopted=lambda each: self._client.adopt(generation, each),
            closed=self._client.communicators.forget,
        )

    def _connect_backend(self, build: events.Build, ordinal: int) -> Communicator:
        place = build.assignment
        membership = world_membership(build, self.settings.job_id, ordinal)
        timeout_s = min(self.settings.topo_timeout_s, self.settings.collective_timeout_s)
        if place.state_source_rank >= 0:
            # A survivor may be busy outside collectives for any length of time. The scheduler reports which
            # workers are missing, and ends the generation if all are present and cannot connect. Another
            # limit applies without a scheduler.
            timeout_s = SURVIVOR_TIMEOUT_S
        try:
            return self.backend.connect(
                membership,
                timeout_s=timeout_s,
                cancelled=lambda: self._client.over(place.generation),
            )
        except WorkerError as error:
            rank = error.rank if isinstance(error, PeerLostError) else -1
            explained = self._client.verdict(place.generation, rank, error)
            if explained is error:
                raise
            raise explained from error

    def _check_rank_id(self, place: messages.Assignment) -> None:
        """Refuses a RANK_ID that is not this worker's rank; with members missing, ranks may move up."""
        wanted = self.settings.rank_id
        if wanted not in (-1, place.rank) and len(place.members) == self.settings.worker_num:
            raise SettingsError(
                f"RANK_ID is {wanted}, but this worker, node {self._profile.node_id}, has rank {place.rank}.",
                remedy="Unset it, or set MS_NODE_ID, or RANK_TABLE_FILE, such that the ranks agree.",
            )

    # ------------------------------------------------------------ the end

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._released

    def release(self, *, finished: bool | None = None, reason: str = "") -> None:
        """Leaves the job and frees everything; idempotent.

        Args:
            finished: True: the training is complete. False: the others are told immediately that this worker
                is gone. None: the training is complete, unless this worker leaves as asked.
            reason: the reason, for the scheduler's log.
        """
        with self._release_lock:
            if self._released:
                return
            self._released = True
        asked = finished is None and self.leaves
        # A worker that wrongly reports this keeps newcomers out of a job that still has steps to do.
        if finished is None:
            finished = not asked
        default = "finished" if finished else "asked to leave" if asked else "gave up"
        try:
            # A SIGTERM must not turn a worker that has reported its end into a failure.
            with on_sigterm(lambda: None) if finished else contextlib.nullcontext():
                self._depart(finished, reason or default)
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def end(self, error: BaseException | None) -> None:
        """Releases the session with the error that ended the script or block; if None, like ``release()``.

        Args:
            error: the error that ended the script or block. SystemExit with code 0 or None is not an error.
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
            self._client.communicators.end(finish)
        self._client.leave(
            finished=finished,
            reason=reason,
            consequence=is_consequence(self._error),
            exit_code=exit_code_of(self._error),
            gpu_fault=self._gpu_fault,
        )
        self._client.close()
        if not finished:
            self._groups.leave()
            self._client.communicators.end(abandon)
        self.backend.close()
        self._gpu.close()
        if self._answering is not None:
            self._answering.close()

    def __enter__(self) -> Session:
        """Returns the session, which is already open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the session; an exception means that the training is not finished."""
        self.end(error)


def _jitter() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32
