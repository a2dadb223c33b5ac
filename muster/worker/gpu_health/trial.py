"""Tests a GPU: patterns in its memory, products with known sums, and copies in both directions.

The tested object is a :class:`GpuUnderTest`; its answers are interpreted here, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from muster.wire.messages import Value

LIMIT_S = 5.0
"""How long the test itself may take, in seconds, after its libraries are loaded and the GPU is open."""

PORTION, MOST_BYTES, LEAST_BYTES = 0.25, 256 << 20, 1 << 20
"""The share of the free memory that is tested, the most bytes that are tested, and the least free memory for
a test, in bytes.
"""

PATTERNS = (0x5555_5555_5555_5555, 0xAAAA_AAAA_AAAA_AAAA, 0xFFFF_FFFF_FFFF_FFFF, 0)
"""Each bit is set and clear in these, next to an equal bit and next to a different one."""

PASSED, FAILED, UNKNOWN = "passed", "failed", "unknown"

_FAULTS = (
    "uncorrectable",
    "hardware stack",
    "illegal instruction",
    "illegal memory access",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "launch failure",
    "launch timed out",
    "execution_failed",
    "internal_error",
    "mapping of buffer object failed",
    "gpu is lost",
    "fallen off the bus",
)
"""Texts in CUDA's errors which mean, in a program that is known to be correct, that a GPU or its driver has
failed.
"""


class GpuUnderTest(Protocol):
    """The operations of a GPU under test; each method returns when the GPU has finished."""

    def free_bytes(self) -> int:
        """Returns the free memory in bytes."""

    def wrong_words(self, pattern: int, size_bytes: int) -> int:
        """Fills this much memory with a 64-bit word.

        Returns how many words differ when they are read back.
        """

    def wrong_addresses(self, size_bytes: int) -> int:
        """Writes each word's own number into it; returns how many differ.

        This finds two addresses that refer to the same memory.
        """

    def wrong_sums(self) -> int:
        """Multiplies matrices of small whole numbers.

        Returns how many rows and columns do not have the known sum.
        """

    def wrong_copies(self, size_bytes: int) -> int:
        """Copies this many bytes from the host to the GPU and back; returns how many words differ."""


class GpuVerdict(Value):
    """The result of a test.

    Attributes:
        word: passed, failed or unknown. Unknown means that the test could not be run.
        reason: why it failed or could not be run.
        seconds: the duration of the test.
    """

    word: str
    reason: str = ""
    seconds: float = 0.0


def try_gpu(gpu: GpuUnderTest, clock: Callable[[], float], limit_s: float = LIMIT_S) -> GpuVerdict:
    """Tests a GPU within a time limit; a test that does not end within it has failed.

    Args:
        gpu: the GPU.
        clock: returns monotonic seconds.
        limit_s: the time limit, in seconds. The caller must end a call that hangs.
    """
    begun = clock()

    def verdict(word: str, reason: str = "") -> GpuVerdict:
        return GpuVerdict(word, reason, clock() - begun)

    try:
        size_bytes = min(MOST_BYTES, int(PORTION * gpu.free_bytes())) & ~7
        if size_bytes < LEAST_BYTES:
            return verdict(UNKNOWN, f"only {size_bytes} bytes of its memory could be tested")
        for what, wrong in _steps(gpu, size_bytes):
            number = wrong()
            if number:
                return verdict(FAILED, f"{number:,} {what}")
            if clock() - begun > limit_s:
                return verdict(FAILED, f"its test was not done after {clock() - begun:.1f} s")
    except Exception as error:
        return verdict(FAILED if is_fault(error) else UNKNOWN, _in_a_line(error))
    return verdict(PASSED)


def _steps(gpu: GpuUnderTest, size_bytes: int) -> list[tuple[str, Callable[[], int]]]:
    size = f"{size_bytes >> 20} MiB"
    patterns: list[tuple[str, Callable[[], int]]] = [
        (
            f"words of {size} of its memory differ from the pattern {pattern:016x}",
            lambda pattern=pattern: gpu.wrong_words(pattern, size_bytes),  # type: ignore[misc]
        )
        for pattern in PATTERNS
    ]
    return [
        *patterns,
        (f"words of {size} of its memory hold another's address", lambda: gpu.wrong_addresses(size_bytes)),
        ("sums of a product are wrong", gpu.wrong_sums),
        ("words differ after a copy to it and back", lambda: gpu.wrong_copies(min(size_bytes, 32 << 20))),
    ]


def is_fault(error: BaseException) -> bool:
    """Whether an error means that the GPU has failed, and not that it is full, in use or not supported."""
    said = str(error).lower()
    return any(each in said for each in _FAULTS)


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
