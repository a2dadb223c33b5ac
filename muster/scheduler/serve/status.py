"""Encodes the replies to Status, Jobs and Stacks."""

from __future__ import annotations

from collections.abc import Iterable

from muster.scheduler.core.events import Bundle
from muster.scheduler.core.views import JobView, WorkerView
from muster.wire.codec import to_proto
from muster.wire.v1 import rendezvous_pb2 as pb


def encode_status(view: JobView, *, uptime_s: float, version: str, leader: str = "") -> bytes:
    """Encodes a job as a serialized StatusReply."""
    return pb.StatusReply(
        job_id=view.job_id,
        state=view.state,
        generation=view.generation,
        worker_num=view.worker_num,
        worker_min=view.worker_min,
        workers=[_worker_status(worker) for worker in view.workers],
        missing=view.missing,
        reason=view.reason,
        uptime_s=uptime_s,
        version=version,
        leader=leader,
        nccl_traffic=view.nccl_traffic,
        copies=to_proto(view.copies),
        stragglers=to_proto(view.stragglers),
        evidence=view.evidence,
        drains=to_proto(view.drains),
        seconds_by_cause=dict(view.time_by_cause),
        numbers=dict(view.numbers),
        steps=view.steps,
        remaining_s=view.remaining_s,
        epoch=view.epoch,
        epochs=view.epochs,
        refused_gpus=to_proto(view.refused_gpus),
    ).SerializeToString()


def encode_stacks(bundle: Bundle) -> bytes:
    """Encodes workers' stacks as a serialized StacksReply."""
    return pb.StacksReply(
        workers=[
            pb.WorkerStacks(
                node_id=each.candidate.node_id,
                rank=each.rank,
                host_name=each.candidate.host.name,
                text=each.stacks,
                obstacle=each.obstacle,
            )
            for each in bundle.ranks
        ]
    ).SerializeToString()


def encode_jobs(views: Iterable[JobView], *, version: str) -> bytes:
    """Encodes summaries of jobs as a serialized JobsReply."""
    return pb.JobsReply(jobs=[_summary(view) for view in views], version=version).SerializeToString()


def _summary(view: JobView) -> pb.JobSummary:
    ranked = [worker for worker in view.workers if worker.rank >= 0]
    return pb.JobSummary(
        job_id=view.job_id,
        state=view.state,
        generation=view.generation,
        members=len(ranked),
        worker_num=view.worker_num,
        step=max((worker.step for worker in ranked), default=0),
    )


def _worker_status(worker: WorkerView) -> pb.WorkerStatus:
    candidate = worker.candidate
    return pb.WorkerStatus(
        node_id=candidate.node_id,
        host_name=candidate.host.name,
        host_id=candidate.host.id,
        rank=worker.rank,
        local_rank=worker.local_rank,
        device=to_proto(candidate.device),
        silent_s=worker.silent_s,
        step=worker.step,
        samples_per_s=worker.samples_per_s,
        state=worker.state,
        topology=candidate.host.topology,
        address=candidate.host.address,
        last_collective=to_proto(worker.last_collective),
        pid=worker.pid,
        loss=worker.loss,
        snapshot=to_proto(worker.snapshot),
        checkpoint=to_proto(worker.checkpoint),
        shares=to_proto(worker.shares),
        gpu=to_proto(worker.gpu),
        gpu_age_s=worker.gpu_age_s,
    )
