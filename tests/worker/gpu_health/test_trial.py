"""Each fault that a test of a GPU can find, and what is none."""

from __future__ import annotations

import pytest

from muster.worker.gpu_health.trial import (
    FAILED,
    LIMIT_S,
    MOST_BYTES,
    PASSED,
    PATTERNS,
    UNKNOWN,
    GpuVerdict,
    try_gpu,
)
from tests.worker.gpu_health.fake_gpu import ASKED, FakeGpu


def tried(gpu: FakeGpu) -> GpuVerdict:
    return try_gpu(gpu, gpu.clock)


def test_a_gpu_that_is_right_in_all_passes() -> None:
    gpu = FakeGpu()
    gpu.takes_s = dict.fromkeys(ASKED, 0.125)
    assert tried(gpu) == GpuVerdict(PASSED, "", 0.125 * (len(PATTERNS) + 3))
    assert set(gpu.asked) == {"free_bytes", *ASKED}


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("wrong_words", "7 words of 256 MiB of its memory differ from the pattern 5555555555555555"),
        ("wrong_addresses", "7 words of 256 MiB of its memory hold another's address"),
        ("wrong_sums", "7 sums of a product are wrong"),
        ("wrong_copies", "7 words differ after a copy to it and back"),
    ],
)
def test_what_is_wrong_is_named(method: str, says: str) -> None:
    gpu = FakeGpu()
    gpu.wrong[method] = 7
    assert tried(gpu) == GpuVerdict(FAILED, says)


def test_each_bit_of_a_word_is_tested_set_and_clear() -> None:
    tested = [{pattern >> bit & 1 for pattern in PATTERNS} for bit in range(64)]
    assert tested == [{0, 1}] * 64


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_bit_that_sticks_shows_in_some_pattern(pattern: int) -> None:
    gpu = FakeGpu()
    gpu.wrong["wrong_words"], gpu.bad_pattern = 1, pattern
    assert tried(gpu).reason == f"1 words of 256 MiB of its memory differ from the pattern {pattern:016x}"


@pytest.mark.parametrize("method", ["free_bytes", *ASKED])
@pytest.mark.parametrize(
    ("error", "word"),
    [
        ("CUDA error: uncorrectable ECC error encountered", FAILED),
        ("CUDA error: uncorrectable NVLink error detected during the execution", FAILED),
        ("CUDA error: unspecified launch failure", FAILED),
        ("CUDA error: an illegal memory access was encountered", FAILED),
        ("CUDA error: hardware stack error", FAILED),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm", FAILED),
        ("CUDA out of memory. Tried to allocate 256 MiB", UNKNOWN),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", UNKNOWN),
        ("CUDA error: no kernel image is available for execution on the device", UNKNOWN),
    ],
)
def test_an_error_is_a_fault_only_where_the_gpu_has_failed(method: str, error: str, word: str) -> None:
    gpu = FakeGpu()
    gpu.errors[method] = RuntimeError(f"{error}\nCUDA kernel errors might be reported later")
    verdict = tried(gpu)
    assert verdict.word == word and error in verdict.reason and "\n" not in verdict.reason


def test_one_that_is_too_slow_has_failed() -> None:
    gpu = FakeGpu()
    gpu.takes_s["wrong_addresses"] = LIMIT_S + 0.5
    assert tried(gpu) == GpuVerdict(FAILED, "its test was not done after 5.5 s", LIMIT_S + 0.5)
    assert "wrong_sums" not in gpu.asked


def test_only_a_part_of_the_free_memory_is_used() -> None:
    for free_bytes, tested in ((1 << 30, 256 << 20), (100 << 30, MOST_BYTES), ((8 << 20) + 5, 2 << 20)):
        gpu = FakeGpu(free_bytes)
        assert tried(gpu).word == PASSED
        (size_bytes,) = gpu.tested_bytes
        assert size_bytes <= tested and size_bytes > tested - 8 and size_bytes % 8 == 0
    full = FakeGpu(1 << 20)
    assert tried(full) == GpuVerdict(UNKNOWN, "only 262144 bytes of its memory could be tested")
