"""Planted bugs of several schedulers; ``python -m tests.simulation --schedulers --mutants``."""

from __future__ import annotations

import asyncio
from typing import Any

from muster.scheduler.core import events, leaving, machine
from muster.scheduler.core.events import Decision
from muster.scheduler.etcd.api import EtcdUnreachableError, created_in
from muster.scheduler.etcd.journal import EtcdJournal
from muster.scheduler.etcd.leadership import Leadership
from muster.scheduler.jobs.adoption import AdoptingJob
from muster.scheduler.jobs.driver import JobDriver
from muster.wire.v1 import etcd_pb2 as pb
from muster.worker.session.schedulers import Turns
from tests.simulation.mutants import Mutant, instead, no_grace, nothing, sends_first


def always(self: Leadership) -> pb.Compare:
    return created_in(b"/never", 0)


def by_name(self: Leadership) -> pb.Compare:
    equal, value = pb.Compare.CompareResult.EQUAL, pb.Compare.CompareTarget.VALUE
    return pb.Compare(result=equal, target=value, key=self.key, value=self.name.encode())


async def asks_again_for_less(self: EtcdJournal, request: pb.TxnRequest) -> pb.TxnResponse:
    """Compares only the first time."""
    while True:
        try:
            return await self._etcd.transact(request)
        except EtcdUnreachableError:
            if self._leadership.deposed.done():
                raise
            # A late copy of the first may be carried out as well.
            request = pb.TxnRequest(success=request.success, failure=request.failure)
            await asyncio.sleep(0.1)


async def believes_in_its_key(self: Leadership) -> bool:
    return True


def records_alone(right: Any) -> Any:
    async def persist(self: JobDriver, stepped: Any) -> None:
        records = [record for _, decision in stepped for record in decision.records]
        if records:
            await self.make_durable(records)

    return persist


def the_last_one_first(self: Turns) -> list[int]:
    begin = max(0, self._found)
    return [begin] * self._count


def reads_too_early(right: Any) -> Any:
    """What the journal says is read before this process leads."""

    async def load(self: EtcdJournal) -> Any:
        found = await right(self)
        return {job: records[:-1] for job, records in found.items() if len(records) > 1}

    return load


def waits_too_long(right: Any) -> Any:
    def recover(cls: type[machine.Machine], job_id: str, settings: Any, records: Any, now: float) -> Any:
        recovered = right.__func__(cls, job_id, settings, records, now)
        recovered.job.members.not_before += 3.0
        for contact in recovered.job.members.by_node.values():
            contact.last_heard = recovered.job.members.not_before
        return recovered

    return classmethod(recover)


def expels_who_is_heard(job: Any, event: events.ProcessEnded, now: float) -> None:
    claim = job.ledger.claims.get(event.node_id)
    if claim is not None and claim.candidate.incarnation == event.incarnation and job.phase.value != "ended":
        job.lose(event.node_id, f"is lost: its launcher says that it {event.detail}")


def expels_any_incarnation(job: Any, event: events.ProcessEnded, now: float) -> None:
    claim = job.ledger.claims.get(event.node_id)
    if claim is not None and job.phase.value != "ended" and job.members.session_of(event.node_id) is None:
        job.lose(event.node_id, f"is lost: its launcher says that it {event.detail}")


def counts_only_while_somebody_is_here(right: Any) -> Any:
    def step(self: AdoptingJob, event: events.Event, now: float, *, more: bool = False) -> Decision:
        if isinstance(event, events.ProcessEnded) and not self.machine.job.members.nodes:
            return Decision()
        decision: Decision = right(self, event, now, more=more)
        return decision

    return step


CLUSTER_MUTANTS: dict[str, Mutant] = {
    "no fence": Mutant(Leadership, "fence", instead(always)),
    "fence by name": Mutant(Leadership, "fence", instead(by_name), seed=110),
    "final words without a fence": Mutant(JobDriver, "persist", records_alone, seed=552),
    "messages before the commit": Mutant(JobDriver, "persist", sends_first),
    "retry without compare": Mutant(EtcdJournal, "_answer", instead(asks_again_for_less)),
    "no grace after a takeover": Mutant(machine.Machine, "recover", no_grace),
    "too much grace after a takeover": Mutant(machine.Machine, "recover", waits_too_long),
    "a leader whose key is gone stays": Mutant(Leadership, "_key_stands", instead(believes_in_its_key)),
    "stale address first": Mutant(Turns, "order", instead(the_last_one_first)),
    "a launcher's word is not taken": Mutant(leaving, "process_ended", instead(nothing), seed=105),
    "a launcher's word expels who is heard": Mutant(leaving, "process_ended", instead(expels_who_is_heard)),
    "a launcher's word counts for any incarnation": Mutant(
        leaving, "process_ended", instead(expels_any_incarnation)
    ),
    "a launcher's word counts only while somebody is here": Mutant(
        AdoptingJob, "step", counts_only_while_somebody_is_here, seed=973000535
    ),
    "the last record is not read": Mutant(EtcdJournal, "load", reads_too_early),
}
