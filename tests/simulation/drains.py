"""A job whose hosts and workers operators drain: now or at a time, several at once, and called off again.

A plan is on the disk before anybody is told of it, and a scheduler that comes up again carries it out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.job import Job
from tests.simulation.judge import Judge
from tests.simulation.scheduler import Scheduler
from tests.simulation.world import World, play

MIDNIGHT_S = 1_800_000_000.0
"""The time of day, in seconds since 1970, at which the simulation begins."""

AT_ONCE_S = 1.0
"""So long after its time at the latest a plan is carried out by a scheduler that can."""

PLANS = (2, 3, 5)
_GOES = records.LeavePlanned | records.Removed


class DrainJudge(Judge):
    """Also follows which drains are planned, and who leaves because of one."""

    world: DrainWorld

    def __init__(self, world: DrainWorld) -> None:
        super().__init__(world)
        self.plans: dict[int, records.DrainPlanned] = {}
        self.called_off: list[events.DrainCalledOff] = []
        self.made: list[tuple[records.Record, ...]] = []
        self.carried_out = self.cancelled = 0

    def committed(self, written: tuple[records.Record, ...]) -> None:
        """Checks plans that are made, changed and over, and who leaves: decision by decision."""
        made: list[tuple[records.Record, ...]] = []
        while self.made and sum(map(len, made)) < len(written):
            made.insert(0, self.made.pop())
        self.made.clear()
        if tuple(itertools.chain(*made)) != written:
            made = [written]
        place = 0
        for records_of_one in made:
            self._check(records_of_one, written[:place])
            place += len(records_of_one)
        if any(isinstance(each, records.LeavePlanned) for each in written):
            self.disturbed()
        super().committed(written)

    def _check(self, written: tuple[records.Record, ...], before: tuple[records.Record, ...]) -> None:
        """Checks one decision, after others that are written with it."""
        now = MIDNIGHT_S + self.world.loop.now
        leaves = [each for each in written if isinstance(each, records.LeavePlanned)]
        expected: dict[str, str] = {}
        for place, record in enumerate(written):
            if isinstance(record, records.DrainPlanned):
                self.plans[record.number] = record
            elif isinstance(record, records.DrainOver):
                plan = self.plans.pop(record.number)
                goes = any(each.reason == plan.reason for each in leaves)
                if not goes and any(_names(plan, each) for each in self.called_off):
                    self.cancelled += 1
                    continue
                after = (each for each in written[place:] if isinstance(each, records.DrainPlanned))
                changed = any(each.reason == plan.reason for each in after)
                self.expect(not changed, f"{plan} is changed, and nobody has asked for it")
                self.expect(now >= plan.at_s, f"{plan} is over {plan.at_s - now:.1f} s before its time")
                self.carried_out += 1
                for node_id in self._named(plan, (*before, *written[:place])):
                    expected.setdefault(node_id, plan.reason)
        gone = {each.node_id for each in written if isinstance(each, _GOES)}
        for node_id, reason in expected.items():
            self.expect(node_id in gone, f"{node_id} stays, and was to be drained for {reason}")
        for each in leaves:
            if each.reason in self.world.planned_for:
                self.expect(expected.get(each.node_id) == each.reason, f"{each} is in no plan that is due")

    def _named(self, plan: records.DrainPlanned, before: tuple[records.Record, ...]) -> list[str]:
        """Who is here of a plan, and does not leave already, after these records."""
        claims, leaving = dict(self.claims), set(self.leaving)
        for each in before:
            if isinstance(each, records.Admitted):
                claims[each.candidate.node_id] = each.candidate.incarnation
            elif isinstance(each, records.Removed):
                claims.pop(each.node_id, None)
            elif isinstance(each, records.LeavePlanned):
                leaving.add((each.node_id, each.incarnation))
        return [
            node_id
            for node_id, incarnation in claims.items()
            if (node_id in plan.node_ids or self.world.host(node_id) in plan.hosts)
            and (node_id, incarnation) not in leaving
        ]

    def decided(self, decision: Decision) -> None:
        """Notes what one decision is to write."""
        self.made.append(tuple(decision.records))

    def arriving(self, event: events.Event) -> None:
        """Notes what an operator calls off."""
        super().arriving(event)
        if isinstance(event, events.DrainCalledOff):
            self.called_off.append(event)

    def stepped(self, event: events.Event, decision: Decision, *, alone: bool) -> None:
        """Checks that what an operator has said is done."""
        super().stepped(event, decision, alone=alone)
        if isinstance(event, events.DrainCalledOff):
            self.called_off.remove(event)
        if self.outcome is not None or not alone:
            return
        if isinstance(event, events.DrainCalledOff):
            left = [plan for plan in self.plans.values() if _names(plan, event)]
            self.expect(not left, f"{left} are called off, and stay")
        if isinstance(event, events.DrainAsked) and event.at_s > event.unix_s:
            planned = [plan.reason for plan in self.plans.values()]
            self.expect(event.reason in planned, f"{event.reason} is asked for, and not planned")

    def check_indexes(self, job: Job) -> None:
        """Checks also that the scheduler has the plans that are on the disk, and carries them out in time."""
        super().check_indexes(job)
        self.expect(dict(job.ledger.drains) == self.plans, f"it plans {job.ledger.drains}, not {self.plans}")
        scheduler, now = self.world.scheduler, self.world.loop.now
        for plan in self.plans.values():
            since = max(plan.at_s - MIDNIGHT_S, scheduler.up_since, scheduler.paused_until)
            late_s = now - since - scheduler.held_up_since(since)
            self.expect(late_s <= AT_ONCE_S, f"{plan} is {late_s:.1f} s late")


def _names(plan: records.DrainPlanned, event: events.DrainCalledOff) -> bool:
    """Whether an operator calls a plan off, or a part of it."""
    names = {*event.node_ids, *event.hosts}
    return not names or bool(names & {*plan.node_ids, *plan.hosts})


class DrainScheduler(Scheduler):
    """A scheduler that gets to know the time of day, as it comes up."""

    world: DrainWorld

    def _drive(self, records: Sequence[records.Record]) -> None:
        super()._drive(records)
        self.world.judge.called_off.clear()  # what had not been carried out, nobody carries out any more
        self.feed(events.TimeOfDay(MIDNIGHT_S + self.world.loop.now))


class DrainWorld(World):
    """A world in which operators drain hosts and workers.

    Attributes:
        planned_for: the reasons of what was to be drained at a time.
    """

    judge: DrainJudge

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        self.chance = random.Random(f"drains {seed}")
        self.planned_for: set[str] = set()
        super().__init__(seed, trace)
        self.is_apart = False
        scenario = self.scenario
        steps, end = max(scenario.steps, int(14.0 / scenario.step_s)), max(10.0, scenario.fault_end)
        self.scenario = replace(scenario, kind="supervised", steps=steps, fault_end=end)
        self.judge = DrainJudge(self)
        self.scheduler = DrainScheduler(self)

    def run(self) -> None:
        """Plays the seed with what operators say."""
        for number in range(self.chance.choice(PLANS)):
            at = self.chance.uniform(0.5, 0.8 * self.scenario.fault_end)
            self.loop.at(at, self._ask, f"maintenance {number}")
        super().run()

    def _ask(self, reason: str) -> None:
        if not self._answers():
            return  # the command says so, and the operator tries again tomorrow
        numbers = range(self.scenario.worker_num + self.scenario.spares)
        nodes = [self.node(each) for each in self.chance.sample(numbers, min(2, len(numbers)))]
        hosts = sorted({self.host(self.node(each)) for each in numbers})
        asked_hosts = tuple(self.chance.sample(hosts, self.chance.choice((0, 1, min(2, len(hosts))))))
        asked_nodes = tuple(nodes[: self.chance.choice((0, 1, 2))]) if asked_hosts else tuple(nodes[:1])
        now = MIDNIGHT_S + self.loop.now
        at_s = 0.0 if self.chance.random() < 0.2 else now + self.chance.uniform(0.3, 6.0)
        if at_s:
            self.planned_for.add(reason)
            self.loop.at(at_s - MIDNIGHT_S, self.judge.disturbed)
        here = {self.node(each) for each in range(50)}
        self.leavers |= {each for each in here if each in asked_nodes or self.host(each) in asked_hosts}
        self.note(f"!! an operator drains {asked_nodes} {asked_hosts} at {at_s - MIDNIGHT_S:.1f}: {reason}")
        self.judge.disturbed()
        self.scheduler.feed(events.DrainAsked(asked_nodes, asked_hosts, reason, now, at_s))
        if self.chance.random() < 0.4:
            self.loop.after(self.chance.uniform(0.1, 6.0), self._call_off, asked_nodes, asked_hosts)

    def _answers(self) -> bool:
        """Whether a command reaches the scheduler now."""
        scheduler = self.scheduler
        heard = self.loop.now >= max(scheduler.paused_until, scheduler.deaf_until)
        return scheduler.up and heard and self.judge.outcome is None

    def _call_off(self, nodes: tuple[str, ...], hosts: tuple[str, ...]) -> None:
        """All that is planned, or one of the names of a plan, or what was asked for."""
        if not self._answers():
            return
        some = (nodes[:1], hosts[:1]) if self.chance.random() < 0.5 else (nodes, hosts)
        named = ((), ()) if self.chance.random() < 0.2 else some
        self.note(f"!! an operator calls off {named}")
        self.scheduler.feed(events.DrainCalledOff(*named))


def play_drains(seed: int, trace: list[str] | None = None) -> str:
    """Plays one seed; returns what was broken, or "" if all was well."""
    return play(seed, trace, kind=DrainWorld)
