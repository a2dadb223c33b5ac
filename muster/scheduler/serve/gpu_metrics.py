"""The metrics of the ranks' GPUs that the driver reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from muster.scheduler.core.views import JobView
    from muster.wire.messages import GpuReport

_MB = 1_000_000
_FIGURES: tuple[tuple[str, str, Callable[[GpuReport], int | None]], ...] = (
    ("busy_percent", "Of the time in which a kernel ran on the rank's GPU.", lambda gpu: gpu.busy_percent),
    ("memory_used_bytes", "Of the GPU's memory.", lambda gpu: _bytes(gpu.used_mb)),
    ("memory_bytes", "Of the GPU's memory in all.", lambda gpu: _bytes(gpu.total_mb)),
    ("clock_mhz", "Of its multiprocessors.", lambda gpu: gpu.clock_mhz),
    ("celsius", "Its temperature.", lambda gpu: gpu.celsius),
    ("ecc_errors", "Uncorrected, since the driver was loaded.", lambda gpu: gpu.uncorrected_errors),
    ("nvlink_errors", "Replays and recoveries since the driver was loaded.", lambda gpu: gpu.nvlink_errors),
    ("remapped_rows", "Rows of its memory that were replaced.", lambda gpu: gpu.remapped_rows),
)
"""Each metric: its name, its meaning, and a function that returns its value; None if the driver does not
report it.
"""


def gpu_metrics(views: Sequence[JobView]) -> Iterator[Metric]:
    """Returns the metric families. A rank whose GPU is unknown has no samples."""
    refused = GaugeMetricFamily(
        "muster_gpus_refused", "GPUs that failed a check and were not admitted since.", labels=["job"]
    )
    for view in views:
        refused.add_metric([view.job_id], len(view.refused_gpus))
    yield refused
    known = [
        (view.job_id, str(worker.rank), worker.gpu)
        for view in views
        for worker in view.workers
        if worker.rank >= 0 and worker.gpu is not None
    ]
    for name, meaning, figure in _FIGURES:
        family = GaugeMetricFamily(f"muster_gpu_{name}", meaning, labels=["job", "rank"])
        for job_id, rank, gpu in known:
            value = figure(gpu)
            if value is not None:
                family.add_metric([job_id, rank], value)
        yield family
    unwell = GaugeMetricFamily(
        "muster_gpu_unwell",
        "1 where the driver's numbers speak against the rank's GPU; none: they do not.",
        labels=["job", "rank", "state"],
    )
    for job_id, rank, gpu in known:
        if gpu.state != "well":
            unwell.add_metric([job_id, rank, gpu.state], 1.0)
    yield unwell


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes * _MB
