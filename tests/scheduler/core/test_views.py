"""What of a job is shown besides its members' places."""

from __future__ import annotations

import pytest

from muster.scheduler.core import events
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.views import WorkerView, nccl_traffic
from muster.wire import messages
from tests.scheduler.core.scenes import running
from tests.scheduler.fakes import candidate

GPU = messages.Device("cuda", 0)


def worker(backend: str = "nccl", device: messages.Device = GPU, **facts: str) -> WorkerView:
    made = candidate(backend=backend, device=device, facts=tuple(sorted(facts.items())))
    return WorkerView(made, "member", 0, 0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("workers", "traffic"),
    [
        ([], ""),
        ([worker("tcp", messages.Device())], ""),
        ([worker("tcp", MS_NCCL_ENCRYPTION="require")], ""),
        ([worker(nccl="2.28.9")], "plain"),
        ([worker("torch")], "plain"),
        ([worker("torch", messages.Device())], ""),
        ([worker("torch", messages.Device(), nccl_traffic="sealed")], "sealed"),
        ([worker(nccl="2.28.9", nccl_traffic="sealed")] * 2, "sealed"),
        ([worker(nccl="2.28.9", nccl_traffic="plain")], "plain"),
        ([worker(nccl="2.28.9", nccl_traffic="<b>")], "plain"),
    ],
)
def test_what_nccl_s_traffic_is_between_hosts(workers: list[WorkerView], traffic: str) -> None:
    assert nccl_traffic(workers) == traffic


REPORT = messages.SnapshotReport(1, -1, 10, True, age_s=2.0, size_bytes=1000, seconds=0.5, partners=(1,))


def told(
    job: Machine,
    session: int,
    report: messages.SnapshotReport | None,
    checkpoint: messages.CheckpointReport | None = None,
) -> None:
    beat = events.Heard(session, 1, 12, 13, 1.0, (), 1, snapshot=report, checkpoint=checkpoint)
    job.step(beat, 1.0)


def test_a_job_that_takes_no_snapshots_shows_none() -> None:
    job, _ = running()
    assert job.view(1.0).copies == messages.JobCopies()
    assert job.view(1.0).workers[0].snapshot is None


def test_the_snapshot_that_counts_is_shown_with_its_age_and_all_its_parts() -> None:
    job, _ = running()
    told(job, 1, REPORT)
    assert job.view(2.0).copies.snapshot_step is None, "one has told, the other has not"
    told(job, 2, REPORT.replaced(size_bytes=500, seconds=0.75, age_s=1.5))
    copies = job.view(4.0).copies
    assert (copies.snapshot_step, copies.snapshot_bytes, copies.snapshot_seconds) == (10, 1500, 0.75)
    assert copies.snapshot_age_s == 4.5


def test_a_workers_snapshot_grows_older_since_it_was_heard() -> None:
    job, _ = running()
    told(job, 1, REPORT)
    shown = job.view(4.0).workers[0].snapshot
    assert shown == REPORT.replaced(age_s=5.0)


def test_the_newest_checkpoint_is_shown_with_who_wrote_it() -> None:
    job, _ = running()
    told(job, 1, None, messages.CheckpointReport(5, 60.0, 1000, 2.0))
    told(job, 2, None, messages.CheckpointReport(7, 10.0, 1000, 2.0))
    copies = job.view(3.0).copies
    assert copies.checkpoint == messages.CheckpointReport(7, 12.0, 1000, 2.0) and copies.checkpoint_rank == 1
