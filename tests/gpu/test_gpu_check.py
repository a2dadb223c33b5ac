"""A real GPU's check and readings: what they find, what they cost, and that training goes on after them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from muster.wire import codec
from muster.wire.messages import Heartbeat
from muster.worker.gpu_health.check import GpuCheck, check_here, opened_here
from muster.worker.gpu_health.identity import GpuIdentity
from muster.worker.gpu_health.judgement import GpuLimits
from muster.worker.gpu_health.nvml import NvmlGpus
from muster.worker.gpu_health.trial import FAILED, LIMIT_S, PASSED
from muster.worker.gpu_health.watch import GpuWatch, load_nvml
from tests.waiting import wait_for

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from muster.worker.gpu_health.torch_gpu import TorchGpu


def test_a_gpu_passes_in_a_process_of_its_own() -> None:
    begun = time.monotonic()
    verdict = GpuCheck(0).before_join()
    took = time.monotonic() - begun
    print(f"check in its own process: {verdict!r}, with torch's import and the GPU's opening {took:.2f} s")
    assert (verdict.word, verdict.reason) == (PASSED, "")
    assert verdict.seconds < LIMIT_S


def test_a_gpu_passes_beside_training_in_this_process_and_training_goes_on() -> None:
    weights = torch.randn(512, 512, device="cuda", requires_grad=True)
    held = []
    for _ in range(3):  # the first loads kernels, and room for products that stays
        open_gpu = opened_here(0)
        assert open_gpu is not None
        verdict = check_here(open_gpu)
        print(f"check where torch has the GPU open: {verdict!r}")
        assert (verdict.word, verdict.reason) == (PASSED, "")
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1] == held[2]
    (weights @ weights).sum().backward()
    assert torch.isfinite(weights.grad).all()


def _one_bit(words: Any) -> Any:
    words.view(-1)[5] ^= 1 << 17
    return words


def _one_element(product: Any) -> Any:
    product[3, 5] += 1.0
    return product


@pytest.mark.parametrize(
    ("owner", "name", "dtype", "spoil", "says"),
    [
        (torch, "full", torch.int64, _one_bit, "1 words of 256 MiB of its memory differ"),
        (torch.Tensor, "__matmul__", torch.float32, _one_element, "sums of a product"),
        (torch.Tensor, "cpu", torch.int64, _one_bit, "1 words differ after a copy"),
    ],
)
def test_one_wrong_bit_of_a_gpu_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, dtype: Any, spoil: Callable[[Any], Any], says: str
) -> None:
    right = getattr(owner, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        made = right(*arguments, **options)
        return spoil(made) if made.dtype == dtype else made

    gpu = TorchGpu("cuda:0")
    monkeypatch.setattr(owner, name, wrong)
    verdict = check_here(lambda: gpu)
    assert verdict.word == FAILED and says in verdict.reason


def test_readings_of_a_gpu_and_what_they_cost() -> None:
    try:
        nvml = load_nvml()
    except Exception as error:
        pytest.skip(f"needs a driver: {error}")
    if nvml is None:
        pytest.skip("needs nvidia-ml-py")
    gpus = NvmlGpus(nvml)
    gpus.read(0)
    begun, cpu = time.monotonic(), time.process_time()
    for _ in range(20):
        reading = gpus.read(0)
    took, cpu = (time.monotonic() - begun) / 20, (time.process_time() - cpu) / 20
    gpus.close()
    watch = GpuWatch(GpuIdentity(0), GpuLimits(), every_s=60.0)
    watch.start()
    news: list[Any] = [None]

    def came() -> bool:
        news[0] = watch.take()
        return news[0] is not None

    wait_for(came)
    watch.close()
    report = news[0]
    beat = Heartbeat(3, 1000, 1001, 99.5)
    size = len(codec.encode(beat.replaced(gpu=report))) - len(codec.encode(beat))
    print(f"reading: {reading!r}\nreport: {report!r}, {size} bytes of a heartbeat")
    print(f"a reading takes {1000 * took:.2f} ms, of them {1000 * cpu:.2f} ms of the processor")
    assert report.celsius is not None and report.total_mb is not None and report.total_mb > 1000
    assert size < 64 or report.state != "well"
