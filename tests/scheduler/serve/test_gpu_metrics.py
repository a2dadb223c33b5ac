"""The ranks' GPUs as metrics."""

from __future__ import annotations

from muster.scheduler.core.views import JobView, WorkerView
from muster.scheduler.serve.gpu_metrics import gpu_metrics
from muster.wire import messages
from tests.scheduler.core.scenes import join


def worker(rank: int, gpu: messages.GpuReport | None) -> WorkerView:
    return WorkerView(join(1, f"n{rank}").candidate, "member", rank, rank, 0.0, 1, 1.0, gpu=gpu)


def test_what_the_driver_tells_stands_beside_its_rank_and_nothing_else() -> None:
    gpus = (
        messages.GpuReport("well", (), 97, 10_000, 80_000, celsius=60),
        messages.GpuReport("ill", ("Xid 79",)),
        None,
    )
    workers = tuple(worker(rank, gpu) for rank, gpu in enumerate(gpus))
    spare = worker(-1, gpus[0])
    refused = messages.RefusedGpu("GPU-1", "gpu-17", "id", "", "n9", 3, "7 words differ")
    view = JobView("job", "running", 1, 3, 3, (*workers, spare), (), "", refused_gpus=(refused,))
    samples = {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in gpu_metrics([view])
        for sample in family.samples
    }
    assert samples == {
        ("muster_gpu_busy_percent", "job", "0"): 97,
        ("muster_gpu_memory_used_bytes", "job", "0"): 10**10,
        ("muster_gpu_memory_bytes", "job", "0"): 8 * 10**10,
        ("muster_gpu_celsius", "job", "0"): 60,
        ("muster_gpu_unwell", "job", "1", "ill"): 1,
        ("muster_gpus_refused", "job"): 1,
    }
