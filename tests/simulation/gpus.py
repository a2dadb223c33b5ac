"""A job whose GPUs break: checks fail, the GPUs are refused, and operators admit them again.

A GPU that has broken fails its check before a join and after a change of members, but not each time: what
counts is that it has failed once. In the end all are repaired and admitted, so that the job can end.
"""

from __future__ import annotations

import random
from dataclasses import replace

from muster.errors import WorkerError
from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.wire import messages
from tests.simulation.judge import Judge, Process
from tests.simulation.worker import Worker
from tests.simulation.world import World, play

FAILS = 0.7
"""So often a GPU that has broken fails its check."""

OPERATOR_S = 2.0
"""So often an operator looks, after the last fault, and admits what is refused."""


class GpuJudge(Judge):
    """Also follows which GPUs are refused."""

    world: GpuWorld

    def __init__(self, world: GpuWorld) -> None:
        super().__init__(world)
        self.refused: dict[str, records.GpuRefused] = {}
        self.faults: dict[int, str] = {}  # of the streams on which a worker joined with a fault
        self.admitted_at: dict[str, float] = {}
        self.asked_for: set[str] = set()  # by an operator, whom they name
        self.leaves: dict[int, str] = {}  # of members, with a fault: the GPU, by stream
        self.refusals = self.admissions = 0

    def committed(self, written: tuple[records.Record, ...]) -> None:
        """Checks records of GPUs, and who is taken in."""
        for record in written:
            if isinstance(record, records.GpuRefused):
                self.expect(
                    record.gpu in self.world.failed, f"{record.gpu} is refused and has failed no check"
                )
                self.refused[record.gpu] = record
                self.refusals += 1
            elif isinstance(record, records.GpuAdmitted):
                known = self.refused.pop(record.gpu)
                named = {record.gpu, known.node_id, known.host.id} & self.asked_for
                self.expect(bool(named), f"{record.gpu} is admitted, and nobody has asked for it")
                self.admitted_at[record.gpu] = self.world.loop.now
                self.admissions += 1
            elif isinstance(record, records.Admitted):
                gpu = self.world.gpu_of(record.candidate.node_id)
                self.expect(
                    gpu not in self.refused, f"{record.candidate.node_id} is taken in on refused {gpu}"
                )
        super().committed(written)

    def arriving(self, event: events.Event) -> None:
        """Notes what a worker says of its GPU."""
        super().arriving(event)
        if isinstance(event, events.Joined) and event.gpu_fault:
            self.faults[event.session] = event.gpu_uuid
        if isinstance(event, events.LeftCleanly) and event.gpu_fault:
            process = self.identity[event.session]
            if self._holds_a_place(process, event.session):
                self.leaves[event.session] = self.world.gpu_of(process[0])
        if isinstance(event, events.AdmitAsked):
            self.asked_for.add(event.name)

    def _holds_a_place(self, process: Process, session: int) -> bool:
        return self.claims.get(process[0]) == process[1] and self.newest_stream.get(process) == session

    def stepped(self, event: events.Event, decision: Decision, *, alone: bool) -> None:
        """Checks that what was said of a GPU is remembered, and what an operator said is done."""
        super().stepped(event, decision, alone=alone)
        if self.outcome is not None or not alone:
            return
        if isinstance(event, events.Joined) and event.gpu_fault:
            taken = any(isinstance(told, messages.Welcome) for _, told in decision.messages)
            self.expect(not taken, f"{event.candidate.node_id} is welcome, and its GPU has failed its check")
            refused = any(is_of_gpus(told) for _, told in decision.messages)
            self.expect(not refused or event.gpu_uuid in self.refused, f"{event.gpu_uuid} is not remembered")
        if isinstance(event, events.LeftCleanly) and event.session in self.leaves:
            gpu = self.leaves.pop(event.session)
            self.expect(gpu in self.refused, f"{gpu} failed in a member, and is not remembered")
        if isinstance(event, events.AdmitAsked):
            left = [
                each.gpu
                for each in self.refused.values()
                if event.name in (each.gpu, each.node_id, each.host.id)
            ]
            self.expect(not left, f"an operator admits {event.name}, and {left} are refused")

    def sending(self, session: int, message: messages.SchedulerMessage) -> None:
        """Checks that nobody is refused for a GPU that has not failed, or from its place."""
        super().sending(session, message)
        if not is_of_gpus(message):
            return
        process = self.identity[session]
        gpu = self.world.gpu_of(process[0])
        just_now = self.world.loop.now - self.admitted_at.get(gpu, -10.0) < 1.0
        known = gpu in self.refused or session in self.faults or just_now
        self.expect(known, f"{process} is refused for {gpu}, which has not failed")
        self.expect(
            self.claims.get(process[0]) != process[1], f"{process} is a member, and is refused for {gpu}"
        )


