"""Reads a worker's GPU every few seconds on a separate thread, for its heartbeats."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from muster.wire.codec import MAX_REASON, MAX_REASONS, MAX_XIDS
from muster.wire.messages import GpuReport
from muster.wire.threads import start_thread
from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.gpu_health.judgement import GpuJudgement, GpuLimits, GpuReading, judge_gpu
from muster.worker.gpu_health.nvml import NvmlGpus

log = logging.getLogger("muster.worker")

EVERY_S = 5.0
"""Interval between two readings, in seconds."""

CLOSE_S = 0.5


def load_nvml(library: str = "pynvml") -> Any:
    """Loads and initialises NVML's module; returns None if nvidia-ml-py is not installed.

    Raises:
        Exception: the driver is missing or has another version; the type is the module's own.
    """
    if find_spec(library) is None:
        return None
    nvml: Any = importlib.import_module(library)
    nvml.nvmlInit()
    return nvml


class GpuWatch:
    """Reads one GPU periodically through its driver; if the driver reports nothing, neither does this class.

    With a faulty GPU, a reading may take long or never end. Only the thread of this class waits for it.

    Args:
        gpu: the GPU.
        limits: the limits beyond which a number is a finding.
        load: loads NVML.
        every_s: the pause between two readings, in seconds.
    """

    def __init__(
        self,
        gpu: GpuIdentity,
        limits: GpuLimits,
        *,
        load: Callable[[], Any] = load_nvml,
        every_s: float = EVERY_S,
    ) -> None:
        self._gpu = gpu
        self._limits = limits
        self._load = load
        self._every_s = every_s
        self._news: GpuReport | None = None
        self._xids: list[int] = []
        self._slowed_before: frozenset[str] = frozenset()
        self._complained = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; later calls do nothing."""
        if self._thread is None:
            self._thread = start_thread(self._run, name="muster-gpu")

    def take(self) -> GpuReport | None:
        """Returns the newest reading; None if there is no new one since the last call."""
        news, self._news = self._news, None
        return news

    def close(self) -> None:
        """Ends the thread after its present reading, for which it waits a moment."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            nvml = self._load()
        except Exception as error:
            log.info("the GPU's health is not known: NVML says: %s", error)
            return
        if nvml is None:
            return
        gpus = NvmlGpus(nvml)
        try:
            while not self._closing.is_set():
                self._read(gpus)
                self._closing.wait(self._every_s)
        finally:
            gpus.close()
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def _read(self, gpus: NvmlGpus) -> None:
        try:
            self._news = self.report(gpus.read(gpus.index_of(self._gpu)))
            self._complained = False
        except Exception as error:  # It may answer the next time.
            if not self._complained:
                log.info("the GPU's health is not known: NVML says: %s", error)
            self._complained = True

    def report(self, reading: GpuReading) -> GpuReport:
        """Returns a reading in the form for heartbeats, judged together with the previous reading."""
        for xid in reading.xids:
            if xid in self._xids:
                self._xids.remove(xid)
            self._xids.append(xid)
        del self._xids[:-MAX_XIDS]
        # The hardware reduces clocks for a moment when they change; a lasting reduction is in the next
        # reading too.
        slowed = tuple(each for each in reading.slowed_by if each in self._slowed_before)
        self._slowed_before = frozenset(reading.slowed_by)
        judged = reading.replaced(xids=tuple(self._xids), slowed_by=slowed)
        return report_of(judged, judge_gpu(judged, self._limits))


def report_of(reading: GpuReading, judgement: GpuJudgement) -> GpuReport:
    """Returns a reading and its judgement in the form for heartbeats, with a limited size."""
    reasons = (_printable(reason)[:MAX_REASON] for reason in judgement.reasons[:MAX_REASONS])
    return GpuReport(
        state=judgement.state.value,
        reasons=tuple(reasons),
        busy_percent=reading.busy_percent,
        used_mb=_megabytes(reading.used_bytes),
        total_mb=_megabytes(reading.total_bytes),
        clock_mhz=reading.clock_mhz,
        celsius=reading.celsius,
        uncorrected_errors=reading.uncorrected_errors,
        nvlink_errors=reading.nvlink_errors,
        remapped_rows=reading.remapped_rows,
        xids=reading.xids[-MAX_XIDS:],
    )


def _megabytes(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else size_bytes // 1_000_000


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)
