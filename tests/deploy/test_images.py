"""The image for CPUs, built from Debian's and Python's packages: what is in it, and a job that trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.images import Image, can_build_images
from tests.launch.launching import free_port

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),  # the image is built in the first one's time
    pytest.mark.skipif(not can_build_images(), reason="needs root, buildah and mmdebstrap"),
]
TRAINED_S = 240.0
HEALTH = ["python", "-m", "scheduler", "health", "--host", "127.0.0.1"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"), "cpu")


def configuration(image: Image) -> dict[str, Any]:
    return dict(json.loads(image.config)["Docker"]["config"])


def test_the_image_is_that_of_a_user_without_rights_and_asks_its_own_health(image: Image) -> None:
    settings = configuration(image)
    assert settings["User"] == "10001"
    assert settings["Healthcheck"]["Test"] == ["CMD", *HEALTH]
    assert "usage: muster" in image.run("muster", "--help")
    assert image.run("id", "--user").strip() == "10001"


def test_the_image_has_no_compiler_no_pip_and_no_key(image: Image) -> None:
    names = {path.name for place in ("usr/bin", "opt/venv/bin") for path in (image.root / place).iterdir()}
    assert not [name for name in names if name in ("cc", "gcc", "g++", "make", "pip", "pip3", "git")]
    assert "python" in names
    found = [path for path in (image.root / "opt").rglob("*") if path.suffix in (".key", ".p12")]
    assert found == []


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    for role in ("ca", "server", "client"):
        (tmp_path / f"{role}-password").write_text(f"{role} of a test, long enough")
    words = ["certs", "init", "--dir", str(tmp_path), "--job", "default", "--hosts", "localhost"]
    for option, role in (("password", "ca"), ("server-password", "server"), ("client-password", "client")):
        words += [f"--{option}-file", str(tmp_path / f"{role}-password")]
    subprocess.run([sys.executable, "-m", "muster", *words], check=True, capture_output=True)
    for path in (tmp_path, *tmp_path.iterdir()):
        os.chown(path, 10001, 10001)
    return tmp_path


@pytest.fixture
def settings() -> dict[str, str]:
    return {
        "MS_WORKER_NUM": "2",
        "MS_SCHED_HOST": "localhost",
        "MS_SCHED_PORT": str(free_port("127.0.0.1")),
        "MS_CONFIG_FILE": "/mnt/config.json",
        "MS_SERVER_PASSWORD_FILE": "/mnt/server-password",
        "MS_CLIENT_PASSWORD_FILE": "/mnt/client-password",
        "MS_ENABLE_RECOVERY": "1",
        "MS_RECOVERY_PATH": "/var/lib/muster",
    }


@pytest.fixture
def serving(image: Image, certificates: Path, settings: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    env = settings | {"MS_ROLE": "MS_SCHED"}
    process = image.start("python", "-m", "scheduler", folder=certificates, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_job_trains_in_a_read_only_root(
    image: Image, certificates: Path, settings: dict[str, str], serving: subprocess.Popen[str]
) -> None:
    touched = image.start("touch", "/opt/muster/a", folder=certificates, env={})
    assert "Read-only file system" in touched.communicate(timeout=60)[0]
    assert serving.stdout is not None
    said = [next(line for line in serving.stdout if "scheduler ready" in line)]
    health = image.start(*HEALTH, folder=certificates, env=settings | {"MS_ROLE": "MS_SCHED"})
    told = health.communicate(timeout=60)[0]
    assert health.returncode == 0, (told, said)
    env = settings | {"MS_ROLE": "MS_WORKER"}
    words = ("python", "train.py", "--checkpoint-dir", "/tmp/checkpoints", "--epochs", "1")
    workers = [image.start(*words, folder=certificates, env=env) for _ in range(2)]
    output = "".join(worker.communicate(timeout=TRAINED_S)[0] for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0], output
    assert "test accuracy" in output
