"""Which commands get an agent, and what their environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.errors import NotInitializedError
from muster.launch.programs import AGENT, MOST_BYTES, MOST_FILES, program_kind, with_agent
from muster.programs.generations import on_new_generation
from muster.worker.program_environment import AGENT_VARIABLE, JAX_PROGRAM, place_of, torch_variables
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
        ("import torch, muster.torch\nmuster.torch.keep_alive()\n", True),
        ("from muster.torch import keep_alive\n", True),
        ("import torch, muster, web\nweb.keep_alive()\nfrom web import keep_alive\n", False),
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
    assert (made[1:4] == ("-m", "muster.programs.agent", "--")) is agent


@pytest.mark.parametrize(
    ("command", "agent"),
    [("python train.py", True), ("python flow.py", True), ("torchrun --nproc-per-node 2 train.py", False)],
)
def test_a_program_that_is_to_live_on_gets_an_agent_although_it_imports_muster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, agent: bool
) -> None:
    write(tmp_path, {"train.py": "import torch, muster.torch", "flow.py": "import jax"})
    monkeypatch.chdir(tmp_path)
    made = with_agent(command.split(), "auto", in_place=True)
    assert (AGENT in made) is agent
    assert (JAX_PROGRAM in made) is ("flow.py" in command)


@pytest.mark.parametrize(
    ("files", "command", "kind"),
    [
        ({"train.py": "import model", "model.py": "import torch"}, "python train.py", "torch"),
        ({"train.py": "import model", "model.py": "import torch"}, "python -u ./train.py -e 3", "torch"),
        ({"train.py": "from a.b import c", "a/b/c.py": "import jax"}, "python train.py", "jax"),
        (
            {"train.py": "import a", "a/__init__.py": "from .b import c", "a/b.py": "import torch"},
            "",
            "torch",
        ),
        ({"train.py": "import a", "a/__init__.py": "from . import b", "a/b.py": "import torch"}, "", "torch"),
        ({"a/b/train.py": "from ..c import d", "a/c.py": "import torch"}, "python -m a.b.train", "torch"),
        ({"a/b/train.py": "from a import c", "a/c.py": "import torch"}, "python -m a.b.train", "torch"),
        ({"train.py": "import one", "one.py": "import two", "two.py": "import torch, train"}, "", "torch"),
        ({"train.py": "import torch, model", "model.py": "import muster"}, "", "muster"),
        ({"train.py": "import model", "other.py": "import torch"}, "", "muster"),
        ({"train.py": "import composer", "composer.py": "print()"}, "", "muster"),
        ({"train.py": "import model", "model.py": "import torch this is no Python"}, "", "muster"),
        ({"wrapper.py": "import runpy", "train.py": "import torch"}, "python wrapper.py train.py", "torch"),
        ({"x/wrapper.py": "", "x/train.py": "import torch"}, "python x/wrapper.py train.py -n 3", "torch"),
        ({"wrapper.py": "import muster", "train.py": "import torch"}, "python wrapper.py train.py", "muster"),
        ({"wrapper.py": "", "train.py": "print()"}, "python wrapper.py train.py none.py", "muster"),
        ({"train.py": "import torch"}, "numactl --cpunodebind 0 python train.py", "torch"),
        ({"train.py": "import torch"}, "torchrun --nproc-per-node 2 train.py", "muster"),
        ({"train.py": "import torch"}, "python -m torch.distributed.run train.py", "muster"),
        ({"train.py": "import torch"}, "python -c pass train.py", "muster"),
        ({"w.py": f"import {'m' * 300}"}, f"python w.py {'w' * 300}.py", "muster"),
    ],
)
def test_imports_are_followed_to_what_lies_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], command: str, kind: str
) -> None:
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    assert program_kind((command or "python train.py").split()) == kind


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text + "\n")


ENTRY = "#!{python}\nimport re, sys\nfrom {package} import main\nsys.exit(main())"


@pytest.mark.parametrize("where", ["in the command's environment", "where this Python finds it"])
@pytest.mark.parametrize(
    ("first", "source", "kind"),
    [
        ("/env/bin/python3", "import torch", "torch"),
        ("/bin/sh\n'''exec' /very/long/python \"$0\" \"$@\"\n' '''", "import torch", "torch"),
        ("/env/bin/python3", "import torch, muster", "muster"),
        ("/env/bin/python3", "import nothing_known", "muster"),
    ],
)
def test_an_installed_command_is_what_its_package_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, first: str, source: str, kind: str
) -> None:
    """No line of the package is run."""
    site = "elsewhere" if where.startswith("where") else "lib/python3.12/site-packages"
    write(
        tmp_path,
        {
            "bin/trains": ENTRY.format(python=first, package="some_trainer.cli.entry"),
            f"{site}/some_trainer/__init__.py": "raise SystemExit('it was run')",
            f"{site}/some_trainer/cli/__init__.py": "raise SystemExit('it was run')",
            f"{site}/some_trainer/cli/entry.py": "from ..loop import main",
            f"{site}/some_trainer/loop.py": source,
        },
    )
    (tmp_path / "bin/trains").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert program_kind(["trains", "--epochs", "3"], str(tmp_path / "bin")) == kind
    assert program_kind([str(tmp_path / "bin/trains")]) == kind


def test_of_a_large_program_no_more_is_read_than_that(tmp_path: Path) -> None:
    """Its modules import one another in a row; the last is torch's."""
    for number in range(5 * MOST_FILES):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}\n")
    (tmp_path / f"m{5 * MOST_FILES}.py").write_text("import torch\n")
    assert program_kind(["python", str(tmp_path / f"m{5 * MOST_FILES - 20}.py")]) == "torch"
    assert program_kind(["python", str(tmp_path / "m0.py")]) == "muster"
    (tmp_path / "large.py").write_text("#" * MOST_BYTES + "\nimport torch\n")
    assert program_kind(["python", str(tmp_path / "large.py")]) == "muster"


def started(command: Sequence[str], kind: str) -> tuple[str, ...]:
    """The command with its agent, whether or not this test's Python finds Muster in the working directory."""
    return tuple(word for word in with_agent(command, kind) if word != "-P")


def test_modules_and_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/ddp.py").write_text("import torch\n")
    agent = ("-m", "muster.programs.agent")
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
    begin = ("-m", "muster.programs.jax_program")
    made = with_agent(["python", "-u", str(script), "--steps", "3"], "auto")
    assert made[1:3] == ("-m", "muster.programs.agent")
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
        "from muster.programs.plugin import autoload; autoload()\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not loaded & {'grpc', 'google', 'torch', 'numpy', 'cryptography', 'asyncio'}, loaded\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "MUSTER_"))}
    subprocess.run(
        [sys.executable, "-c", code], env={**env, "PYTHONPATH": str(ROOT)}, check=True, timeout=100
    )


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
    assert (made[1:3] == ("-m", "muster.programs.agent")) is agent
    assert made[-3:] == ("bash", "run.sh", "7")


def test_a_program_without_an_agent_learns_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    with pytest.raises(NotInitializedError, match="--program torch"):
        on_new_generation(lambda generation: None)
