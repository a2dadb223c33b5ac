"""What heartbeats say of a GPU: as little as there is to say, and a thread that waits for a GPU alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from muster.wire import codec
from muster.wire.messages import GpuReport, Heartbeat
from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.gpu_health.judgement import GpuLimits
from muster.worker.gpu_health.nvml import NvmlGpus
from muster.worker.gpu_health.watch import GpuWatch, load_nvml
from tests.waiting import wait_for
from tests.worker.gpu_health.fake_nvml import FakeNvml, FakeNvmlError

FIRST = GpuIdentity(0)


def watch(
    nvml: FakeNvml | None, limits: GpuLimits | None = None, *, gpu: GpuIdentity = FIRST, every_s: float = 60.0
) -> GpuWatch:
    return GpuWatch(gpu, limits or GpuLimits(), load=lambda: nvml, every_s=every_s)


def read(nvml: FakeNvml, times: int = 1, limits: GpuLimits | None = None) -> GpuReport:
    """The last of so many readings."""
    made, gpus = watch(nvml, limits), NvmlGpus(nvml)
    reports = [made.report(gpus.read(0)) for _ in range(times)]
    return reports[-1]


def bytes_of(report: GpuReport) -> int:
    """How many bytes of a heartbeat are the report's."""
    beat = Heartbeat(3, 1000, 1001, 99.5, pid=4711)
    return len(codec.encode(beat.replaced(gpu=report))) - len(codec.encode(beat))


def test_a_gpu_that_is_well_costs_a_heartbeat_few_bytes() -> None:
    report = read(FakeNvml())
    assert report == GpuReport("well", (), 100, 10_000, 80_000, 1980, 61, 0, 0, 0)
    assert bytes_of(report) <= 36


def test_however_ill_a_gpu_is_its_report_is_bounded() -> None:
    nvml = FakeNvml()
    nvml.xids = [*range(200, 264)]
    nvml.celsius, nvml.uncorrected, nvml.link_errors, nvml.slowed = 199, 10**9, 10**9, 0xFF
    nvml.remapped = (10**6, 10**6, 1, 1)
    report = read(nvml)
    assert report.state == "ill" and len(report.reasons) == codec.MAX_REASONS
    assert report.xids == tuple(range(264 - codec.MAX_XIDS, 264))
    assert bytes_of(report) < 512
    nvml.fails["nvmlDeviceGetHandleByIndex"] = FakeNvmlError(15, "lost\n" * 1000)
    (reason, *_) = read(nvml).reasons
    assert len(reason) == codec.MAX_REASON and reason.isprintable()
    beat = Heartbeat(3, 1000, 1001, 99.5, gpu=read(nvml))
    assert codec.decode_worker_message(codec.encode(beat)) == beat


@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ({"celsius": 81}, GpuLimits(celsius=80), "81 C, over 80 C"),
        ({"uncorrected": 3}, GpuLimits(uncorrected_errors=2), "3 uncorrected ECC errors"),
        ({"link_errors": 3}, GpuLimits(nvlink_errors=10), "12 errors of NVLink"),
    ],
)
def test_the_limits_are_those_that_were_set(fault: dict[str, int], limits: GpuLimits, reason: str) -> None:
    nvml = FakeNvml()
    for name, value in fault.items():
        setattr(nvml, name, value)
    assert read(nvml, limits=limits).reasons == (reason,)


def test_clocks_that_are_low_for_a_moment_are_no_finding() -> None:
    nvml = FakeNvml()
    nvml.slowed = 0x8
    assert read(nvml).state == "well"
    assert read(nvml, times=2).reasons == ("slowed by the hardware",)


def test_a_critical_error_is_remembered() -> None:
    nvml = FakeNvml()
    nvml.xids = [79]
    assert read(nvml, times=3).reasons == ("Xid 79",)


def test_each_reading_is_told_once_and_the_gpu_is_found_by_where_it_sits() -> None:
    nvml = FakeNvml()
    nvml.at_bus = {"0000:65:00.0": 7}
    made = watch(nvml, gpu=GpuIdentity(0, "0000:65:00.0"))
    made.start()
    wait_for(lambda: nvml.read_of == [7])
    wait_for(lambda: made.take() is not None)
    assert made.take() is None
    made.close()
    assert nvml.shut_down and nvml.open_events == 0


@pytest.mark.parametrize("load", [lambda: None, lambda: 1 / 0])
def test_without_nvml_nothing_is_told(load: Callable[[], None]) -> None:
    made = GpuWatch(FIRST, GpuLimits(), load=load)
    made.start()
    made.close()
    assert made.take() is None


def test_where_the_module_is_not_installed_it_is_not_loaded() -> None:
    assert load_nvml("no_such_module_of_nvml") is None


def test_a_reading_that_never_ends_holds_nobody_up() -> None:
    nvml, released = FakeNvml(), threading.Event()
    entered = threading.Event()

    def hang(handle: int) -> None:
        entered.set()
        released.wait(20.0)

    nvml.nvmlDeviceGetUtilizationRates = hang  # type: ignore[assignment, method-assign]
    made = watch(nvml)
    made.start()
    assert entered.wait(20.0)
    assert made.take() is None
    made.close()
    released.set()


def test_after_an_error_of_the_driver_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    nvml.fails["nvmlDeviceGetHandleByIndex"] = FakeNvmlError(999, "Unknown Error")
    made = watch(nvml, every_s=0.001)
    with caplog.at_level("INFO", "muster.worker"):
        made.start()
        wait_for(lambda: "Unknown Error" in caplog.text)
        nvml.fails.clear()
        wait_for(lambda: made.take() is not None)
    made.close()
    assert caplog.text.count("Unknown Error") == 1
