"""Whole jobs on the GPUs of this host, as users start them: the launcher, a scheduler, one worker per GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
GPUS = min(4, torch.cuda.device_count())
if GPUS < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RECORDS = 512
"""In each of CIFAR-10's five files of training data."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    command = ["-m", "certs", "init", "--dir", str(directory), "--password-file", str(directory / "password")]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return directory


def launch(keys: Path, directory: Path, *command: str, env: dict[str, str] | None = None) -> str:
    """Runs ``python -m worker`` with mutual TLS on all GPUs and returns what all wrote; it must end well."""
    secure = ["--config", str(keys / "config.json"), "--password-file", str(keys / "password")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "worker", *command[:1], "-n", str(GPUS), "--scheduler", *secure, *command[1:]],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_main_job_trains_on_cupy(keys: Path, tmp_path: Path) -> None:
    output = launch(keys, tmp_path, "--tail=all", "--", sys.executable, str(ROOT / "train.py"))
    accuracies = [float(text) for text in re.findall(r"test accuracy: ([\d.]+)", output)]
    assert accuracies and min(accuracies) > 0.95, output  # digits: 0.96 on CPUs
    head = (tmp_path / "device" / "worker_0.log").read_text()
    assert "MS_BACKEND" not in head or "MS_BACKEND=nccl" in head


def test_the_check_passes_over_nccl(keys: Path, tmp_path: Path) -> None:
    output = launch(keys, tmp_path, "check")
    assert "AllReduce over nccl: the numbers are right" in output, output
    assert "ready to train" in output, output


def losses_of(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d+ step \d+ loss \S+", output))


@pytest.mark.parametrize("capture", ["eager", "captured"])
def test_a_resumed_job_draws_and_trains_as_the_uninterrupted_one(
    keys: Path, tmp_path: Path, capture: str
) -> None:
    script = [sys.executable, str(ROOT / "tests/gpu/gpu_resume_job.py"), str(tmp_path / "kept"), capture]
    whole = launch(keys, tmp_path, "--tail=all", "--", *script, "")
    resumed = launch(keys, tmp_path, "--tail=all", "--", *script, "latest")
    assert whole.count(f"ends {capture}") == resumed.count(f"ends {capture}") == GPUS, whole + resumed
    expected = [line for line in losses_of(whole) if int(line.split()[3]) > 7]
    assert len(expected) == 9 * GPUS, whole
    assert len({line.split()[-1] for line in expected}) == len(expected), "the ranks draw the same masks"
    assert losses_of(resumed) == expected


@pytest.mark.parametrize("capture", ["eager", "captured"])
def test_a_rate_that_differs_on_a_gpu_is_named_before_the_step_counts(
    keys: Path, tmp_path: Path, capture: str
) -> None:
    script = [sys.executable, str(ROOT / "tests/gpu/gpu_resume_job.py"), str(tmp_path), capture, "differ"]
    output = launch(keys, tmp_path, "--tail=all", "--", *script)
    words = r"differ after step 9: .*the learning rate of parameter group 0 is 0\.01 on rank 0 and 0\.05 on"
    assert len(re.findall(words, output)) == GPUS, output


def write_cifar10(directory: Path) -> None:
    """Files as CIFAR-10's binary version has them: noise around one colour per class, so one can learn."""
    random = np.random.default_rng(0)
    patterns = np.repeat(random.integers(0, 200, (10, 3)), 1024, axis=1)  # red, green, blue
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        labels = random.integers(0, 10, RECORDS)
        pixels = patterns[labels] + random.integers(0, 56, (RECORDS, 3072))
        np.column_stack([labels, pixels]).astype(np.uint8).tofile(directory / name)


def test_the_resnet_example_learns_and_resumes(keys: Path, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    example = ["--tail=0", "--", sys.executable, "-m", "examples.resnet50_cifar10", "--print-every=1"]
    env = {"DATA_PATH": str(tmp_path)}
    steps = 5 * RECORDS // (32 * GPUS)
    output = launch(keys, tmp_path, *example, "--epochs=3", env=env)
    losses = [float(text) for text in re.findall(r"loss is ([\d.]+)", output)]
    assert len(losses) == 3 * steps, output
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2, losses
    assert f" images/s on {GPUS} workers" in output and "synthetic" not in output
    resumed = launch(keys, tmp_path, *example, "--epochs=4", "--resume", env=env)
    again = [float(text) for text in re.findall(r"epoch: 4 step: \d+, loss is ([\d.]+)", resumed)]
    assert f"resumed after step {3 * steps}" in resumed and "epoch: 3 " not in resumed, resumed
    assert len(again) == steps and np.mean(again) < np.mean(losses[:5]) / 2, resumed
