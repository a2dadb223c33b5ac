"""Reads GPUs through NVML's Python module; values that a GPU or driver does not report stay unknown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.gpu_health.judgement import GpuReading

_SLOWED_BY = {
    0x08: "the hardware",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
_LOST = frozenset({15, 16})  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_UNCORRECTED, _SINCE_LOAD = 1, 0
_MOST_LINKS = 36
_LINK_COUNTERS = (0, 1)  # replays and recoveries
_XID_EVENTS = 0x08
_MOST_EVENTS = 64


class NvmlGpus:
    """The GPUs of this host, read through an NVML module whose ``nvmlInit`` was called.

    The caller shuts NVML down. Critical errors (Xids) are recorded from the first reading of a GPU on.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: dict[int, Any] = {}

    def count(self) -> int:
        """Returns the number of GPUs that the driver reports; raises NVML's errors."""
        return int(self._nvml.nvmlDeviceGetCount())

    def index_of(self, gpu: GpuIdentity) -> int:
        """Returns the driver's number of a GPU, found by its most reliable name; raises NVML's errors."""
        nvml = self._nvml
        if gpu.pci_bus_id:
            return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id)))
        if gpu.uuid.startswith("GPU-"):
            return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
        return gpu.index

    def read(self, index: int) -> GpuReading:
        """Reads one GPU; if the driver has lost it, returns a reading with ``lost`` instead of raising."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            return self._reading(index, handle)
        except Exception as error:
            if getattr(error, "value", None) in _LOST:
                return GpuReading(index, lost=str(error), xids=self._xids(index))
            raise

    def close(self) -> None:
        """Stops recording critical errors."""
        for events in self._events.values():
            with contextlib.suppress(Exception):  # The event set of a lost GPU cannot be freed.
                self._nvml.nvmlEventSetFree(events)
        self._events.clear()

    def _reading(self, index: int, handle: Any) -> GpuReading:
        nvml = self._nvml
        load = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        self._listen(index, handle)
        return GpuReading(
            index,
            busy_percent=None if load is None else int(load.gpu),
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            celsius=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            slowed_by=self._slowed_by(handle),
            uncorrected_errors=self._ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOAD),
            remapped_rows=None if rows is None else int(rows[0]) + int(rows[1]),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            nvlink_errors=self._nvlink_errors(handle),
            xids=self._xids(index),
        )

    def _slowed_by(self, handle: Any) -> tuple[str, ...]:
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:  # Drivers before 535 have it under its old name.
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return tuple(name for bit, name in _SLOWED_BY.items() if (mask or 0) & bit)

    def _nvlink_errors(self, handle: Any) -> int | None:
        found: int | None = None
        for link in range(_MOST_LINKS):
            if self._ask("nvmlDeviceGetNvLinkState", handle, link) is None:
                break  # Links are numbered without gaps, so there is no further one.
            for counter in _LINK_COUNTERS:
                errors = self._ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
                found = found if errors is None else (found or 0) + int(errors)
        return found

    def _listen(self, index: int, handle: Any) -> None:
        if index in self._events:
            return
        events = self._ask("nvmlEventSetCreate")
        if events is not None:
            self._ask("nvmlDeviceRegisterEvents", handle, _XID_EVENTS, events)
            self._events[index] = events

    def _xids(self, index: int) -> tuple[int, ...]:
        if index not in self._events:
            return ()
        xids = []
        for _ in range(_MOST_EVENTS):
            event = self._hear(index)
            if event is None:  # No event left within 0 ms.
                break
            xids.append(int(event.eventData))
        return tuple(xids)

    def _hear(self, index: int) -> Any:
        try:
            return self._nvml.nvmlEventSetWait(self._events[index], 0)
        except Exception:  # Nothing came, or the GPU is gone, which its reading then says.
            return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Returns NVML's answer; None if GPU, driver or module has none. Raises if the GPU is lost."""
        call: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            if getattr(error, "value", None) in _LOST:
                raise
            return None
