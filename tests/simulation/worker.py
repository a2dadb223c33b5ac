"""A worker process of the simulation: the real membership machine and a training thread in a few states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.control.machine import Membership
from tests.simulation.network import Stream
from tests.simulation.scenario import LATE_S

if TYPE_CHECKING:
    from tests.simulation.world import World

TIMING = e.Timing(topo_timeout_s=60.0, reconnect_timeout_s=20.0, goodbye_timeout_s=15.0, late_again_s=LATE_S)
_QUIET = (e.StepGranted, e.StepHeld, e.Tell)


class Worker:
    """One process. ``doing`` is what its training thread is in.

    ``doing``: entering, building, standing (waits for the others), syncing, boundary, held, stepping,
    verdict (a collective failed), leaving, gone.
    """

    def __init__(self, world: World, node_id: str, incarnation: int, *, spare: bool = False) -> None:
        self.world = world
        self.node_id = node_id
        self.incarnation = incarnation
        self.profile = world.profile(node_id, incarnation, spare=spare)
        self.core = Membership(self.profile, TIMING, world.rng.random)
        self.alive = True
        self.stream: Stream | None = None
        self.cut_until = 0.0
        self.stopped_until = 0.0
        self.calm_until = 0.0
        self.busy_until = 0.0
        self.doing = "entering"
        self.place: m.Assignment | None = None
        self.waiting_for: tuple[object, ...] | None = None
        self.waiting_since = 0.0
        self.busy = ""
        self.busy_since = 0.0
        self.step = 0
        self.has_state = False
        self.finished = False
        self.unheard = False
        self.dismissed = False
        self.ended_by = ""
        self._armed: float | None = None

    def __str__(self) -> str:
        return f"{self.node_id}#{self.incarnation}"

    def is_cut(self) -> bool:
        """Whether the network between it and the scheduler is cut."""
        return self.world.loop.now < self.cut_until

    def start(self) -> None:
        self.post(e.Started())
        self.post(e.EntryRequested())

    # ------------------------------------------------------------ the machine

    def post(self, event: e.Event) -> None:
        """Feeds the machine and carries out what it says."""
        world = self.world
        if not self.alive:
            return
        if world.loop.now < self.stopped_until:
            world.loop.at(self.stopped_until, self.post, event)
            return
        decision = self.core.step(event, world.loop.now)
        if world.trace is not None and not isinstance(event, e.Tick):
            world.note(f"{self} <- {event!r}")
        for notice in decision.notices:
            if self.alive:
                self._carry_out(notice)
        for message in decision.messages:
            world.network.send_up(self, message)
        if self.alive:
            self._arm()

    def _arm(self) -> None:
        due = self.core.deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self.world.loop.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if not self.alive or self._armed != due:
            return
        self._armed = None
        deadline = self.core.deadline()
        if deadline is not None and deadline <= self.world.loop.now:
            self.post(e.Tick())
        else:
            self._arm()

    def _carry_out(self, notice: e.Notice) -> None:
        if self.world.trace is not None and not isinstance(notice, e.Tell):
            self.world.note(f"{self} :  {notice!r}")
        handler = _HANDLERS.get(type(notice))
        if handler is not None:
            handler(self, notice)
        if self.doing == "held" and not isinstance(notice, _QUIET):
            self.doing = "boundary"
            self._soon(self._ask_again)

    def _ask_again(self) -> None:
        if self.doing == "boundary":  # not interrupted meanwhile
            self.at_boundary()

    def _soon(self, action: Callable[[], None]) -> None:
        self.world.loop.after(self.world.rng.random() * 0.01, self._unless_stopped, action)

    def _unless_stopped(self, action: Callable[[], None]) -> None:
        until = max(self.stopped_until, self.busy_until)
        if self.world.loop.now < until:
            self.world.loop.at(until, self._unless_stopped, action)
        elif self.alive:
            action()

    # ------------------------------------------------------------ notices

    def _connect(self, notice: e.Connect) -> None:
        self.world.network.connect(self, notice.stream)

    def _disconnect(self, notice: e.Disconnect) -> None:
        self.world.network.disconnect(self, notice.stream)

    def _mint(self, notice: e.MintUniqueIds) -> None:
        ids = self.world.mint(notice.generation, notice.count, self)
        minted = e.UniqueIdsMinted(notice.generation, ids)  # by a thread that is not the training's
        self.world.loop.after(self.world.network.delay(), self.post, minted)

    def _build(self, notice: e.Build) -> None:
        place = notice.assignment
        self.place = place
        self.world.judge.building(self, place, notice.unique_ids)
        self._meet("building", "build", place.generation, notice.unique_ids)

    def _running(self, notice: e.Running) -> None:
        if self.place is not None and self.doing == "standing" and notice.generation == self.place.generation:
            self._meet("syncing", "sync", notice.generation)

    def _interrupt(self, notice: e.Interrupt) -> None:
        if self.doing in ("leaving", "gone"):
            return
        self.world.data_plane.leave(self)
        if self.dismissed:
            self._soon(lambda: self.say_goodbye(finished=False))
            return
        self.doing = "entering"
        self._soon(self._enter)

    def _enter(self) -> None:
        if self.doing == "entering":
            self.post(e.EntryRequested())

    def _dismiss(self, notice: e.Dismissed) -> None:
        self.dismissed = True
        self.world.judge.parting(self, notice)
        if self.doing == "entering":
            self._soon(lambda: self.say_goodbye(finished=False))

    def _granted(self, notice: e.StepGranted) -> None:
        assert self.place is not None
        self._meet("stepping", "step", self.place.generation, self.step)

    def _held(self, notice: e.StepHeld) -> None:
        self.doing = "held"

    def _no_verdict(self, notice: e.NoVerdict) -> None:
        if self.doing == "verdict":
            self.say_goodbye(finished=False)

    def _failed(self, notice: e.Failed) -> None:
        self.world.judge.failed(self, notice)
        self.ended_by = f"{notice.kind.value}: {notice.sentence}"
        self.exit()

    def _left(self, notice: e.Left) -> None:
        self.unheard = not notice.heard
        self.ended_by = "left"
        self.exit()

    # ------------------------------------------------------------ the training thread

    def _meet(self, doing: str, *key: object) -> None:
        self.doing = doing
        self.waiting_for, self.waiting_since = key, self.world.loop.now
        self.world.loop.after(LATE_S, self._look, key)
        self.world.data_plane.enter(self, key)

    def _look(self, key: tuple[object, ...]) -> None:
        """What the watcher does: says that this worker waits for too long."""
        if self.alive and self.waiting_for == key:
            self.post(e.PeersLate(self.world.loop.now - self.waiting_since))
            self.world.loop.after(LATE_S, self._look, key)

    def _probe(self, notice: e.ProbeWanted) -> None:
        found = {node_id: self.world.cables.probe(self, address) for node_id, address in notice.targets}
        took = max((seconds for seconds, _ in found.values()), default=0.0)
        unreached = tuple((node_id, why) for node_id, (_, why) in found.items() if why)
        began = self.world.loop.now
        self.world.loop.after(took + 0.01, self._probed, notice.round, unreached, began)

    def _probed(self, number: int, unreached: tuple[tuple[str, str], ...], began: float) -> None:
        now = self.world.loop.now
        if now < self.stopped_until:
            self.world.loop.at(self.stopped_until, self._probed, number, unreached, began)
            return
        late = self.waiting_for is not None and now - self.waiting_since >= LATE_S
        waits = self.waiting_for is not None or now >= self.busy_until
        busy = self.busy if now < self.busy_until else ""
        lived_since = max(began, self.stopped_until)
        self.post(e.ProbesDone(number, unreached, late, waits, busy, now - lived_since))

    def met(self, key: tuple[object, ...]) -> None:
        """The collective ``key`` has completed here."""
        if self.waiting_for != key or not self.alive:
            return
        if self.world.loop.now < self.stopped_until:
            self.world.loop.at(self.stopped_until, self.met, key)
            return
        assert self.place is not None
        self.waiting_for = None
        if key[0] == "build":
            self.doing = "standing"
            self.post(e.CommunicatorBuilt(self.place.generation))
        elif key[0] == "sync":
            self.has_state = True
            self.at_boundary()
        else:
            self.world.judge.step_met(self, self.place.generation, self.step)
            self.step += 1
            self.post(e.Progress(self.step, 1.0))
            self.at_boundary()

    def at_boundary(self) -> None:
        """Between two steps."""
        if self.doing in ("leaving", "gone", "entering") or not self.alive:
            return
        self.doing = "boundary"
        if self.step >= self.world.scenario.steps:
            self.finished = True
            self.say_goodbye(finished=True)
        elif self.world.loop.now < self.busy_until:
            self.world.loop.at(self.busy_until, self._ask_again)
        else:
            self.post(e.StepStarting(self.step))

    def collective_fails(self, key: tuple[object, ...], rank: int) -> None:
        """A peer's connection broke while this worker waited in ``key``."""
        if self.waiting_for != key or self.place is None or not self.alive:
            return
        self.world.data_plane.leave(self)
        self.doing = "verdict"
        self.post(e.CommunicatorFailed(self.place.generation, rank, "connection reset"))

    def say_goodbye(self, *, finished: bool) -> None:
        if self.doing not in ("leaving", "gone"):
            self.doing = "leaving"
            self.world.data_plane.leave(self)
            self.post(e.Goodbye(finished, "finished" if finished else "gives up"))

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


_HANDLERS: dict[type, Callable[[Worker, Any], None]] = {
    e.Connect: Worker._connect,
    e.Disconnect: Worker._disconnect,
    e.MintUniqueIds: Worker._mint,
    e.Build: Worker._build,
    e.Running: Worker._running,
    e.Interrupt: Worker._interrupt,
    e.Dismissed: Worker._dismiss,
    e.StepGranted: Worker._granted,
    e.StepHeld: Worker._held,
    e.ProbeWanted: Worker._probe,
    e.NoVerdict: Worker._no_verdict,
    e.Failed: Worker._failed,
    e.Left: Worker._left,
}