def is_of_gpus(message: messages.SchedulerMessage) -> bool:
    """Whether it refuses a worker for its GPU."""
    return isinstance(message, messages.Refused) and message.code is messages.RefusalCode.GPU_FAILED


class GpuWorker(Worker):
    """A worker whose GPU is checked before it joins, and when it comes to the next generation."""

    world: GpuWorld

    def _train(self) -> None:
        if self.place is not None and self.world.fails_check(self.node_id):
            self.client.leave(finished=False, reason="its GPU has failed", gpu_fault="7 words differ")
            self.ended_by = "its GPU failed"
            raise WorkerError("its GPU has failed")
        super()._train()


class GpuWorld(World):
    """A world in which GPUs break, one or two, and are repaired."""

    worker = GpuWorker
    judge: GpuJudge

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        self.chance = random.Random(f"gpus {seed}")
        self.broken: set[str] = set()
        self.failed: set[str] = set()
        super().__init__(seed, trace)
        self.is_apart = False
        scenario = self.scenario
        steps, end = max(scenario.steps, int(12.0 / scenario.step_s)), max(10.0, scenario.fault_end)
        self.scenario = replace(scenario, kind="supervised", steps=steps, fault_end=end)
        self.judge = GpuJudge(self)

    def gpu_of(self, node_id: str) -> str:
        """The uuid of a node's GPU."""
        return f"GPU-{self.host(node_id)}-{int(node_id.lstrip('n')) % self.scenario.per_host}"

    def fails_check(self, node_id: str) -> bool:
        """Whether a node's GPU fails a check now."""
        gpu = self.gpu_of(node_id)
        fails = gpu in self.broken and self.chance.random() < FAILS
        if fails:
            self.failed.add(gpu)
            self.note(f"!! {gpu} fails a check")
        return fails

    def profile(self, node_id: str, incarnation: int, *, spare: bool) -> messages.Profile:
        """With a GPU, which is checked as the process starts."""
        made = super().profile(node_id, incarnation, spare=spare)
        index = int(node_id.lstrip("n")) % self.scenario.per_host
        fault = "7 words differ" if self.fails_check(node_id) else ""
        device = messages.Device("cuda", index)
        return made.replaced(device=device, gpu_uuid=self.gpu_of(node_id), gpu_fault=fault)

    def run(self) -> None:
        """Plays the seed with what happens to GPUs."""
        for _ in range(self.chance.choice((1, 2))):
            at = self.chance.uniform(0.0, 0.8 * self.scenario.fault_end)
            number = self.chance.randrange(self.scenario.worker_num)
            self.loop.at(at, self._break, self.node(number))
        self.loop.at(self.scenario.fault_end, self._repair_all)
        super().run()

    def _break(self, node_id: str) -> None:
        gpu = self.gpu_of(node_id)
        self.note(f"!! {gpu} breaks")
        self.broken.add(gpu)
        own = self.newest.get(node_id)
        others = [each for each in self.living() if each is not own]
        # Its own worker is lost, or another one, whereupon all check theirs.
        victim = own if self.chance.random() < 0.5 or not others else self.chance.choice(others)
        if victim is not None and victim.alive and self.chance.random() < 0.8:
            self.judge.disturbed()
            victim.kill()
        self.loop.after(self.chance.uniform(2.0, 12.0), self._repair, gpu, node_id)

    def _repair(self, gpu: str, node_id: str) -> None:
        """It is replaced; an operator says so, by one of its names, or too early, or not at all."""
        if self.chance.random() < 0.7:
            self.broken.discard(gpu)
        if self.scheduler.up and self.chance.random() < 0.7:
            name = self.chance.choice((gpu, node_id, self.host(node_id)))
            self.scheduler.feed(events.AdmitAsked(name))

    def _repair_all(self) -> None:
        self.broken.clear()
        if self.judge.outcome is not None:
            return
        for gpu in sorted(self.judge.refused):
            if self.scheduler.up:
                self.judge.disturbed()
                self.scheduler.feed(events.AdmitAsked(gpu))
        self.loop.after(OPERATOR_S, self._repair_all)


def play_gpus(seed: int, trace: list[str] | None = None) -> str:
    """Plays one seed; returns what was broken, or "" if all was well."""
    return play(seed, trace, kind=GpuWorld)
