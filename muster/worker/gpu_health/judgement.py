"""Judges what the driver says of a GPU against limits; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

# Xids after which the GPU, or what it computes, is not to be trusted until it has been reset or replaced:
# memory errors that nothing contained or remapped, a GPU gone from the bus, a GPU's own firmware that hangs.
ILL_XIDS = frozenset({48, 64, 79, 95, 119, 120})
# Xids that a program's own mistake causes; they say nothing of the GPU.
PROGRAM_XIDS = frozenset({13, 31, 43, 45})


class GpuState(Enum):
    """How a GPU is; the worst finding decides."""

    WELL = "well"
    SUSPECT = "suspect"
    ILL = "ill"


@dataclass(frozen=True)
class GpuReading:
    """What the driver said of one GPU; ``None`` is what this GPU or driver does not tell.

    Attributes:
        index: the driver's number of the GPU.
        lost: the driver's error, where it cannot reach the GPU any more.
        busy_percent: of the time in which a kernel ran.
        slowed_by: reasons other than load or settings for which the clocks are lower.
        uncorrected_errors: of ECC, since the driver was loaded.
        remap_pending: rows of memory wait for a reset to be replaced.
        remap_failed: a row of memory could not be replaced.
        nvlink_errors: replays and recoveries of all links, since the driver was loaded.
        xids: of critical errors since the last reading.
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
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlink_errors: int | None = None
    xids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GpuLimits:
    """From where on a number is a finding: at more than this many."""

    celsius: int = 90
    uncorrected_errors: int = 0
    nvlink_errors: int = 100


@dataclass(frozen=True)
class GpuJudgement:
    """A GPU's state, and all that speaks for it, the worst first."""

    state: GpuState
    reasons: tuple[str, ...] = ()


def judge_gpu(reading: GpuReading, limits: GpuLimits | None = None) -> GpuJudgement:
    """Judges one reading; what the driver does not tell is never a finding."""
    ill = tuple(_ill(reading, limits or GpuLimits()))
    suspect = tuple(_suspect(reading, limits or GpuLimits()))
    state = GpuState.ILL if ill else GpuState.SUSPECT if suspect else GpuState.WELL
    return GpuJudgement(state, ill + suspect)


def describe_gpu(reading: GpuReading, judgement: GpuJudgement) -> str:
    """One line: the numbers that are known, then the state and its reasons where it is not well."""
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
