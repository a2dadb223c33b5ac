"""The ResNet-50 example, on the CPU with a small net: its parts, and the whole of it as two workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from examples.cifar10_images import Preparation, augment
from examples.resnet import ResNet, resnet50
from examples.resnet50_cifar10 import closing_line, device_of
from examples.stem_kernels import relu_pool, stem_convolution
from examples.throughput import Throughput
from muster.example.datasets import CIFAR10_MEAN, CIFAR10_STD
from tests.gpu.example_runs import RANK_0_DIES, closing, losses

ROOT = Path(__file__).parents[2]
TINY = ["--tiny", "--image-size=32", "--batch-size=16", "--no-compile", "--print-every=4"]


def test_it_is_resnet50() -> None:
    assert sum(p.numel() for p in resnet50(1000).parameters()) == 25_557_032  # as published
    assert resnet50()(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


@pytest.mark.parametrize("height", [8, 14, 32])
def test_the_fast_stem_convolution_is_the_plain_one(height: int) -> None:
    images = torch.randn(2, 3, height, 20)
    weight = torch.randn(8, 3, 7, 7, requires_grad=True)
    plain = torch.nn.functional.conv2d(images, weight, stride=2, padding=3)
    slope = torch.randn_like(plain)
    (expected,) = torch.autograd.grad(plain, weight, slope)
    fast = stem_convolution(images, weight)
    (ours,) = torch.autograd.grad(fast, weight, slope)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_the_fast_net_has_the_plain_ones_state_and_results() -> None:
    plain, fast = ResNet((1,), width=8), ResNet((1,), width=8, fast=True)
    fast.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(fast(images), plain(images), rtol=1e-4, atol=1e-4)


_POOL = """
import torch, examples.stem_kernels
from torch.nn import functional
torch.manual_seed(0)
for shape in ((2, 4, 8, 8), (1, 3, 7, 9), (2, 5, 6, 10)):
    x = torch.randn(shape).round().contiguous(memory_format=torch.channels_last)  # many ties
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain = functional.max_pool2d(functional.relu(a), 3, 2, 1)
    fast = torch.ops.muster_examples.relu_pool(b)[0]
    slope = torch.randn_like(plain)
    plain.backward(slope)
    fast.backward(slope)
    assert torch.equal(plain, fast), shape
    torch.testing.assert_close(a.grad, b.grad)
