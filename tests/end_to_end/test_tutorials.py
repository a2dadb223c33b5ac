"""The tutorials' own scripts and lines, with nothing changed but the import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import PASSWORD, Pki, environment
from tests.worker.launch.launching import free_port

SCRIPT = """
import muster
from muster import get_group_size, get_rank, init, set_ps_context

set_ps_context(config_file_path={config!r}, enable_ssl=True, enable_ps=True,
               client_password={password!r}, server_password={password!r})
init()
print("rank", get_rank(), "of", get_group_size())

def test_train():
    assert float(muster.all_reduce(1.0)) == 2.0
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir()
    pki = Pki.make(tmp_path / "keys")
    path = tmp_path / "resnet50_distributed_training_gpu.py"
    path.write_text(SCRIPT.format(config=str(pki.config), password=PASSWORD.decode()))
    return path


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(60), process.communicate()[0]) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("command", [(), ("-m", "pytest", "-s", "-v", "-p", "no:cacheprovider")])
def test_the_scheduler_is_the_same_script_in_another_role(script: Path, command: tuple[str, ...]) -> None:
    """Also as the tutorials start it: ``pytest -s -v ./SCRIPT``; every process exits with 0."""
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_PORT": free_port("127.0.0.1"), "MS_TOPO_TIMEOUT": "40"}
    started = [
        subprocess.Popen(
            [sys.executable, *command, str(script)],
            cwd=script.parent,
            env=environment(MS_ROLE=role, MS_BACKEND="tcp", **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in ("MS_WORKER", "MS_WORKER", "MS_SCHED")
    ]
    results = ended(started)
    assert [code for code, _ in results] == [0, 0, 0], results
    printed = re.findall(r"\brank . of .$", "\n".join(text for _, text in results), re.MULTILINE)
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(printed)
    assert "has completed the training" in results[2][1]


def test_a_wrong_setting_of_the_scheduler_s_role_is_one_sentence(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(MS_ROLE="MS_SCHED", MS_WORKER_NUM="none"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "MS_WORKER_NUM must be a whole number from 1 to 65536" in line
