"""Each fault that NVML can tell of, from its numbers to the judgement."""

from __future__ import annotations

import pytest

from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.gpu_health.judgement import GpuJudgement, GpuLimits, GpuReading, GpuState, judge_gpu
from muster.worker.gpu_health.nvml import NvmlGpus
from tests.worker.gpu_health.fake_nvml import FakeNvml, FakeNvmlError


def judged(nvml: FakeNvml) -> GpuJudgement:
    return judge_gpu(NvmlGpus(nvml).read(0))


def test_a_gpu_without_a_fault_is_well() -> None:
    nvml = FakeNvml()
    nvml.slowed = 0x1 | 0x2 | 0x4  # idle, set by the user, at its power cap: none is a fault
    nvml.xids = [31]  # a program's own mistake
    assert judged(nvml) == GpuJudgement(GpuState.WELL)


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ({"uncorrected": 3}, GpuState.ILL, "3 uncorrected ECC errors"),
        ({"remapped": (0, 1, 0, 1)}, GpuState.ILL, "a row of its memory could not be replaced"),
        ({"xids": [79]}, GpuState.ILL, "Xid 79"),
        ({"xids": [63]}, GpuState.SUSPECT, "Xid 63"),
        ({"remapped": (0, 1, 1, 0)}, GpuState.SUSPECT, "rows of its memory wait for a reset to be replaced"),
        ({"celsius": 95}, GpuState.SUSPECT, "95 C, over 90 C"),
        ({"slowed": 0x40 | 0x80}, GpuState.SUSPECT, "slowed by heat (hardware), the power brake"),
        ({"link_errors": 30}, GpuState.SUSPECT, "120 errors of NVLink"),
    ],
)
def test_a_fault_is_named(fault: dict[str, object], state: GpuState, reason: str) -> None:
    nvml = FakeNvml()
    for name, value in fault.items():
        setattr(nvml, name, value)
    assert judged(nvml) == GpuJudgement(state, (reason,))


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"])
def test_a_gpu_lost_in_mid_job_is_ill(call: str) -> None:
    nvml = FakeNvml()
    gpus = NvmlGpus(nvml)
    assert judge_gpu(gpus.read(0)).state is GpuState.WELL
    nvml.fails[call] = FakeNvmlError(15, "GPU is lost")
    nvml.xids = [79]
    assert judge_gpu(gpus.read(0)).reasons == ("the driver lost it: GPU is lost", "Xid 79")


def test_what_a_gpu_does_not_tell_is_unknown_and_no_finding() -> None:
    nvml = FakeNvml()
    silent = [name for name in dir(nvml) if name.startswith("nvmlDeviceGet") and "Index" not in name]
    nvml.fails = {name: FakeNvmlError(3, "Not Supported") for name in [*silent, "nvmlEventSetCreate"]}
    reading = NvmlGpus(nvml).read(0)
    assert reading == GpuReading(0)
    assert judge_gpu(reading) == GpuJudgement(GpuState.WELL)


def test_an_older_driver_s_name_of_throttling_is_asked() -> None:
    nvml = FakeNvml()
    nvml.fails["nvmlDeviceGetCurrentClocksEventReasons"] = FakeNvmlError(13, "Function Not Found")
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x8  # type: ignore[attr-defined]
    assert judged(nvml).reasons == ("slowed by the hardware",)


def test_an_error_that_is_no_fault_of_the_gpu_is_the_caller_s() -> None:
    nvml = FakeNvml()
    nvml.fails["nvmlDeviceGetHandleByIndex"] = FakeNvmlError(4, "Insufficient Permissions")
    with pytest.raises(FakeNvmlError, match="Permissions"):
        NvmlGpus(nvml).read(0)


@pytest.mark.parametrize(
    ("gpu", "index"),
    [
        (GpuIdentity(3), 3),
        (GpuIdentity(3, uuid="GPU-1"), 5),
        (GpuIdentity(3, "0000:65:00.0", "GPU-1"), 6),
        (GpuIdentity(3, uuid="MIG-1"), 3),
    ],
)
def test_the_most_certain_name_finds_a_gpu(gpu: GpuIdentity, index: int) -> None:
    nvml = FakeNvml()
    nvml.at_bus = {"GPU-1": 5, "0000:65:00.0": 6}
    assert NvmlGpus(nvml).index_of(gpu) == index


@pytest.mark.parametrize(
    ("xid", "state"),
    [
        *(
            (xid, GpuState.ILL)
            for xid in (46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 158)
        ),
        *((xid, GpuState.SUSPECT) for xid in (63, 74, 92, 94, 145)),
        *((xid, GpuState.WELL) for xid in (13, 31, 43, 45, 154)),
    ],
)
def test_what_an_xid_says_of_the_gpu(xid: int, state: GpuState) -> None:
    assert judge_gpu(GpuReading(0, xids=(xid,))).state is state


def test_limits_are_the_caller_s() -> None:
    hot = GpuReading(0, celsius=95, uncorrected_errors=2, nvlink_errors=500)
    assert (
        judge_gpu(hot, GpuLimits(celsius=100, uncorrected_errors=2, nvlink_errors=500)).state is GpuState.WELL
    )


def test_xids_are_told_once_and_their_events_are_freed() -> None:
    nvml = FakeNvml()
    nvml.xids = [48, 94]
    gpus = NvmlGpus(nvml)
    assert gpus.read(0).xids == (48, 94)
    assert gpus.read(0).xids == ()
    assert nvml.open_events == 1
    gpus.close()
    assert nvml.open_events == 0
