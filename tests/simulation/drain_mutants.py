"""Planted bugs in drains of hosts and workers."""

from __future__ import annotations

from typing import Any

from muster.scheduler.core import drains, events, machine, records
from muster.scheduler.core.job import Job
from tests.simulation.mutants import Mutant, instead, nothing, unrecorded


def one_of_them(right: Any) -> Any:
    return lambda job, node_ids, hosts: right(job, node_ids, hosts)[:1]


def nodes_alone(right: Any) -> Any:
    return lambda job, node_ids, hosts: right(job, node_ids, ())


def everybody(right: Any) -> Any:
    return lambda job, node_ids, hosts: right(job, tuple(job.ledger.claims), hosts)


def a_second_too_soon(right: Any) -> Any:
    def due(job: Job) -> float | None:
        at = right(job)
        return None if at is None else at - 1.0

    return due


def two_seconds_too_late(right: Any) -> Any:
    def due(job: Job) -> float | None:
        at = right(job)
        return None if at is None else at + 2.0

    return due


def calls_off_whole_plans_alone(right: Any) -> Any:
    def called_off(job: Job, event: events.DrainCalledOff, now: float) -> None:
        plans = job.ledger.drains.values()
        whole = [p for p in plans if (p.node_ids, p.hosts) == (event.node_ids, event.hosts)]
        if whole or not (event.node_ids or event.hosts):
            right(job, event, now)

    return called_off


def calls_off_everything(right: Any) -> Any:
    return lambda job, event, now: right(job, events.DrainCalledOff(), now)


def forgets_at_a_restart(right: Any) -> Any:
    def recover(cls: Any, job_id: str, settings: Any, kept: Any, now: float) -> Any:
        recovered = right.__func__(cls, job_id, settings, kept, now)
        recovered.job.ledger.drains.clear()
        return recovered

    return classmethod(recover)


DRAIN_MUTANTS: dict[str, Mutant] = {
    "plans are not recorded": Mutant(Job, "commit", unrecorded(records.DrainPlanned)),
    "what is over is not recorded": Mutant(Job, "commit", unrecorded(records.DrainOver)),
    "a restart forgets plans": Mutant(machine.Machine, "recover", forgets_at_a_restart),
    "a restart does not know the time of day": Mutant(drains, "time_of_day", instead(nothing)),
    "plans are never carried out": Mutant(drains, "tend", instead(nothing)),
    "plans come too soon": Mutant(drains, "due", a_second_too_soon),
    "plans come too late": Mutant(drains, "due", two_seconds_too_late),
    "one of several goes": Mutant(drains, "targets", one_of_them),
    "hosts stay": Mutant(drains, "targets", nodes_alone),
    "all go": Mutant(drains, "targets", everybody),
    "nothing is called off": Mutant(drains, "called_off", instead(nothing)),
    "a part of a plan is not called off": Mutant(drains, "called_off", calls_off_whole_plans_alone),
    "others' plans are called off": Mutant(drains, "called_off", calls_off_everything),
}
