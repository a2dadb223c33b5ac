"""Keeps each worker's last report on its GPU, logs faults, and refuses GPUs that have failed a check.

A GPU that has failed a check is refused until an operator admits it, whatever a later check finds.
"""

from __future__ import annotations

from muster.scheduler.core import events, records
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import Phase, count, listing, named_first, upper_first
from muster.wire import messages

WELL, SUSPECT, ILL = "well", "suspect", "ill"
_RANK = {WELL: 0, SUSPECT: 1, ILL: 2}

SAY_AGAIN_S = 600.0
"""After this many seconds a GPU's fault is logged again if the GPU was healthy in between."""


def heard(job: Job, node_id: str, report: messages.GpuReport, now: float) -> None:
    """Stores a worker's report on its GPU; logs it if the GPU's state has become worse."""
    contact = job.members.by_node[node_id]
    before = contact.gpu.state if contact.gpu is not None else WELL
    contact.gpu, contact.gpu_at = report, now
    state, said_at = job.told_gpus.get(node_id, (WELL, now - SAY_AGAIN_S))
    if _RANK[report.state] > _RANK[before] and (
        _RANK[report.state] > _RANK[state] or now >= said_at + SAY_AGAIN_S
    ):
        job.told_gpus[node_id] = (report.state, now)
        job.outbox.mention(f"Warning: {warning(job.name(node_id), report)}")


# ---------------------------------------------------------------- refused, and admitted again

MOST_REFUSED = 4096
"""The most refused GPUs of one job that are remembered."""


def name_of(candidate: messages.Candidate, uuid: str) -> str:
    """The name under which a worker's GPU is remembered: its uuid, else host and index.

    Empty if it has none.
    """
    if uuid:
        return uuid
    device = candidate.device
    return f"{candidate.host.name}/{device.index}" if device.kind == "cuda" and device.index >= 0 else ""


def check(job: Job, event: events.Joined) -> messages.Refused | None:
    """Refuses a new worker whose GPU has failed a check, now or earlier; None if the GPU may be used."""
    candidate, gpu = event.candidate, name_of(event.candidate, event.gpu_uuid)
    if event.gpu_fault:
        remember(job, candidate, event.gpu_uuid, event.gpu_fault)
        failed = f"has failed its check: {event.gpu_fault.rstrip('.')}"
    elif gpu in job.ledger.refused_gpus:
        known = job.ledger.refused_gpus[gpu]
        failed = f"failed a check before, under node {known.node_id}: {known.reason}"
    else:
        return None
    which = f"its GPU {gpu}" if gpu else "its GPU"
    return messages.Refused(
        messages.RefusalCode.GPU_FAILED,
        f"{named_first(candidate)} has no place: {which} {failed}. Reset or replace it, then let it in again:"
        f" muster admit {candidate.host.name}.",
    )


def remember(job: Job, candidate: messages.Candidate, uuid: str, fault: str) -> None:
    """Records that a worker's GPU has failed a check."""
    gpu, refused = name_of(candidate, uuid), job.ledger.refused_gpus
    if not gpu or gpu in refused:
        return
    if len(refused) >= MOST_REFUSED:
        job.outbox.mention(f"{MOST_REFUSED} GPUs are refused already: {gpu} is not remembered; admit some.")
        return
    reason = fault.rstrip(".")
    job.commit(records.GpuRefused(gpu, candidate.host, candidate.node_id, candidate.device.index, reason))
    job.outbox.mention(f"GPU {gpu} of host {candidate.host.name} is refused from now on: {reason}.")


def admit_asked(job: Job, event: events.AdmitAsked, now: float) -> None:
    """Lets refused GPUs in again, for an operator."""
    if job.phase is Phase.ENDED:
        job.outbox.mention(f"Job {job.job_id} has ended.")
        return
    found = [each for each in refused_of(job) if event.name in each.names()]
    for each in found:
        job.commit(records.GpuAdmitted(each.gpu))
    if not found:
        job.outbox.mention(f"No GPU of {event.name} is refused.")
        return
    which = listing([f"{each.gpu} of host {each.host_name}" for each in found])
    job.outbox.mention(f"{count(len(found), 'GPU')} may be used again: {which}. Start the workers there.")


def refused_of(job: Job) -> tuple[messages.RefusedGpu, ...]:
    """The refused GPUs, in the order in which they failed."""
    return tuple(
        messages.RefusedGpu(
            each.gpu,
            each.host.name,
            each.host.id,
            each.host.address,
            each.node_id,
            each.device_index,
            each.reason,
        )
        for each in job.ledger.refused_gpus.values()
    )


# ---------------------------------------------------------------- in words


def warning(who: str, report: messages.GpuReport) -> str:
    """A sentence saying that a worker's GPU has a fault."""
    return f"{upper_first(who)}: its GPU is {report.state}: {'; '.join(report.reasons)}."
