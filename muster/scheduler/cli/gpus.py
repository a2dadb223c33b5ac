"""Workers' reports on their GPUs, as text for tables and pages and as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.wire.v1 import rendezvous_pb2 as pb

WELL, ILL = "well", "ill"
FIGURES = (
    "busy_percent",
    "used_mb",
    "total_mb",
    "clock_mhz",
    "celsius",
    "uncorrected_errors",
    "nvlink_errors",
    "remapped_rows",
)
"""The names of a report's numbers, each of which may be unknown."""


def gpu_in_short(report: pb.GpuReport) -> str:
    """Short form, as in ``98 %, 61 C``; the state if the GPU is not well; a dash if nothing is reported."""
    if report.state != WELL:
        return report.state
    busy = [f"{report.busy_percent} %"] if report.HasField("busy_percent") else []
    heat = [f"{report.celsius} C"] if report.HasField("celsius") else []
    return ", ".join([*busy, *heat]) or "-"


def gpu_in_full(report: pb.GpuReport) -> str:
    """Full form, as in ``98 % busy, 10.2 of 80.0 GB, 1980 MHz, 61 C``, and then the faults."""
    parts = []
    if report.HasField("busy_percent"):
        parts.append(f"{report.busy_percent} % busy")
    if report.HasField("used_mb") and report.HasField("total_mb"):
        parts.append(f"{report.used_mb / 1000:.1f} of {report.total_mb / 1000:.1f} GB")
    if report.HasField("clock_mhz"):
        parts.append(f"{report.clock_mhz} MHz")
    if report.HasField("celsius"):
        parts.append(f"{report.celsius} C")
    for number, what in (
        (report.uncorrected_errors, "uncorrected ECC errors"),
        (report.remapped_rows, "rows of memory remapped"),
        (report.nvlink_errors, "NVLink errors"),
    ):
        parts += [f"{number:,} {what}"] if number else []
    if report.state != WELL:
        parts.append(f"{report.state}: {'; '.join(report.reasons)}")
    return ", ".join(parts) or "the driver tells nothing"


def gpu_warnings(workers: Iterable[pb.WorkerStatus]) -> Iterator[str]:
    """Yields a sentence for each worker whose GPU has a fault."""
    for worker in workers:
        if worker.HasField("gpu") and worker.gpu.state != WELL:
            yield gpu_warning(worker.rank, worker.node_id, worker.host_name, worker.device, worker.gpu)


def gpu_warning(rank: int, node_id: str, host: str, device: pb.Device, report: pb.GpuReport) -> str:
    """Returns a sentence that says which fault a worker's GPU has."""
    index = f", {device.kind}:{device.index}" if device.kind and device.index >= 0 else ""
    where = f"node {node_id} on host {host}{index}"
    who = f"Rank {rank} ({where})" if rank >= 0 else f"{where[0].upper()}{where[1:]}"
    return f"{who}: its GPU is {report.state}: {'; '.join(report.reasons)}."


def refused_in_words(refused: pb.RefusedGpu) -> str:
    """Returns a sentence that says that a GPU is refused, why, and how to readmit it."""
    index = f", number {refused.device_index}" if refused.device_index >= 0 else ""
    return (
        f"GPU {refused.gpu} of host {refused.host_name}{index} (node {refused.node_id}) is refused:"
        f" {refused.reason}. muster admit {refused.host_name} lets it in again."
    )


def refused_json(refused: pb.RefusedGpu) -> dict[str, Any]:
    """Converts a refused GPU to plain values for JSON."""
    return {
        "gpu": refused.gpu,
        "host": {"name": refused.host_name, "id": refused.host_id, "address": refused.address or None},
        "node_id": refused.node_id,
        "device_index": refused.device_index if refused.device_index >= 0 else None,
        "reason": refused.reason,
    }


def gpu_json(worker: pb.WorkerStatus) -> dict[str, Any] | None:
    """Converts a worker's GPU to plain values for JSON. Unknown numbers are null."""
    if not worker.HasField("gpu"):
        return None
    report = worker.gpu
    figures = {name: getattr(report, name) if report.HasField(name) else None for name in FIGURES}
    return {
        "state": report.state,
        "reasons": list(report.reasons),
        **figures,
        "xids": list(report.xids),
        "age_s": round(worker.gpu_age_s, 3),
    }
