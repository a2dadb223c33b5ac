"""Which commands get an agent, and what their environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.worker.errors import NotInitializedError
from muster.worker.launch.command import with_agent
from muster.worker.program_environment import AGENT_VARIABLE, place_of, torch_variables
from muster.worker.store.generations import on_new_generation
from tests.scheduler.processes import ROOT


@pytest.mark.parametrize(
    ("source", "agent"),
    [
        ("import torch\n", True),
        ("def main():\n    from torch import distributed\n", True),
        ("from accelerate import Accelerator\n", True),
        ("import torch\nimport muster\n", False),
        ("import torch\nfrom muster.torch import DataParallel\n", False),
        ("import torch, worker\n", False),
        ("import torch, muster.torch\nmuster.torch.on_new_generation(train)\n", True),
        ("from muster.torch import on_new_generation\n", True),
        ("print('no torch, no Muster')\n", False),
        ("import torch this is no Python", False),
        ("from . import torch\n", False),
    ],
)
@pytest.mark.parametrize("words", [["python"], ["python3", "-u"], []])
def test_a_script_that_imports_torch_and_not_muster_gets_an_agent(
    tmp_path: Path, source: str, agent: bool, words: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    command = [*words, str(script), "--epochs", "3"]
    made = started(command, "auto")
    assert list(made[-len(command) :]) == command
    assert (made[1:4] == ("-m", "muster.worker.store.agent", "--")) is agent


def started(command: Sequence[str], kind: str) -> tuple[str, ...]:
    """The command with its agent, whether or not this test's Python finds Muster in the working directory."""
    return tuple(word for word in with_agent(command, kind) if word != "-P")


def test_modules_and_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/ddp.py").write_text("import torch\n")
    agent = ("-m", "muster.worker.store.agent")
    assert started(["python", "-m", "jobs.ddp"], "auto")[1:3] == agent
    assert started(["python", "-m", "jobs.none"], "auto") == ("python", "-m", "jobs.none")
    assert with_agent(["bash", "none.sh"], "auto") == ("bash", "none.sh")
    assert with_agent(["bash", "-c", "python jobs/ddp.py"], "auto")[0] == "bash"
    assert started(["bash", "run.sh"], "torch")[1:3] == agent
    assert started(["accelerate", "launch", "x.py"], "auto")[1:3] == agent
    assert with_agent(["python", "-m", "jobs.ddp"], "muster") == ("python", "-m", "jobs.ddp")


def test_a_jax_program_finds_the_job_when_jax_looks_for_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\n")
    begin = ("-m", "muster.worker.store.jax_program")
    made = with_agent(["python", "-u", str(script), "--steps", "3"], "auto")
    assert made[1:3] == ("-m", "muster.worker.store.agent")
    assert made[4:] == ("python", "-u", *begin, str(script), "--steps", "3")
    assert with_agent(["python", "-m", "jobs.x"], "jax")[4:] == ("python", *begin, "-m", "jobs.x")
    assert with_agent(["bash", "run.sh"], "jax")[4:] == ("bash", "run.sh")  # it has the variables
    script.write_text("import jax, torch\n")
    assert with_agent(["python", str(script)], "auto")[4:] == ("python", str(script))


def test_ranks_are_those_that_torchrun_would_set() -> None:
    hosts = [SimpleNamespace(id="h1"), SimpleNamespace(id="h2")]
    members = [
        SimpleNamespace(rank=rank, host=hosts[rank // 2], local_rank=rank % 2, local_world_size=2)
        for rank in range(4)
    ]
    said = torch_variables(place_of("job", 3, members, 2, 1), 4321)
    assert {name: said[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert (said["GROUP_RANK"], said["GROUP_WORLD_SIZE"], said["TORCHELASTIC_RUN_ID"]) == ("1", "2", "job")
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert (said["TORCHELASTIC_USE_AGENT_STORE"], said["TORCHELASTIC_RESTART_COUNT"]) == ("True", "1")


def test_outside_a_job_the_plug_in_does_nothing_and_imports_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from muster.worker.store.plugin import autoload; autoload()\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not loaded & {'grpc', 'google', 'torch', 'numpy', 'cryptography', 'asyncio'}, loaded\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "MUSTER_"))}
    subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)


@pytest.mark.parametrize(
    ("line", "agent"),
    [
        ("python train.py --epochs 3", True),
        ("exec python3 -u train.py", True),
        ('CUDA_VISIBLE_DEVICES=0 python "train.py"', True),
        ("accelerate launch whatever.py", True),
        ("cd /tmp && python \\\n  train.py; echo done", True),
        ("python plain.py", False),
        ("python both.py", False),
        ("echo 1 # python train.py", False),
        ("./a.out", False),
    ],
)
def test_a_shell_script_gets_an_agent_where_it_starts_a_torch_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, agent: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    Path("plain.py").write_text("print()\n")
    Path("both.py").write_text("import torch, muster\n")
    Path("run.sh").write_text(f"#!/bin/bash\nset -e\n{line}\n")
    made = with_agent(["bash", "run.sh", "7"], "auto")
    assert (made[1:3] == ("-m", "muster.worker.store.agent")) is agent
    assert made[-3:] == ("bash", "run.sh", "7")


def test_a_program_without_an_agent_learns_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    with pytest.raises(NotInitializedError, match="--program torch"):
        on_new_generation(lambda generation: None)
