"""A GPU tested through torch, on a separate stream; in tests, torch's CPU device is used instead."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

SIDE = 1024
"""Size of the matrices that are multiplied: sums of small whole numbers are exact in every precision."""

_FEW_BYTES = 4096


class TorchGpu:
    """Opens the GPU and loads the parts of torch that the test needs, so that only the GPU is timed.

    Args:
        device: torch's name of the device.
        side: size of the matrices that are multiplied.

    Raises:
        ImportError, RuntimeError: torch's own.
    """

    def __init__(self, device: str, *, side: int = SIDE) -> None:
        import torch

        self._torch: Any = torch
        self._side = side
        self._device = torch.device(device)
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = _stream_of_tests(self._device)
        self.wrong_words(0, _FEW_BYTES)
        self.wrong_addresses(_FEW_BYTES)
        self.wrong_sums()
        self.wrong_copies(_FEW_BYTES)

    def free_bytes(self) -> int:
        """See GpuUnderTest."""
        if self._stream is None:
            return 64 << 20
        return int(self._torch.cuda.mem_get_info(self._device)[0])

    def wrong_words(self, pattern: int, size_bytes: int) -> int:
        """See GpuUnderTest."""
        torch = self._torch
        word = pattern - (1 << 64) if pattern >> 63 else pattern  # the same bits as a signed number
        with self._done():
            words = torch.full((size_bytes // 8,), word, dtype=torch.int64, device=self._device)
            return int((words != word).sum().item())

    def wrong_addresses(self, size_bytes: int) -> int:
        """See GpuUnderTest."""
        torch = self._torch
        with self._done():
            numbers = torch.arange(size_bytes // 8, dtype=torch.int64, device=self._device)
            steps = numbers[1:] - numbers[:-1]
            return int((steps != 1).sum().item()) + int(numbers[0].item() != 0)

    def wrong_sums(self) -> int:
        """See GpuUnderTest."""
        torch = self._torch
        left, right = self._matrix(7, 3), self._matrix(5, 11)
        rows, columns = left @ right.sum(1), left.sum(0) @ right
        with self._done():
            one, other = left.to(self._device, torch.float32), right.to(self._device, torch.float32)
            product = (one @ other).to(torch.float64)
            wrong = int((product.sum(1).cpu() != rows).sum().item())
            wrong += int((product.sum(0).cpu() != columns).sum().item())
            half = (one.to(torch.bfloat16) @ other.to(torch.bfloat16)).to(torch.float64)
            # The elements are rounded to 8 bits, twice if the sum was computed in parts.
            return wrong + int(((half - product).abs() > product / 128).sum().item())

    def wrong_copies(self, size_bytes: int) -> int:
        """See GpuUnderTest."""
        torch = self._torch
        with self._done():
            sent = torch.arange(size_bytes // 8, dtype=torch.int64) * 0x9E37_79B9
            back = sent.to(self._device, copy=True).cpu()
            return int((back != sent).sum().item())

    def _matrix(self, first: int, second: int) -> Any:
        """Returns a float64 matrix of integers from 0 to 3, whose products are exact even in float32."""
        torch = self._torch
        row, column = torch.arange(self._side).unsqueeze(1), torch.arange(self._side)
        return ((row * first + column * second) % 4).to(torch.float64)

    @contextlib.contextmanager
    def _done(self) -> Iterator[None]:
        """Runs the enclosed work on the test's stream, and waits for it at the end."""
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream), self._torch.no_grad():
            yield
        self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


@functools.cache
def _stream_of_tests(device: Any) -> Any:
    """Returns the stream for a device's tests.

    There is only one, because torch keeps some 64 MiB for each stream that multiplies.
    """
    import torch

    return torch.cuda.Stream(device)