print("equal")
"""


def test_the_pooling_kernels_give_what_torch_gives() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", _POOL],
        cwd=ROOT,
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr


def test_pooling_on_the_cpu_is_torchs() -> None:
    x = torch.randn(1, 2, 6, 6)
    assert torch.equal(relu_pool(x), torch.nn.functional.max_pool2d(x.relu(), 3, 2, 1))


def test_crops_are_windows_of_the_padded_image_or_their_mirror_image() -> None:
    torch.manual_seed(0)
    pixels = torch.arange(1, 3 * 64 + 1, dtype=torch.uint8).view(1, 3, 8, 8).repeat(40, 1, 1, 1)
    padded = torch.nn.functional.pad(pixels[0], (4,) * 4)
    windows = [padded[:, y : y + 8, x : x + 8] for y in range(9) for x in range(9)]
    legal = {part.numpy().tobytes() for window in windows for part in (window, window.flip(2).contiguous())}
    found = {crop.contiguous().numpy().tobytes() for crop in augment(pixels)}
    assert found <= legal
    assert len(found) > 20


def test_images_are_normalised_and_resized() -> None:
    pixels = torch.full((2, 3, 32, 32), 51, dtype=torch.uint8)
    images = Preparation(pixels.device, 64, torch.float32)(pixels)
    assert images.shape == (2, 3, 64, 64) and images.is_contiguous(memory_format=torch.channels_last)
    for channel, (mean, std) in enumerate(zip(CIFAR10_MEAN, CIFAR10_STD, strict=True)):
        assert float(images[0, channel, 5, 5]) == pytest.approx((0.2 - mean) / std, rel=1e-4)


def test_each_worker_takes_the_gpu_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    monkeypatch.delenv("DEVICE_ID", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    session: Any = SimpleNamespace(device_ordinal=2)
    assert device_of(session) == torch.device("cuda", 2)
    assert used == [torch.device("cuda", 2)]


def counted(*, steps: int, captured: int, samples: int, microseconds: int) -> Throughput:
    done = Throughput()
    done.take([[steps, captured, samples, microseconds]])
    return done


def test_the_closing_line_says_what_was_captured() -> None:
    done = counted(steps=1951, captured=1948, samples=124_608, microseconds=13_500_000)
    line = "9,230 images/s on 2 workers, scaling 95.2% of 4850; captured: 1,948 of 1,951 steps"
    assert closing_line(done, "images", 2, 4850, None) == line
    assert closing(line) == (9230, 1948, 1951)


def test_the_closing_line_says_why_nothing_was_captured() -> None:
    done = counted(steps=5, captured=0, samples=20, microseconds=8_000_000)
    line = closing_line(done, "images", 1, 0, "RuntimeError: Cannot copy\nCompile with TORCH_USE_CUDA_DSA")
    assert line == "2.5 images/s on 1 worker; captured: 0 of 5 steps (RuntimeError: Cannot copy)"


def test_a_run_too_short_to_measure_claims_no_speed() -> None:
    assert closing_line(Throughput(), "images", 2, 0, None) == "there was no step left to train"
    done = counted(steps=1, captured=0, samples=0, microseconds=0)
    line = closing_line(done, "images", 2, 0, None)
    assert line == "too few steps on 2 workers to measure a speed; captured: 0 of 1 steps"


def run_example(
    tmp_path: Path,
    *arguments: str,
    data_path: str = "",
    command: tuple[str, ...] = ("-m", "examples.resnet50_cifar10"),
    options: tuple[str, ...] = (),
) -> str:
    on_cpus = ["-n", "2", "--devices=none", "--scheduler", "--tail=all"]
    launcher = [sys.executable, "-m", "muster", "run", *on_cpus, *options, "--"]
    job = [sys.executable, *command, *TINY, *arguments]
    done = subprocess.run(
        [*launcher, *job, f"--checkpoint-dir={tmp_path / 'checkpoints'}"],
        cwd=tmp_path,
        env={
            "DATA_PATH": data_path,
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_workers_train_checkpoint_and_resume(tmp_path: Path) -> None:
    output = run_example(tmp_path, "--data=synthetic", "--steps=8", "--single=1000")
    shown = losses(output)
    assert list(shown) == [f"epoch: 1 step: {step}" for step in (1, 4, 8)]
    assert all(len(each) == 2 and len(set(each)) == 1 for each in shown.values()), shown  # the ranks' mean
    speed, captured, steps = closing(output)
    assert speed > 0 and (captured, steps) == (0, 8)
    assert " synthetic images/s on 2 workers, scaling " in output
    resumed = run_example(tmp_path, "--data=synthetic", "--steps=12", "--resume")
    assert "resumed after step 8" in resumed
    assert list(losses(resumed)) == ["epoch: 1 step: 12"]
    speed, captured, steps = closing(resumed)
    assert speed > 0 and (captured, steps) == (0, 4)  # this run's, not those of the run before


def test_it_reads_cifar10s_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = random.integers(0, 256, (20, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / name)
    output = run_example(tmp_path, "--epochs=2", data_path=str(tmp_path))
    assert "epoch: 2 step: 3" in losses(output)  # 100 images in batches of 2 x 16
    assert closing(output)[2] == 6 and "synthetic" not in output


@pytest.mark.system
def test_after_a_replaced_rank_0_the_closing_line_counts_all_steps_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(RANK_0_DIES)
    arguments = ("--data=synthetic", "--steps=16")
    output = run_example(tmp_path, *arguments, command=("dies.py",), options=("--max-restarts=1",))
    assert (tmp_path / "rank-0-has-died").exists()
    speed, captured, steps = closing(output)
    assert speed > 0 and (captured, steps) == (0, 16), output
    assert len(losses(output)["epoch: 1 step: 16"]) == 2, output
