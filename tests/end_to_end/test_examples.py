"""The shell scripts of ``examples/``, on the CPU and with data in CIFAR-10's format."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from muster.certs.files import write_file
from muster.example import datasets
from muster.launch.command import count_gpus
from tests.launch.launching import free_port
from tests.scheduler.processes import PASSWORD, ROOT, Pki, environment

EXAMPLES = ROOT / "examples"
TRAIN = f"{ROOT / 'train.py'}"
ARGUMENTS = (
    "--epochs",
    "1",
    "--print-every",
    "1",
    "--batch-size",
    "16",
    "--width",
    "16",
    "--checkpoint-dir",
    "",
)
LOSS = re.compile(r"epoch: 1 step: \d+, loss is [0-9.]+")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name in [*datasets.CIFAR10_TRAIN_FILES, datasets.CIFAR10_TEST_FILE]:
        records = random.integers(0, 256, (16, datasets.CIFAR10_RECORD_BYTES), np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
    return folder


def run(directory: Path, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(EXAMPLES / script), *arguments],
        cwd=directory,
        env=environment(**{"PYTHON": sys.executable, "SCRIPT": TRAIN, "MS_TOPO_TIMEOUT": "40", **env}),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_run_gpu_trains_on_one_host(data: Path, tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()  # the user's own: logs go to muster-runs
    done = run(tmp_path, "run_gpu.sh", str(data), *ARGUMENTS, WORKERS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "device").is_dir()
    assert done.stdout.startswith("start training\n")
    assert LOSS.search(done.stdout)
    logs = tmp_path / "muster-runs" / "latest"
    assert sorted(path.name for path in logs.glob("*.log")) == [
        "scheduler.log",
        "worker_0.log",
        "worker_1.log",
    ]
    assert "mutual TLS" in (logs / "scheduler.log").read_text()


def test_run_gpu_cluster_with_one_argument_trains_on_this_host(data: Path, tmp_path: Path) -> None:
    """The tutorial's own line: keys, scheduler and workers, as many as devices, two on a CPU."""
    env = {"ARGS": " ".join(ARGUMENTS[:-2]), "MS_BACKEND": "tcp", "MS_SCHED_PORT": free_port("127.0.0.1")}
    done = run(tmp_path, "run_gpu_cluster.sh", str(data), **env)
    logs = {path.name: path.read_text() for path in (tmp_path / "device").iterdir()}
    assert done.returncode == 0, (done.stderr, logs)
    assert sorted(logs) == ["scheduler.log", *(f"worker_{i}.log" for i in range(count_gpus() or 2))]
    assert LOSS.search(logs["worker_0.log"])
    assert "mutual TLS" in logs["scheduler.log"]
    assert (tmp_path / ".muster" / "ca.crt").exists()


def test_on_several_hosts_a_host_starts_as_many_workers_as_it_has_devices(data: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "config.json").touch()
    script = "-c pass"  # a process that ends at once
    env = {"KEYS": str(keys), "MS_WORKER_NUM": "64", "SCRIPT": script}
    assert run(tmp_path, "run_gpu_cluster.sh", str(data), "127.0.0.1", **env).returncode == 0
    assert len(list((tmp_path / "device").glob("worker_*.log"))) == (count_gpus() or 2)


def test_run_gpu_cluster_needs_nothing_but_the_variables(data: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    pki = Pki.make(tmp_path / "keys")
    write_file(pki.directory / "password", PASSWORD)
    env = {"KEYS": str(pki.directory), "MS_WORKER_NUM": "2", "ARGS": " ".join(ARGUMENTS[:-2])}
    port = free_port("127.0.0.1")
    done = run(tmp_path, "run_gpu_cluster.sh", str(data), "127.0.0.1", "scheduler", MS_SCHED_PORT=port, **env)
    logs = {path.name: path.read_text() for path in (tmp_path / "device").iterdir()}
    assert done.returncode == 0, (done.stderr, logs)
    assert sorted(logs) == ["scheduler.log", "worker_0.log", "worker_1.log"]
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "device").iterdir())
    assert LOSS.search(logs["worker_0.log"])
    assert "has completed the training" in logs["scheduler.log"]


def test_run_gpu_cluster_needs_no_more_files_than_it_says(data: Path, tmp_path: Path) -> None:
    usage = run(tmp_path, "run_gpu_cluster.sh").stderr
    [listed] = re.findall(r"the folder with (.*?) For one host", usage.replace("\n", " "))
    names = set(re.findall(r"[\w.]+\.(?:json|crt|pem|p12)|password", listed))
    assert names == {"config.json", "ca.crt", "crl.pem", "client.p12", "server.p12", "password"}
    made, keys = tmp_path / "made", tmp_path / "keys"
    made.mkdir()
    keys.mkdir()
    init = ["certs", "init", "--dir", str(made), "--password-file", str(made / "password")]
    for side in ("server", "client"):
        path = made / f"{side}-password"
        path.write_text(f"{path}\n")
        init += [f"--{side}-password-file", str(path)]
    subprocess.run([sys.executable, "-m", *init], env=environment(), check=True, capture_output=True)
    for name in (*names - {"password"}, "server-password", "client-password"):  # one for each role
        shutil.copy(made / name, keys)
    env = {"KEYS": str(keys), "MS_WORKER_NUM": "1", "ARGS": " ".join(ARGUMENTS[:-2])}
    port = free_port("127.0.0.1")
    done = run(tmp_path, "run_gpu_cluster.sh", str(data), "127.0.0.1", "scheduler", MS_SCHED_PORT=port, **env)
    assert done.returncode == 0, (done.stderr, [path.read_text() for path in (tmp_path / "device").iterdir()])


@pytest.mark.parametrize(
    ("script", "env", "words"),
    [
        ("run_gpu.sh", {"PYTHON": "false", "WORKERS": "1"}, "false cannot run Muster"),
        ("run_gpu.sh", {"SCRIPT": "-c pass"}, "has no GPU: say with WORKERS"),
        ("run_gpu_cluster.sh", {"PYTHON": "false"}, "false cannot run Muster"),
        (
            "run_gpu_cluster.sh",
            {"KEYS": "nowhere", "MS_WORKER_NUM": "2"},
            "'nowhere' holds no config.json: name the folder",
        ),
        ("run_gpu_cluster.sh", {}, "MS_WORKER_NUM is not set: it must be the number of workers of all hosts"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    tmp_path: Path, script: str, env: dict[str, str], words: str
) -> None:
    done = run(tmp_path, script, str(tmp_path), "127.0.0.1", **env)
    if "GPU" in words and count_gpus():
        return
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["run_gpu.sh", "run_gpu_cluster.sh"])
def test_without_arguments_the_usage_is_shown(tmp_path: Path, script: str) -> None:
    done = run(tmp_path, script)
    assert done.returncode == 2
    assert f"sh examples/{script} DATA_PATH" in done.stderr
    assert "set -eu" not in done.stderr
    assert not list(tmp_path.iterdir())
