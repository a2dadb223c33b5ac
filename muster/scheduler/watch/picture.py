"""A job's state for operators, which is computed and encoded once for all watchers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from muster.scheduler.core import events
from muster.scheduler.core.views import JobView
from muster.scheduler.jobs.driver import JobDriver
from muster.scheduler.jobs.stream import OutgoingStream
from muster.wire.codec import to_proto
from muster.wire.v1 import rendezvous_pb2 as rendezvous_pb
from muster.wire.v1 import watch_pb2 as pb


class Picture:
    """A job's state when it was last computed.

    When a part has changed, it gets a new number. The roster, which is large, changes only when the job's
    workers, their ranks or their states do.

    Args:
        driver: the driver of the job.
        began: when the job began, in seconds since 1970.

    Attributes:
        line: the summary of the job.
        roster: the serialized roster, with its number.
        progress: the serialized columns of numbers for the newest roster, with their number.
    """

    def __init__(self, driver: JobDriver, began: float) -> None:
        self.driver = driver
        self.line = pb.JobLine(job_id=driver.job_id, began=began)
        self.roster: tuple[int, bytes] = (0, b"")
        self.progress: tuple[int, bytes] = (0, b"")
        self._began = began
        self._seats: list[tuple[object, ...]] | None = None
        self._missing: tuple[str, ...] = ()

    def look(self) -> None:
        """Computes the job's present state."""
        view = self.driver.view()
        seats: list[tuple[object, ...]] = [
            (w.candidate, w.rank, w.local_rank, w.state, w.pid) for w in view.workers
        ]
        if seats != self._seats or view.missing != self._missing:
            self._seats, self._missing = seats, view.missing
            number = self.roster[0] + 1
            roster = _roster(number, view, self.driver.sessions)
            self.roster = (number, pb.WatchReply(roster=roster).SerializeToString())
        self.line = _line(view, self._began)
        progress = pb.WatchReply(progress=_progress(self.roster[0], self.line, view))
        data = progress.SerializeToString()
        if data != self.progress[1]:
            self.progress = (self.progress[0] + 1, data)


def began_at(driver: JobDriver, now: Callable[[], float] = time.time) -> float:
    """Returns when a job's first worker joined this scheduler process, in seconds since 1970.

    Returns the present time if none has joined yet, as after recovery from a journal.
    """
    first = driver.counters.first_join_s
    return now() - (driver.clock.time() - first if first is not None else 0.0)


def _line(view: JobView, began: float) -> pb.JobLine:
    ranked = [worker for worker in view.workers if worker.rank >= 0]
    return pb.JobLine(
        job_id=view.job_id,
        state=view.state,
        generation=view.generation,
        members=len(ranked),
        worker_num=view.worker_num,
        worker_min=view.worker_min,
        missing=max(0, view.worker_num - len(ranked)) if view.state != "ended" else 0,
        step=min((worker.step for worker in ranked), default=0),
        furthest=max((worker.step for worker in ranked), default=0),
        samples_per_s=sum(worker.samples_per_s for worker in ranked),
        loss=_mean([worker.loss for worker in ranked]),
        learning_rate=next((w.learning_rate for w in ranked if w.learning_rate is not None), None),
        began=began,
        reason=view.reason,
        nccl_traffic=view.nccl_traffic,
        evidence=view.evidence,
        numbers=dict(view.numbers),
        steps=view.steps,
        remaining_s=view.remaining_s,
        epoch=view.epoch,
        epochs=view.epochs,
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _roster(number: int, view: JobView, sessions: Mapping[events.SessionId, OutgoingStream]) -> pb.Roster:
    certificates = {
        session.candidate.node_id: session.caller.certificate
        for session in sessions.values()
        if session.candidate is not None and session.caller.certificate is not None
    }
    roster = pb.Roster(number=number, missing=view.missing)
    for worker in view.workers:
        candidate, host, device = worker.candidate, worker.candidate.host, worker.candidate.device
        seat = roster.seats.add(
            node_id=candidate.node_id,
            host_name=host.name,
            host_id=host.id,
            address=host.address,
            topology=host.topology,
            device=rendezvous_pb.Device(
                kind=device.kind, index=device.index, pci_bus_id=device.pci_bus_id, model=device.model
            ),
            rank=worker.rank,
            local_rank=worker.local_rank,
            state=worker.state,
            pid=worker.pid,
        )
        certificate = certificates.get(candidate.node_id)
        if certificate is not None:
            seat.certificate_ends = certificate.not_after.timestamp()
            seat.fingerprint = certificate.fingerprint
    return roster


def _progress(roster: int, line: pb.JobLine, view: JobView) -> pb.Progress:
    workers = view.workers
    calls: dict[tuple[str, str, str, int], int] = {}
    last = [worker.last_collective for worker in workers]
    call = [
        0 if c is None else calls.setdefault((c.name, c.group, c.dtype, c.size_bytes), len(calls) + 1)
        for c in last
    ]
    return pb.Progress(
        roster=roster,
        job=line,
        step=[worker.step for worker in workers],
        silent_s=[worker.silent_s for worker in workers],
        samples_per_s=[worker.samples_per_s for worker in workers],
        loss=[math.nan if worker.loss is None else worker.loss for worker in workers],
        call=call,
        sequence=[0 if c is None else c.sequence for c in last],
        done=[c is not None and c.done for c in last],
        calls=[
            rendezvous_pb.Collective(name=name, group=group, dtype=dtype, size_bytes=size)
            for name, group, dtype, size in calls
        ],
        copies=to_proto(view.copies),
        seat_copies=[
            pb.SeatCopies(
                seat=seat, snapshot=to_proto(worker.snapshot), checkpoint=to_proto(worker.checkpoint)
            )
            for seat, worker in enumerate(workers)
            if worker.snapshot is not None or worker.checkpoint is not None
        ],
        gpus=[
            pb.SeatGpu(seat=seat, gpu=to_proto(worker.gpu))
            for seat, worker in enumerate(workers)
            if worker.gpu is not None
        ],
        refused_gpus=to_proto(view.refused_gpus),
        stragglers=to_proto(view.stragglers),
        seconds_by_cause=dict(view.time_by_cause),
        drains=to_proto(view.drains),
        computed_s=[worker.shares.computed if worker.shares else 0.0 for worker in workers],
        waited_s=[worker.shares.waited if worker.shares else 0.0 for worker in workers],
        data_s=[worker.shares.data if worker.shares else 0.0 for worker in workers],
    )
