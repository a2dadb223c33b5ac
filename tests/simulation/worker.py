"""A worker process of the simulation: the real client with its threads, and a training thread beside it."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from muster.errors import LeaveGranted, MembershipChanged, PeerLostError, WorkerError
from muster.wire import codec, messages
from muster.worker.session import events
from muster.worker.session.client import Client
from muster.worker.session.leave import LoneLeave
from muster.worker.session.machine import MembershipMachine
from muster.worker.session.pace import Pace
from tests.simulation.fibers import Fibers
from tests.simulation.network import Stream
from tests.simulation.scenario import LATE_S

if TYPE_CHECKING:
    from tests.simulation.world import World

TIMING = events.Timing(
    topo_timeout_s=60.0, reconnect_timeout_s=20.0, goodbye_timeout_s=15.0, late_again_s=LATE_S
)
LEAVE_TIMEOUT_S = 20.0
GRACE_S = LEAVE_TIMEOUT_S / 0.8
"""How long after SIGTERM the launcher sends SIGKILL: it sets MS_LEAVE_TIMEOUT to 0.8 times its grace."""


class Watched(MembershipMachine):
    """The machine, and who looks on."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.profile, worker.world.timing or TIMING, worker.world.rng.random)
        self._worker = worker

    def step(self, event: events.Event, now: float) -> events.Effects:
        worker, world = self._worker, self._worker.world
        decision = super().step(event, now)
        if world.trace is not None and not isinstance(event, events.DeadlineReached):
            world.note(f"{worker} <- {event!r}")
        for notice in decision.notices:
            if world.trace is not None and not isinstance(notice, events.LogLine):
                world.note(f"{worker} :  {notice!r}")
            worker.noticed(notice)
        return decision


class Line:
    """The worker's side of the network."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._network = worker.world.network
        self.post: Any = None

    def open(self, number: int) -> None:
        self._network.connect(self._worker, number)

    def send(self, data: bytes) -> None:
        self._network.send_up(self._worker, codec.decode_worker_message(data))

    def close(self, number: int) -> None:
        self._network.disconnect(self._worker, number)

    def close_all(self) -> None:
        if self._worker.stream is not None:
            self.close(self._worker.stream.number)


class Group:
    """The communicator of one generation."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._results = worker.threads.queue()
        self._error: Exception | None = None

    def meet(self, doing: str, *key: object) -> None:
        """Calls a collective and waits for it.

        Raises:
            PeerLostError: a peer's connection broke.
            MembershipChanged: the generation is over.
        """
        worker = self._worker
        if self._error is not None:
            raise self._error
        worker.doing = doing
        worker.waiting_for, worker.waiting_since = key, worker.world.loop.now
        worker.world.data_plane.enter(worker, key)
        error = self._results.get()
        if error is not None:
            raise error

    def ended(self, error: Exception | None) -> None:
        """The collective under way is over."""
        self._worker.world.data_plane.leave(self._worker, broken=error is not None)
        self._results.put(error)

    def abort(self, error: Exception) -> None:
        self._error = self._error or error
        if self._worker.waiting_for is not None:
            self.ended(error)
        else:
            self._worker.world.data_plane.leave(self._worker)


class Calls:
    """The collectives of a worker's training thread: one at a time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def hanging_s(self) -> float:
        worker = self._worker
        return 0.0 if worker.waiting_for is None else worker.world.loop.now - worker.waiting_since

    def late_s(self) -> float:
        return self.hanging_s()

    def waits(self) -> bool:
        return self._worker.waiting_for is not None

    def recent(self, *, last_only: bool = False) -> tuple[messages.Collective, ...]:
        return ()


class StepsAndWaits(Pace):
    """A worker's pace, beside that of its steps alone, which the judge goes by."""

    def __init__(self, least_s: float) -> None:
        super().__init__(least_s)
        self.of_steps = Pace(least_s)

    def note_step(self, step: int, now: float) -> None:
        super().note_step(step, now)
        self.of_steps.note_step(step, now)


