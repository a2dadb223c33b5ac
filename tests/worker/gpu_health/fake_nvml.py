"""An NVML of tests: one GPU that is well, until a test says otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FakeNvmlError(Exception):
    """An error of NVML, with its number."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    """What the adapter calls of NVML's Python module; ``fails`` maps a call's name to its error."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.fails: dict[str, FakeNvmlError] = {}
        self.celsius, self.uncorrected, self.slowed = 61, 0, 0
        self.remapped = (0, 0, 0, 0)
        self.links, self.link_errors = 2, 0
        self.xids: list[int] = []
        self.open_events = 0
        self.at_bus: dict[str, int] = {}
        self.read_of: list[int] = []
        self.shut_down = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and (error := self.fails.get(name)) is not None:
            return _failing(error)
        return super().__getattribute__(name)

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.read_of.append(index)
        return index

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> int:
        return self.at_bus[bus_id]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.at_bus[uuid]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=100)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=10 * 10**9, total=80 * 10**9)

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: int, which: int) -> int:
        return self.celsius

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, since: int) -> int:
        return self.uncorrected if kind == 1 else 7

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self.remapped

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.slowed

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.links:
            raise FakeNvmlError(2, "Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, counter: int) -> int:
        return self.link_errors

    def nvmlEventSetCreate(self) -> object:
        self.open_events += 1
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        assert kinds == 8

    def nvmlEventSetWait(self, events: object, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise FakeNvmlError(10, "Timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))

    def nvmlEventSetFree(self, events: object) -> None:
        self.open_events -= 1


def _failing(error: FakeNvmlError) -> Any:
    def call(*arguments: object) -> None:
        raise error

    return call
