"""Whole jobs on the GPUs of this host, as users start them: the launcher, a scheduler, one worker per GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from muster.bench.training import cifar10_files
from tests.gpu.example_runs import RANK_0_DIES, closing, losses
from tests.gpu.sharing import RANKS_PER_GPU, launch_options, ranks_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]  # the first launch compiles
RANKS = ranks_on(torch.cuda.device_count())
if RANKS < 2:
    pytest.skip("needs two GPUs, or MS_TEST_RANKS_PER_GPU=2", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RECORDS = 512
"""In each of CIFAR-10's five files of training data."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    command = [
        "-m",
        "muster",
        "certs",
        "init",
        "--dir",
        str(directory),
        "--password-file",
        str(directory / "password"),
    ]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return directory


def launch(keys: Path, directory: Path, *command: str, env: dict[str, str] | None = None) -> str:
    """Runs ``muster run`` with mutual TLS on all GPUs and returns what all wrote; it must end well."""
    return muster(keys, directory, "run", *launch_options(), *command, env=env)


def muster(keys: Path, directory: Path, verb: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    secure = ("--config", str(keys / "config.json"), "--password-file", str(keys / "password"))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "muster", verb, "-n", str(RANKS), "--scheduler", *secure, *arguments],
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
    head = (tmp_path / "muster-runs" / "latest" / "worker_0.log").read_text()
    assert "MS_BACKEND" not in head or "MS_BACKEND=nccl" in head


@pytest.mark.skipif(RANKS_PER_GPU > 1, reason="the check takes a GPU for each worker")
def test_the_check_passes_over_nccl(keys: Path, tmp_path: Path) -> None:
    output = muster(keys, tmp_path, "check")
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
    assert whole.count(f"ends {capture}") == resumed.count(f"ends {capture}") == RANKS, whole + resumed
    expected = [line for line in losses_of(whole) if int(line.split()[3]) > 7]
    assert len(expected) == 9 * RANKS, whole
    assert len({line.split()[-1] for line in expected}) == len(expected), "the ranks draw the same masks"
    assert losses_of(resumed) == expected


@pytest.mark.parametrize("capture", ["eager", "captured"])
def test_a_rate_that_differs_on_a_gpu_is_named_before_another_step_counts(
    keys: Path, tmp_path: Path, capture: str
) -> None:
    script = [sys.executable, str(ROOT / "tests/gpu/gpu_resume_job.py"), str(tmp_path), capture, "differ"]
    output = launch(keys, tmp_path, "--tail=all", "--", *script)
    words = r"differ after step 10: .*the learning rate of parameter group 0 is 0\.01 on rank 0 and 0\.05 on"
    assert len(re.findall(words, output)) == RANKS, output


WARM_UP = 3
"""Eager steps of a generation before its capture."""
EXAMPLE = ("-m", "examples.resnet50_cifar10")


def run_example(
    keys: Path,
    directory: Path,
    *arguments: str,
    command: tuple[str, ...] = EXAMPLE,
    options: tuple[str, ...] = (),
    data_path: str = "",
) -> str:
    """What all ranks wrote; each prints its losses, of every step."""
    job = ["--tail=all", *options, "--", sys.executable, *command, "--print-every=1", *arguments]
    return launch(keys, directory, *job, env={"DATA_PATH": data_path})


def mean(values: list[list[float]]) -> float:
    return sum(each[0] for each in values) / len(values)


def test_the_resnet_example_learns_is_captured_and_resumes(keys: Path, tmp_path: Path) -> None:
    cifar10_files.write(tmp_path / "data", records=RECORDS)
    files = str(tmp_path / "data")
    steps = 5 * RECORDS // (32 * RANKS)
    output = run_example(keys, tmp_path, "--epochs=3", data_path=files)
    shown = losses(output)
    assert len(shown) == 3 * steps, output
    assert all(len(each) == RANKS and len(set(each)) == 1 for each in shown.values()), "not the ranks' mean"
    curve = list(shown.values())
    assert mean(curve[-5:]) < mean(curve[:5]) / 2, curve
    speed, captured, all_steps = closing(output)
    assert speed > 0 and (captured, all_steps) == (3 * steps - WARM_UP, 3 * steps), output
    assert "synthetic" not in output
    resumed = run_example(keys, tmp_path, "--epochs=4", "--resume", data_path=files)
    again = losses(resumed)
    assert f"resumed after step {3 * steps}" in resumed, resumed
    assert [where.partition(" step")[0] for where in again] == ["epoch: 4"] * steps, resumed
    assert mean(list(again.values())) < mean(curve[:5]) / 2, resumed
    speed, captured, all_steps = closing(resumed)
    assert speed > 0 and (captured, all_steps) == (steps - WARM_UP, steps), resumed


def test_the_resnet_example_is_captured_on_synthetic_images_after_rank_0_was_replaced(
    keys: Path, tmp_path: Path
) -> None:
    (tmp_path / "dies.py").write_text(RANK_0_DIES)
    arguments = ("--data=synthetic", "--steps=30", "--checkpoint-dir=")
    output = run_example(keys, tmp_path, *arguments, command=("dies.py",), options=("--max-restarts=1",))
    assert (tmp_path / "rank-0-has-died").exists()
    speed, captured, steps = closing(output)
    generations = 1 + len(set(re.findall(r"in generation ([2-9]\d*) of job", output)))
    assert generations >= 2, output
    assert speed > 0 and (captured, steps) == (30 - WARM_UP * generations, 30), output
    assert " synthetic images/s on " in output


