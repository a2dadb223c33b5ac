"""A job and its workers as ``status`` shows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from muster.scheduler.core.drains import planned_of
from muster.scheduler.core.gpus import refused_of
from muster.scheduler.core.holdups import stragglers_of
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import Claim, Ledger, Phase, natural_key
from muster.scheduler.core.members import Contact
from muster.scheduler.core.sentences import state_reason
from muster.wire import messages

ReportT = TypeVar("ReportT", messages.SnapshotReport, messages.CheckpointReport)


class WorkerView(NamedTuple):
    """One worker as ``status`` shows it; ``rank`` and ``local_rank`` are -1 if it has none."""

    candidate: messages.Candidate
    state: str
    rank: int
    local_rank: int
    silent_s: float
    step: int
    samples_per_s: float
    last_collective: messages.Collective | None = None
    loss: float | None = None
    pid: int = 0
    learning_rate: float | None = None
    snapshot: messages.SnapshotReport | None = None
    checkpoint: messages.CheckpointReport | None = None
    shares: messages.StepShares | None = None
    gpu: messages.GpuReport | None = None
    gpu_age_s: float = 0.0
    numbers: tuple[tuple[str, float], ...] = ()
    steps: int = 0
    epoch: int = 0
    epochs: int = 0


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as ``status`` shows it. ``state``: forming, building, running, quiescing, suspended, ended.

    ``nccl_traffic``: NCCL's traffic between hosts, sealed or plain; empty if NCCL is not known to be used.
    ``evidence``: which evidence of the last hang there is, and where it is stored (known to the driver);
    empty if there is none. ``steps``: the total number of steps. ``remaining_s``: how long the remaining
    steps take at the current pace, in seconds. ``epoch``: the epoch of the member that is furthest behind,
    counted from 1. ``epochs``: the total number of epochs. These four are 0 if not known.
    """

    job_id: str
    state: str
    generation: int
    worker_num: int
    worker_min: int
    workers: tuple[WorkerView, ...]
    missing: tuple[str, ...]
    reason: str
    nccl_traffic: str = ""
    copies: messages.JobCopies = field(default_factory=messages.JobCopies)
    stragglers: tuple[messages.Straggler, ...] = ()
    evidence: str = ""
    drains: tuple[messages.PlannedDrain, ...] = ()
    time_by_cause: tuple[tuple[str, float], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    steps: int = 0
    remaining_s: float = 0.0
    epoch: int = 0
    epochs: int = 0
    refused_gpus: tuple[messages.RefusedGpu, ...] = ()


def _worker_view(ledger: Ledger, claim: Claim, contact: Contact, now: float, *, awaited: bool) -> WorkerView:
    """One worker; ``awaited``: its group is being built, and it has not reported that it has built it yet."""
    node_id = claim.candidate.node_id
    rank = ledger.rank_of(node_id)
    local_rank = ledger.formed.members[rank].local_rank if ledger.formed is not None and rank >= 0 else -1
    return WorkerView(
        candidate=claim.candidate,
        state=_state(ledger, claim, contact, rank, awaited=awaited),
        rank=rank,
        local_rank=local_rank,
        silent_s=max(0.0, now - contact.last_heard),
        step=contact.step,
        samples_per_s=contact.samples_per_s,
        last_collective=contact.recent[-1] if contact.recent else None,
        loss=contact.loss,
        pid=contact.pid,
        learning_rate=contact.learning_rate,
        snapshot=_aged(contact.snapshot, now - contact.last_heard),
        checkpoint=_aged(contact.checkpoint, now - contact.last_heard),
        gpu=contact.gpu,
        gpu_age_s=max(0.0, now - contact.gpu_at) if contact.gpu is not None else 0.0,
        numbers=contact.numbers,
        steps=contact.steps,
        epoch=contact.epoch,
        epochs=contact.epochs,
    )


def _aged(report: ReportT | None, seconds: float) -> ReportT | None:
    """A worker's report with its age added to the times in it."""
    return None if report is None else report.replaced(age_s=report.age_s + max(0.0, seconds))


def _copies(job: Job, workers: Sequence[WorkerView], now: float) -> messages.JobCopies:
    written = [(worker.checkpoint.age_s, worker) for worker in workers if worker.checkpoint is not None]
    _, writer = min(written, key=lambda each: each[0], default=(0.0, None))
    checkpoint = None if writer is None else writer.checkpoint
    rank = -1 if writer is None else writer.rank
    word = job.snapshots.word
    if word is None or word.complete < 0:
        return messages.JobCopies(checkpoint=checkpoint, checkpoint_rank=rank)
    kept = [worker.snapshot for worker in workers if worker.rank >= 0 and worker.snapshot is not None]
    return messages.JobCopies(
        word.complete,
        max(0.0, now - job.snapshots.taken_at),
        sum(report.size_bytes for report in kept),
        max((report.seconds for report in kept), default=0.0),
        checkpoint,
        rank,
    )


def _state(ledger: Ledger, claim: Claim, contact: Contact, rank: int, *, awaited: bool) -> str:
    if contact.session is None:
        return "lost"
    if claim.leaving is not None:
        return "leaving"
    if rank < 0:
        return "spare" if ledger.is_spare(claim) else "waiting"
    return "building" if awaited else "member"


def job_view(job: Job, now: float) -> JobView:
    """The job: members by rank, then waiting workers."""
    ledger = job.ledger
    waiting = sorted(ledger.unplaced, key=natural_key)
    claims = itertools.chain(ledger.living_members(), (ledger.claims[node_id] for node_id in waiting))
    built, by_node, building = job.current.built, job.members.by_node, ledger.phase is Phase.BUILDING
    workers = []
    for claim in claims:
        node_id = claim.candidate.node_id
        awaited = building and node_id not in built
        view = _worker_view(ledger, claim, by_node[node_id], now, awaited=awaited)
        workers.append(view._replace(shares=job.stragglers.shares(node_id)))
    return JobView(
        job_id=job.job_id,
        state=job.phase.value,
        generation=ledger.generation,
        worker_num=job.needed,
        worker_min=ledger.opened.worker_min if ledger.opened else job.settings.worker_min,
        workers=tuple(workers),
        missing=job.missing(),
        reason=state_reason(job),
        nccl_traffic=nccl_traffic(workers),
        copies=_copies(job, workers, now),
        stragglers=stragglers_of(job, now),
        drains=planned_of(job),
        time_by_cause=job.goodput.seconds(now),
        numbers=mean_numbers(workers),
        steps=max((worker.steps for worker in workers), default=0),
        remaining_s=_remaining_s(job, workers),
        epoch=min((worker.epoch for worker in workers if worker.rank >= 0 and worker.epoch), default=0),
        epochs=max((worker.epochs for worker in workers), default=0),
        refused_gpus=refused_of(job),
    )


def _remaining_s(job: Job, workers: Iterable[WorkerView]) -> float:
    """Returns the time of the remaining steps at the pace of the last ones, in seconds; 0 if unknown."""
    step_s = job.stragglers.step_s()
    ranked = [worker for worker in workers if worker.rank >= 0]
    if step_s is None or not ranked or job.phase is not Phase.RUNNING:
        return 0.0
    left = max(worker.steps for worker in ranked) - min(worker.step for worker in ranked)
    return max(0, left) * step_s


def mean_numbers(workers: Iterable[WorkerView]) -> tuple[tuple[str, float], ...]:
    """The scripts' own numbers by name, in order: the mean of each over the ranks that report it.

    So it does not matter whether one rank reports a number or all do. There are at most as many numbers as
    one rank may report.
    """
    given: dict[str, list[float]] = {}
    for worker in workers:
        if worker.rank >= 0:
            for name, value in worker.numbers:
                given.setdefault(name, []).append(value)
    names = sorted(given)[: messages.MAX_NUMBERS]
    return tuple((name, sum(value / len(given[name]) for value in given[name])) for name in names)


def nccl_traffic(workers: Iterable[WorkerView]) -> str:
    """Whether a job's NCCL traffic between hosts is sealed.

    All workers have the same setting, or would be refused.
    """
    for worker in workers:
        candidate, facts = worker.candidate, dict(worker.candidate.facts)
        if facts.get(messages.NCCL_FACT) in messages.NCCL_WORDS:
            return facts[messages.NCCL_FACT]
        if messages.NCCL_VERSION_FACT in facts or (
            candidate.backend == "torch" and candidate.device.kind == "cuda"
        ):
            return messages.PLAIN
    return ""
