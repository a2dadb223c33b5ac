"""Files of the user with the names of modules: what is started as ``muster ...`` takes no notice of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("google", "grpc", "queue", "scheduler")
TRAIN = "import muster, numpy\nwith muster.init():\n    print(muster.all_reduce(numpy.ones(1)))\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "beside").mkdir()
    for name in NAMES:
        (tmp_path / "beside" / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user')\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "beside" / "train.py").write_text(TRAIN)
    # As pip writes a console script: Python puts its folder first on the path, not the working directory.
    script = tmp_path / "bin" / "muster"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom muster.__main__ import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return tmp_path


def muster(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    return subprocess.run(
        [str(here / "bin" / "muster"), *arguments],
        cwd=here / "beside",
        env={**env, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(here)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("train", "-n", "2", "--data", "quickstart", "--epochs", "1", "--checkpoint-dir", ""),
        ("check", "-n", "1", "--devices", "none", "--scheduler"),
        (
            "run",
            "-n",
            "2",
            "--uplink",
            "on",
            "--devices",
            "none",
            "--scheduler",
            "--",
            "python",
            "../train.py",
        ),
    ],
    ids=lambda command: command[0],
)
def test_processes_that_muster_starts_take_no_notice_of_them(command: tuple[str, ...], here: Path) -> None:
    words = [sys.executable if word == "python" else word for word in command]
    done = muster(here, *words)
    assert done.returncode == 0, done.stderr
    assert "of the user" not in done.stdout + done.stderr
    logs = "".join(log.read_text() for log in (here / "beside" / "muster-runs" / "latest").glob("*.log"))
    assert "of the user" not in logs


def test_a_script_beside_which_they_are_is_refused_in_one_sentence(here: Path) -> None:
    """In its own process Python takes them for the modules, whoever starts it."""
    for name in ("google", "grpc", "queue"):
        done = muster(here, "run", "-n", "1", "--devices", "none", "--scheduler", "--", "train.py")
        assert done.returncode == 2
        assert done.stderr == (
            f"muster: {name}.py hides the module {name}, which every worker imports: Python looks beside"
            " the script first. Rename it.\n"
        )
        (here / "beside" / f"{name}.py").unlink()
    done = muster(here, "run", "-n", "1", "--devices", "none", "--scheduler", "--", "train.py")
    assert done.returncode == 0, done.stderr  # scheduler.py harms nobody


def test_a_scheduler_that_fails_is_not_a_launch_that_ended_well(here: Path) -> None:
    """Its workers leave, as they are asked to."""
    (here / "train.py").write_text("import muster\nmuster.init()\n")
    (here / "beside" / "config.json").write_text("{}")
    done = muster(
        here,
        "run",
        "-n",
        "1",
        "--devices",
        "none",
        "--scheduler",
        "-x",
        "MS_SPARES=many",
        "--",
        sys.executable,
        "../train.py",
    )
    assert done.returncode != 0 and "ended well" not in done.stderr, done.stderr
