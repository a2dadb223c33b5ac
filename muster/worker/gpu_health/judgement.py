"""Compares the driver's readings of a GPU with limits; pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from muster.wire.messages import Value
from muster.wire.variables import default_of

# Both lists follow NVIDIA's catalogue of Xids and its immediate actions
# (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html; as a table in NVIDIA/NVSentinel,
# xiderrorsmapping.csv). The first list has those after which the GPU must be reset or its host restarted:
# memory errors that were neither contained nor replaced (48, 64, 95, 140, 156, 160), a GPU gone from the bus
# (79) or not started (143), engines, firmware and controllers that hang (46, 62, 109, 110, 119, 120, 158),
# links that cannot be trained (136, 155).
ILL_XIDS = frozenset({46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 160})
# The second list has those that a program's own mistake or end causes (13, 31, 43, 45), that only test the
# path of a message (106, 107), or that refer to another one (154): they say nothing about the GPU. All others
# make it suspect.
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 106, 107, 154})


class GpuState(Enum):
    """The state of a GPU: that of its worst finding."""

    WELL = "well"
    SUSPECT = "suspect"
    ILL = "ill"


class GpuReading(Value):
    """The driver's reading of one GPU; ``None`` for values that this GPU or driver does not report.

    Attributes:
        index: the driver's number of the GPU.
        lost: the driver's error, if it can no longer reach the GPU.
        busy_percent: the share of time in which a kernel ran.
        slowed_by: reasons, other than load or settings, for which the clock rates are lower.
        uncorrected_errors: uncorrected ECC errors since the driver was loaded.
        remapped_rows: total number of rows of memory that were replaced.
        remap_pending: whether rows of memory will be replaced at the next reset.
        remap_failed: whether a row of memory could not be replaced.
        nvlink_errors: replays and recoveries on all links since the driver was loaded.
        xids: numbers (Xids) of critical errors since the last reading.
    """

    index: int
    lost: str = ""
    busy_percent: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    clock_mhz: int | None = None
    celsius: int | None = None
    slowed_by: tuple[str, ...] = ()
    uncorrected_errors: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlink_errors: int | None = None
    xids: tuple[int, ...] = ()


class GpuLimits(Value):
    """Limits of the readings; a larger number is a finding."""

    celsius: int = default_of("MS_GPU_MAX_CELSIUS")
    uncorrected_errors: int = default_of("MS_GPU_MAX_ECC_ERRORS")
    nvlink_errors: int = default_of("MS_GPU_MAX_NVLINK_ERRORS")


class GpuJudgement(Value):
    """A GPU's state and all findings, the worst first."""

    state: GpuState
    reasons: tuple[str, ...] = ()


def judge_gpu(reading: GpuReading, limits: GpuLimits | None = None) -> GpuJudgement:
    """Judges one reading. Values that the driver does not report are never a finding."""
    ill = tuple(_ill(reading, limits or GpuLimits()))
    suspect = tuple(_suspect(reading, limits or GpuLimits()))
    state = GpuState.ILL if ill else GpuState.SUSPECT if suspect else GpuState.WELL
    return GpuJudgement(state, ill + suspect)


def describe_gpu(reading: GpuReading, judgement: GpuJudgement) -> str:
    """Returns one line with the known numbers and, if the GPU is not healthy, its state and the reasons."""
    numbers = []
    if reading.busy_percent is not None:
        numbers.append(f"{reading.busy_percent} % busy")
    if reading.used_bytes is not None and reading.total_bytes is not None:
        numbers.append(f"{reading.used_bytes / 1e9:.1f} of {reading.total_bytes / 1e9:.1f} GB")
    if reading.clock_mhz is not None:
        numbers.append(f"{reading.clock_mhz} MHz")
    if reading.celsius is not None:
        numbers.append(f"{reading.celsius} C")
    if judgement.state is not GpuState.WELL:
        numbers.append(f"{judgement.state.value}: {'; '.join(judgement.reasons)}")
    return f"GPU {reading.index}: {', '.join(numbers) or 'the driver tells nothing'}"


def _ill(reading: GpuReading, limits: GpuLimits) -> Iterator[str]:
    if reading.lost:
        yield f"the driver lost it: {reading.lost}"
    if reading.remap_failed:
        yield "a row of its memory could not be replaced"
    if reading.uncorrected_errors is not None and reading.uncorrected_errors > limits.uncorrected_errors:
        yield f"{reading.uncorrected_errors} uncorrected ECC errors"
    yield from (f"Xid {xid}" for xid in reading.xids if xid in ILL_XIDS)


def _suspect(reading: GpuReading, limits: GpuLimits) -> Iterator[str]:
    if reading.remap_pending:
        yield "rows of its memory wait for a reset to be replaced"
    if reading.celsius is not None and reading.celsius > limits.celsius:
        yield f"{reading.celsius} C, over {limits.celsius} C"
    if reading.slowed_by:
        yield f"slowed by {', '.join(reading.slowed_by)}"
    if reading.nvlink_errors is not None and reading.nvlink_errors > limits.nvlink_errors:
        yield f"{reading.nvlink_errors} errors of NVLink"
    yield from (f"Xid {xid}" for xid in reading.xids if xid not in ILL_XIDS | PROGRAM_XIDS)