class Worker:
    """One process. ``doing`` is what its training thread is in.

    ``doing``: entering, building, standing (waits for the others), syncing, boundary, stepping, verdict (a
    collective failed), leaving, gone. ``stood_still``: from when until when the training thread did so last.
    """

    def __init__(self, world: World, node_id: str, incarnation: int, *, spare: bool = False) -> None:
        self.world = world
        self.node_id = node_id
        self.incarnation = incarnation
        self.profile = world.profile(node_id, incarnation, spare=spare)
        self.alive = True
        self.stream: Stream | None = None
        self.cut_until = 0.0
        self.stopped_until = 0.0
        self._unread: deque[events.Event] = deque()
        self.calm_until = 0.0
        self.busy_until = 0.0
        self.doing = "entering"
        self.place: messages.Assignment | None = None
        self.waiting_for: tuple[object, ...] | None = None
        self.waiting_since = 0.0
        self.busy = ""
        self.busy_since = 0.0
        self.stood_still = (0.0, 0.0)
        self.step = 0
        self.has_state = False
        self.finished = False
        self.unheard = False
        self.ended_by = ""
        self._minting = 0
        self._group: Group | None = None
        self.threads = Fibers(world, lambda: self.stopped_until)
        self.pace = StepsAndWaits(least_s=LATE_S - 0.5)
        self.client = Client(
            Watched(self),
            Line(self),
            backend=self,
            collectives=Calls(self),
            prober=self._probe_all,
            lone_leave=LoneLeave(unfinished_s=LEAVE_TIMEOUT_S),
            pace=self.pace,
            threads=self.threads,
        )

    def __str__(self) -> str:
        return f"{self.node_id}#{self.incarnation}"

    def is_cut(self) -> bool:
        """Whether the network between it and the scheduler is cut."""
        return self.world.loop.now < self.cut_until

    def start(self) -> None:
        self.client.start()
        self.threads.start("training", self._live)

    def post(self, event: events.Event) -> None:
        """What the network has for it; a process that is stopped finds it later, in the same order."""
        self._unread.append(event)
        self._read()

    def _read(self) -> None:
        while self._unread:
            if self.world.loop.now < self.stopped_until:
                self.world.loop.at(self.stopped_until, self._read)
                return
            event = self._unread.popleft()
            if self.alive:
                self.client.post(event)

    def noticed(self, notice: events.Notice) -> None:
        """What the machine has decided."""
        if isinstance(notice, events.MintUniqueIds):
            self._minting = notice.generation
        elif isinstance(notice, events.Dismissed):
            self.world.judge.parting(self, notice)
        elif isinstance(notice, events.Failed):
            self.world.judge.failed(self, notice)
            self.ended_by = f"{notice.kind.value}: {notice.sentence}"
        elif isinstance(notice, events.Left) and not self.ended_by:
            self.unheard = not notice.heard
            self.ended_by = "left"

    # ------------------------------------------------------------ the training thread

    def _live(self) -> None:
        try:
            while not self.finished:
                self._train()
        except LeaveGranted as granted:
            if granted.alone and self.doing in ("entering", "building", "standing"):
                self.world.went_between_steps.add((self.node_id, self.incarnation))
                self.world.judge.disturbed()
        except WorkerError:
            pass
        self.doing = "leaving"
        self.world.data_plane.leave(self)
        self.client.leave(finished=self.finished, reason="finished" if self.finished else "gives up")
        self.exit()

    def _train(self) -> None:
        """One generation."""
        self.doing = "entering"
        self._stand_still()
        try:
            build = self.client.next_build()
            place = self.place = build.assignment
            generation = place.generation
            self.world.judge.building(self, place, build.unique_ids)
            group = self._group = Group(self)
            self.client.adopt(generation, group)  # type: ignore[arg-type]
            self._meet("building", "build", generation, build.unique_ids)
            self.doing = "standing"
            if not self.client.built(generation):
                self.client.check(generation)
            self._meet("syncing", "sync", generation)
            self.has_state = True
            self.takes_up()
            while self.step < self.world.scenario.steps:
                self.doing = "boundary"
                self._stand_still()
                self.client.start_step(self.step, generation)
                self._meet("stepping", "step", generation, self.step)
                self.world.judge.step_met(self, generation, self.step)
                self.step += 1
                self.has_stepped()
                self.client.post(events.ProgressReported(self.step, 1.0))
            self.finished = True
        except MembershipChanged:
            self.doing = "entering"
            self.client.communicators.end(lambda _: self.world.data_plane.leave(self))

    def takes_up(self) -> None:
        """The members have met in a new generation, and have the state."""

    def has_stepped(self) -> None:
        """One more step is done."""

    def _meet(self, doing: str, *key: object) -> None:
        assert self._group is not None and self.place is not None
        try:
            self._group.meet(doing, *key)
        except PeerLostError as error:
            self.doing = "verdict"
            raise self.client.verdict(self.place.generation, error.rank, error) from error

    def _stand_still(self) -> None:
        since = self.world.loop.now
        while self.world.loop.now < self.busy_until:
            self.stood_still = (since, math.inf)
            busy = self.busy
            if busy:
                self.client.training.begin_busy(busy)
            self.threads.sleep(self.busy_until - self.world.loop.now)
            if busy:
                self.client.training.end_busy(busy)
            self.stood_still = (since, self.world.loop.now)

    def stood_still_for(self, ago_s: float) -> float:
        """For how long the training thread stood still, in seconds; 0: not within the last ``ago_s``."""
        since, until = self.stood_still
        now = self.world.loop.now
        until = min(until, now, self.world.died_at.get((self.node_id, self.incarnation), now))
        return until - since if until > now - ago_s else 0.0

    def met(self, key: tuple[object, ...]) -> None:
        """The collective ``key`` has completed here."""
        if self.alive and self.waiting_for == key and self._group is not None:
            self._group.ended(None)

    def collective_fails(self, key: tuple[object, ...], rank: int) -> None:
        """A peer's connection broke while this worker waited in ``key``."""
        if self.alive and self.waiting_for == key and self._group is not None:
            self._group.ended(PeerLostError("connection reset", rank=rank))

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Makes those of the generation that it was asked for last."""
        return self.world.mint(self._minting, count, self)

    def _probe_all(self, targets: dict[str, str]) -> dict[str, str]:
        found = {node_id: self.world.cables.probe(self, address) for node_id, address in targets.items()}
        self.threads.sleep(max((seconds for seconds, _ in found.values()), default=0.0) + 0.01)
        return {node_id: why for node_id, (_, why) in found.items() if why}

    # ------------------------------------------------------------ the end

    def terminate(self) -> None:
        """SIGTERM, and SIGKILL if it has not gone within the grace time."""
        self.world.leavers.add(self.node_id)
        self.client.expect_leave("SIGTERM")
        self.world.loop.after(GRACE_S, self._kill_late)

    def _kill_late(self) -> None:
        if self.alive:
            self.world.note(f"!! {self} did not end within {GRACE_S:g} s of SIGTERM and is killed")
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self.ended_by = "killed"
        if self.stream is not None:
            self.world.network.break_up(self.stream, "connection reset", worker_too=False)
        self.exit()

    def exit(self) -> None:
        """The process is gone."""
        if self.alive:
            self.alive = False
            self.doing = "gone"
            self.world.note(f"{self} has ended: {self.ended_by}")
            self.world.data_plane.leave(self)
            if self.stream is not None and self.ended_by != "killed":
                self.world.network.disconnect(self, self.stream.number)
            self.world.ended(self)
            self.threads.kill()
