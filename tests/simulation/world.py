"""One simulated job: the real scheduler with its driver, real workers' clients and codec, a seeded queue.

Everything that happens comes from one seed. Checkers (:mod:`tests.simulation.judge`) look on from outside;
planted bugs (:mod:`tests.simulation.mutants`) prove that they bite.
"""

from __future__ import annotations

import random
from dataclasses import replace

from muster.wire import messages
from muster.worker.session import events
from tests.simulation.data_plane import Cables, DataPlane
from tests.simulation.faults import APART, APART_S, plan_faults
from tests.simulation.judge import Judge, Violation
from tests.simulation.launchers import Launchers
from tests.simulation.loop import Loop
from tests.simulation.network import Network
from tests.simulation.scenario import TOPO_TIMEOUT_S, make_scenario
from tests.simulation.scheduler import Scheduler
from tests.simulation.worker import Worker


class World:
    """Everything there is in one run.

    Args:
        seed: decides all.
        trace: gets a line for everything that happens.
    """

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.apart = random.Random(f"ports {seed}")
        self.at_fault: set[str] = set()
        self.trace = trace
        self.scenario = make_scenario(self.rng)
        # By numbers of their own, so that seeds without them play as they did before.
        self.is_apart = self.scenario.kind == "cuts" and self.apart.random() < APART
        if self.is_apart:  # long enough for several victims, and with places to lose
            steps, least = int(APART_S / self.scenario.step_s), self.apart.choice((1, 2))
            self.scenario = replace(self.scenario, steps=steps, worker_min=least)
        self.loop = Loop()
        self.judge = Judge(self)
        self.network = Network(self)
        self.data_plane = DataPlane(self)
        self.cables = Cables(self)
        self.scheduler = Scheduler(self)
        self.launchers = Launchers(self)
        self.processes: list[Worker] = []
        self.newest: dict[str, Worker] = {}
        self.died_at: dict[tuple[str, int], float] = {}
        self.leavers: set[str] = set()
        self.went_between_steps: set[tuple[str, int]] = set()
        self.restarts = 0
        self.cut_for_good = False
        self.note(f"seed {seed}: {self.scenario}")

    timing: events.Timing | None = None
    """The workers' deadlines, where they are not those of one scheduler."""

    worker: type[Worker] = Worker
    grace_s = 4 * TOPO_TIMEOUT_S
    """By when the job has ended after the last fault."""

    def note(self, line: str) -> None:
        """Writes a line of the transcript."""
        if self.trace is not None:
            self.trace.append(f"{self.loop.now:8.3f}  {line}")

    # ------------------------------------------------------------ names and places

    def profile(self, node_id: str, incarnation: int, *, spare: bool) -> messages.Profile:
        """Who a worker is; two hosts share one name, so only their ids tell them apart."""
        number = int(node_id.lstrip("n"))
        host_id = self.host(node_id)
        return messages.Profile(
            job_id="job",
            node_id=node_id,
            incarnation=incarnation,
            worker_num=self.scenario.worker_num,
            worker_min=self.scenario.worker_min,
            host=messages.Host(host_id, "gpu", "10.0.0.1", ""),
            device=messages.Device("cpu", number % self.scenario.per_host),
            backend="tcp",
            local_index=number % self.scenario.per_host,
            probe_address=f"{node_id}#{incarnation}:1",
            spare=spare,
        )

    def host(self, node_id: str) -> str:
        return f"host-{int(node_id.lstrip('n')) // self.scenario.per_host}"

    def node(self, number: int) -> str:
        return str(number) if self.scenario.integers else f"n{number}"

    def in_rank_order(self, nodes: list[str]) -> list[str]:
        """The rule of ranks for this world's names: by number, which is also host and device."""
        return sorted(nodes, key=lambda node: int(node.lstrip("n")))

    def mint(self, generation: int, count: int, worker: Worker) -> tuple[bytes, ...]:
        nonce = self.rng.getrandbits(32)
        return tuple(b"ID-%d-%d-%d-%d" % (generation, worker.incarnation, nonce, n) for n in range(count))

    def dead_for(self, process: tuple[str, int]) -> float:
        """For how long the scheduler could have known that a process is dead."""
        if process not in self.died_at:
            return 0.0
        since = max(self.died_at[process], self.scheduler.up_since, self.scheduler.excused_at)
        # While it waits for its journal it hears nobody, and gives all that time back, whenever that was.
        return self.loop.now - since - self.scheduler.held_up_since(since)

    def has_state(self, process: tuple[str, int]) -> bool:
        return any((w.node_id, w.incarnation) == process and w.has_state for w in self.processes)

    def steps_left(self, process: tuple[str, int]) -> int:
        """How many steps a process has still to do."""
        (worker,) = (w for w in self.processes if (w.node_id, w.incarnation) == process)
        return max(0, self.scenario.steps - worker.step)

    # ------------------------------------------------------------ processes

    def start(self, node_id: str, *, spare: bool = False) -> Worker:
        """Starts a worker process."""
        worker = self.worker(self, node_id, self.rng.getrandbits(63) | 1, spare=spare)
        self.note(f"!! {worker} starts{' as a spare' if spare else ''}")
        self.processes.append(worker)
        self.newest[node_id] = worker
        self.judge.disturbed()
        worker.start()
        return worker

    def ended(self, worker: Worker) -> None:
        """A process is gone; the supervisor starts it again while the job goes on."""
        self.judge.disturbed()
        self.died_at[(worker.node_id, worker.incarnation)] = self.loop.now
        if worker.ended_by == "killed":
            self.launchers.collect(worker)
        done = (worker.node_id, worker.incarnation) in self.judge.completed
        if self.scenario.supervised and not done and self.newest.get(worker.node_id) is worker:
            pause = self.rng.uniform(0.2, 3.0) + self.restarts * 0.2
            self.loop.after(pause, self._restart, worker)

    def _restart(self, worker: Worker) -> None:
        if self.judge.outcome is None and not self.newest[worker.node_id].alive:
            self.restarts += 1
            self.start(worker.node_id, spare=worker.profile.spare)

    def living(self) -> list[Worker]:
        return [worker for worker in self.processes if worker.alive]

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Plays the seed.

        Raises:
            Violation: a promise was broken.
        """
        scenario = self.scenario
        self.scheduler.start()
        for number in range(scenario.worker_num):
            self.loop.at(self.rng.uniform(0.0, 2.0), self.start, self.node(number))
        for number in range(scenario.spares):
            at = self.rng.uniform(0.0, 4.0)
            self.loop.at(at, lambda n=number: self.start(self.node(scenario.worker_num + n), spare=True))
        plan_faults(self)
        self.launchers.begin()
        limit = scenario.fault_end + self.grace_s
        try:
            self.loop.run(limit, self._over)
            self.note(f"ended: {self.judge.outcome}")
            self.judge.final()
        finally:
            for worker in self.processes:
                worker.threads.kill()

    def _over(self) -> bool:
        return self.judge.outcome is not None and not any(worker.alive for worker in self.processes)


def play(seed: int, trace: list[str] | None = None, *, kind: type[World] = World) -> str:
    """Plays one seed in a world of this kind; returns what was broken, or "" if all was well."""
    world = kind(seed, trace)
    try:
        world.run()
    except Violation as violation:
        world.note(f"VIOLATION {violation}")
        return str(violation)
    return ""
