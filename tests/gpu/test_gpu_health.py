"""The driver's own numbers of a real GPU, through the real NVML."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from muster.worker.gpu_health.judgement import GpuState, judge_gpu
from muster.worker.gpu_health.nvml import NvmlGpus

pytestmark = pytest.mark.gpu


@pytest.fixture
def nvml() -> Iterator[Any]:
    if find_spec("pynvml") is None:
        pytest.skip("needs a GPU and nvidia-ml-py")
    module: Any = importlib.import_module("pynvml")
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        pytest.skip(f"needs a GPU and its driver: {error}")
    yield module
    module.nvmlShutdown()


def test_a_gpu_tells_its_numbers_and_is_not_ill(nvml: Any) -> None:
    gpus = NvmlGpus(nvml)
    assert gpus.count() > 0
    readings = [gpus.read(index) for index in range(gpus.count())]
    gpus.close()
    for reading in readings:
        assert reading.busy_percent is not None and reading.clock_mhz is not None
        assert reading.used_bytes is not None and reading.total_bytes is not None
        assert 0 < reading.used_bytes < reading.total_bytes
        assert reading.celsius is not None and 10 < reading.celsius < 110
        judgement = judge_gpu(reading)
        assert judgement.state is not GpuState.ILL, judgement.reasons
