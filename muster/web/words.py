"""Formats durations, times of day, numbers and bytes for people."""

from __future__ import annotations

import datetime as dt
import math
from typing import Protocol

from muster.scheduler.cli.gpus import gpu_in_full, gpu_in_short
from muster.scheduler.cli.status import newest_of
from muster.wire.v1 import rendezvous_pb2 as pb

DAY_S = 86_400.0
DRAINS_NAMED = 8
"""The largest number of hosts and nodes of a planned drain that are named."""


def duration(seconds: float) -> str:
    """Formats a duration: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size_s, unit, next_s, next_unit in (
        (DAY_S, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size_s:
            many, rest = divmod(whole, int(size_s))
            rest //= next_s
            return f"{many} {unit} {rest} {next_unit}" if rest else f"{many} {unit}"
    return f"{whole} s"


def clock(time_s: float) -> str:
    """Formats the local time of day: ``14:03:09``."""
    return dt.datetime.fromtimestamp(time_s).strftime("%H:%M:%S")


def day(time_s: float) -> str:
    """Formats the local date: ``2026-01-31``."""
    return dt.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d")


def moment(time_s: float) -> str:
    """Formats local date and time for the attribute ``<time datetime>``."""
    return dt.datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")


def days(seconds: float) -> str:
    """Formats a remaining validity: ``89 days``, below two days ``47 hours``, and ``ended`` if it is over."""
    if seconds <= 0:
        return "ended"
    return f"{seconds / DAY_S:,.0f} days" if seconds >= 2 * DAY_S else f"{seconds / 3600:.0f} hours"


def number(value: float | None) -> str:
    """Formats a number with four significant digits: ``12,345``, ``12.35``, ``1.2e-05``; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def snapshot(report: pb.SnapshotReport, *, short: bool = False) -> str:
    """Formats a snapshot: ``step 120, 12 s ago, at rank 3``; unless ``short``, also ``1.5 MB in 0.8 s``."""
    where = ", ".join(map(str, report.partners))
    at = f", at rank{'' if len(report.partners) == 1 else 's'} {where}" if where else ""
    what = f"step {number(newest_of(report))}, {duration(report.age_s)} ago{at}"
    return what if short else f"{what}, {size(report.size_bytes)} in {duration(report.seconds)}"


def job_snapshot(copies: pb.JobCopies) -> str:
    """Formats a job's snapshot: ``step 120, 12 s ago, 1.5 GB in 0.8 s``."""
    step, age = number(copies.snapshot_step), duration(copies.snapshot_age_s)
    return f"step {step}, {age} ago, {size(copies.snapshot_bytes)} in {duration(copies.snapshot_seconds)}"


def checkpoint(report: pb.CheckpointReport) -> str:
    """Formats a checkpoint: ``step 100, 3 min ago, 1.5 GB in 2.1 s``."""
    age, took = duration(report.age_s), duration(report.seconds)
    return f"step {number(report.step)}, {age} ago, {size(report.size_bytes)} in {took}"


def planned_drain(drain: pb.PlannedDrain, now: float) -> str:
    """Formats a plan: ``Host gpu-17 and node 3 are to be drained at 2026-01-31 02:00:00, in 2 h: disks.``."""
    names = [*(f"host {each}" for each in drain.hosts), *(f"node {each}" for each in drain.node_ids)]
    shown = names[:DRAINS_NAMED] + (
        [f"{len(names) - DRAINS_NAMED} more"] if len(names) > DRAINS_NAMED else []
    )
    who = " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
    verb = "is" if len(names) == 1 else "are"
    when = f"at {day(drain.at_s)} {clock(drain.at_s)}, in {duration(drain.at_s - now)}"
    return f"{who[:1].upper()}{who[1:]} {verb} to be drained {when}: {drain.reason.rstrip('.')}."


def gpu(report: pb.GpuReport, *, short: bool = False) -> str:
    """Formats a GPU's state: ``98 %, 61 C``; unless ``short``, also memory, clock, errors and complaints."""
    return gpu_in_short(report) if short else gpu_in_full(report)


class Timed(Protocol):
    """A worker's times per step in seconds: computing, waiting for others, and waiting for data."""

    computed_s: float
    waited_s: float
    data_s: float


def waits(worker: Timed) -> str:
    """Formats the share of its steps in which a worker waited for others or for data: ``40 %``."""
    whole_s = worker.computed_s + worker.waited_s + worker.data_s
    return f"{100 * (worker.waited_s + worker.data_s) / whole_s:.0f} %" if whole_s > 0 else "–"


def step_time(worker: Timed) -> str:
    """Formats the parts of a step: ``computes 120 ms, waits 30 ms for others and 2 ms for data``."""
    if worker.computed_s + worker.waited_s + worker.data_s <= 0:
        return "–"
    computes, waited, data = (
        f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
        for seconds in (worker.computed_s, worker.waited_s, worker.data_s)
    )
    return f"computes {computes}, waits {waited} for others and {data} for data"


def size(size_bytes: int) -> str:
    """Formats a number of bytes: ``512 B``, ``1.5 MB``."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError
