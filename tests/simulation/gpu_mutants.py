"""Planted bugs in what the scheduler remembers of GPUs that have failed a check."""

from __future__ import annotations

from typing import Any

from muster.scheduler.core import events, gpus, joining, leaving, machine, records
from muster.scheduler.core.job import Job
from muster.wire import messages
from tests.simulation.mutants import Mutant, instead, nothing, unrecorded


def believes_the_last_check(right: Any) -> Any:
    return lambda job, event: right(job, event) if event.gpu_fault else None


def trusts_who_comes(right: Any) -> Any:
    return lambda job, event: right(job, event.replaced(gpu_fault=""))


def a_fault_is_any_goodbye(right: Any) -> Any:
    return lambda job, event, now: right(job, event.replaced(gpu_fault=""), now)


def admits_all(right: Any) -> Any:
    def asked(job: Job, event: events.AdmitAsked, now: float) -> None:
        for gpu in list(job.ledger.refused_gpus):
            job.commit(records.GpuAdmitted(gpu))

    return asked


def members_are_refused_too(right: Any) -> Any:
    def come_back(job: Job, event: events.Joined) -> None:
        if event.gpu_uuid in job.ledger.refused_gpus:
            job.outbox.send(event.session, messages.Refused(messages.RefusalCode.GPU_FAILED, "Its GPU."))
        else:
            right(job, event)

    return come_back


def forgets_at_a_restart(right: Any) -> Any:
    def recover(cls: Any, job_id: str, settings: Any, kept: Any, now: float) -> Any:
        recovered = right.__func__(cls, job_id, settings, kept, now)
        recovered.job.ledger.refused_gpus.clear()
        return recovered

    return classmethod(recover)


GPU_MUTANTS: dict[str, Mutant] = {
    "a GPU that has failed gets a place": Mutant(gpus, "check", trusts_who_comes),
    "what failed once may pass": Mutant(gpus, "check", believes_the_last_check),
    "who is refused is not remembered": Mutant(gpus, "remember", instead(nothing)),
    "refused GPUs are not recorded": Mutant(Job, "commit", unrecorded(records.GpuRefused)),
    "a restart forgets them": Mutant(machine.Machine, "recover", forgets_at_a_restart),
    "what fails in a member is not remembered": Mutant(leaving, "left", a_fault_is_any_goodbye),
    "members are refused too": Mutant(joining, "_come_back", members_are_refused_too, 193),
    "an operator admits nobody": Mutant(gpus, "admit_asked", instead(nothing)),
    "an operator admits all": Mutant(gpus, "admit_asked", admits_all),
    "admissions are not recorded": Mutant(Job, "commit", unrecorded(records.GpuAdmitted)),
}