def test_the_gpt2_example_learns_is_captured_and_resumes_bit_for_bit(keys: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again. " * 2000)
    shape = ("--layers=2", "--heads=4", "--width=128", "--context=64", "--batch-size=8", "--sample=40")
    arguments = ("-m", "examples.gpt2", str(text), *shape, "--steps=40", "--print-every=1", "--save-every=20")

    def train(directory: str, *more: str) -> str:
        return launch(
            keys,
            tmp_path,
            "--tail=0",
            "--",
            sys.executable,
            *arguments,
            f"--checkpoint-dir={directory}",
            *more,
        )

    def losses_in(output: str) -> list[str]:
        return re.findall(r"step: (\d+, loss is [0-9.]+),", output)

    def check(whole: str) -> list[str]:
        assert f"40 steps, captured: {40 - WARM_UP} (a CUDA graph)" in whole, whole
        found = losses_in(whole)
        assert len(found) == 40 and float(found[-1].split()[-1]) < float(found[0].split()[-1]) - 1, whole
        return found

    check(train("compiled"))
    # torch's compiler may choose other kernels in each run, whose results are rounded in another order.
    found = check(train("whole", "--no-compile"))
    last = max((tmp_path / "whole").glob("step_*"))
    last.unlink()
    assert losses_in(train("whole", "--no-compile", "--resume")) == found[20:]


MIXED = """
import logging
import numpy as np
import {library} as xp
import muster

def gpu(values):
    return xp.{array}(values, dtype=xp.float32{device})

with muster.init() as session:
    rank, size = session.rank, session.world_size
    whole = sum(range(size))
    for _ in range(3):
        assert float(muster.all_reduce(gpu([rank]))[0]) == whole
        assert muster.all_reduce(np.array([rank, 1.0])).tolist() == [whole, size]
        assert float(muster.all_reduce(rank)) == whole
    large = np.full(300_000, rank + 1.0)
    work = muster.all_reduce(large, out=large, async_op=True)
    assert float(muster.all_reduce(gpu([1]))[0]) == size
    assert set(work.wait().tolist()) == {{whole + size}}
    muster.create_group("ends", [size - 1, 0])
    if rank in (0, size - 1):
        assert muster.all_gather(np.array([rank]), group="ends").tolist() == [size - 1, 0]
        assert muster.all_gather(gpu([rank]), group="ends").tolist() == [size - 1, 0]
    muster.barrier()
    with muster.group():
        try:
            muster.all_reduce(np.zeros(1))
        except muster.CommunicatorError as error:
            assert "on the CPU" in str(error), error
        else:
            raise AssertionError("not refused")
    print("mixed", session.generation, flush=True)
"""


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_collectives_follow_the_array(keys: Path, tmp_path: Path, library: str) -> None:
    pytest.importorskip(library)
    words = {"torch": ("tensor", ', device="cuda"'), "cupy": ("asarray", "")}[library]
    script = tmp_path / "mixed.py"
    script.write_text(MIXED.format(library=library, array=words[0], device=words[1]))
    output = launch(keys, tmp_path, "--tail=all", "--program=muster", "--", sys.executable, str(script))
    assert output.count("mixed 1") == RANKS, output
    logs = [(tmp_path / f"muster-runs/latest/worker_{rank}.log").read_text() for rank in range(RANKS)]
    assert all(log.count("on the CPU uses tcp, not NCCL") == 1 for log in logs), logs


CAPTURED = """
import numpy as np
import torch
import muster

with muster.init() as session:
    torch.cuda.set_device(session.device_ordinal)
    total = torch.ones(1, device="cuda")
    muster.all_reduce(total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            muster.all_reduce(np.ones(1))
    except muster.CommunicatorError as error:
        print("refused:", error, flush=True)
    muster.barrier()
"""


def test_an_array_on_the_cpu_is_refused_while_a_graph_is_captured(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "captured.py").write_text(CAPTURED)
    output = launch(keys, tmp_path, "--tail=all", "--program=muster", "--", sys.executable, "captured.py")
    assert output.count("refused: all_reduce of an array on the CPU cannot be part of a CUDA graph") == RANKS


def test_the_readme_s_job_runs_on_gpus_unchanged(keys: Path, tmp_path: Path) -> None:
    [job] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "job.py"
    script.write_text(f"{job}\nassert np.allclose(weights, [1, 2, 3], atol=0.05), weights\n")
    output = launch(keys, tmp_path, "--", sys.executable, str(script))
    assert f"0 of {RANKS}" in output and ", nccl, " in output, output


DISAGREE = """
import time
import numpy as np
import torch
import muster

with muster.init() as session:
    torch.cuda.set_device(session.device_ordinal)
    muster.barrier()
    if session.rank:
        muster.all_reduce(torch.ones(4, device="cuda"))
        session.communicator.synchronize()
    else:
        muster.all_reduce(np.ones(4, np.float32))
"""


def test_ranks_whose_arrays_are_in_different_places_are_named(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "disagree.py").write_text(DISAGREE)
    env = {**os.environ, "MS_STALL_TIMEOUT": "3", "MS_COLLECTIVE_TIMEOUT": "20"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["-n", "2", "--scheduler", *launch_options(), "--program=muster"]
    secure = ["--config", str(keys / "config.json"), "--password-file", str(keys / "password")]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "run", *options, *secure, "--", sys.executable, "disagree.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    log = (tmp_path / "muster-runs" / "latest" / "scheduler.log").read_text()
    text = re.sub(r"\n\S+ INFO \+ ", " ", log)  # long records go on in the next line
    wanted = "all_reduce of 16 B float32 on the CPU; rank 1 called all_reduce of 16 B float32 on a GPU"
    assert f"rank 0 called {wanted}" in text, log
