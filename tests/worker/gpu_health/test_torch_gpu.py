"""The test of a GPU through torch, on torch's CPU: what is right passes, and what is wrong is seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from muster.worker.gpu_health.trial import FAILED, PASSED, try_gpu

torch = pytest.importorskip("torch")

from muster.worker.gpu_health.torch_gpu import TorchGpu


def test_what_computes_right_passes() -> None:
    gpu = TorchGpu("cpu", side=128)
    verdict = try_gpu(gpu, time.monotonic, limit_s=60.0)
    assert (verdict.word, verdict.reason) == (PASSED, "")


def _one_bit(words: Any) -> Any:
    words.view(-1)[5] ^= 1 << 17
    return words


def _one_element(product: Any) -> Any:
    product[3, 5] += 1.0
    return product


def _of(dtype: Any, spoil: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tensor: spoil(tensor) if tensor.dtype == dtype else tensor


def _after(function: Callable[..., Any], spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: spoil(function(*arguments, **options))


@pytest.mark.parametrize(
    ("owner", "name", "spoil", "says"),
    [
        (torch, "full", _one_bit, "1 words of 16 MiB of its memory differ from the pattern"),
        (torch, "arange", _one_bit, "2 words of 16 MiB of its memory hold another's address"),
        (
            torch.Tensor,
            "__matmul__",
            _of(torch.float32, _one_element),
            "sums of a",
        ),
        (
            torch.Tensor,
            "cpu",
            _of(torch.int64, _one_bit),
            "1 words differ after a copy",
        ),
    ],
)
def test_one_wrong_bit_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, spoil: Callable[[Any], Any], says: str
) -> None:
    gpu = TorchGpu("cpu", side=128)
    monkeypatch.setattr(owner, name, _after(getattr(owner, name), spoil))
    verdict = try_gpu(gpu, time.monotonic, limit_s=60.0)
    assert verdict.word == FAILED and says in verdict.reason
