"""Commands whose output or disk ends before they do, and variables whose names are nearly right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muster.__main__ import main
from muster.certs.__main__ import main as certs
from muster.wire.variables import TABLE, misspelt

ROOT = Path(__file__).parents[1]


def piped(command: str) -> tuple[int, str]:
    """Runs a shell command with ``muster`` in it; returns the exit code of its first part and its errors."""
    line = command.replace("muster", f"{sys.executable} -m muster", 1)
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stderr


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    # What is too long for the pipe is refused for certain; a short one may get through.
    assert piped("muster completion bash | (exec <&-; sleep 0.5)") == (141, "")
    assert piped("muster --help | (exec <&-; sleep 0.5)") == (141, "")


def test_output_to_a_full_disk_is_refused_in_one_sentence() -> None:
    said = "muster: the output cannot be written or read: No space left on device.\n"
    assert piped("muster --help > /dev/full") == (1, said)


def test_nccl_that_is_not_there_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "nccl").mkdir()
    (tmp_path / "nccl" / "__init__.py").write_text("raise ImportError('no NCCL here')\n")
    (tmp_path / "train.py").write_text("import muster\nmuster.init()\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    env |= {
        "MS_BACKEND": "nccl",
        "MS_WORKER_NUM": "1",
        "MS_ROLE": "MS_WORKER",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "muster: NCCL cannot be used: no NCCL here. Run pip install '.[cuda13]' in a checkout"
    )
    assert done.stderr.count("\n") == 1, "a traceback"


def test_a_directory_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """/proc is read-only for everybody, root too."""
    assert certs(["init", "--dir", "/proc/keys", "--password-file", "/proc/keys/password"]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("certs init: The directory '/proc/keys' cannot be made: ") and said.count("\n") == 1
    )


def test_an_output_file_that_cannot_be_written_is_named_and_not_the_part_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "record_host.jsonl").write_text(
        '{"time": 1.0, "kind": "began", "job_id": "a", "host": "h"}\n'
    )
    assert main(["report", str(tmp_path), "--output", "/proc/report.html"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("muster: '/proc/report.html' cannot be written: ") and ".part" not in said


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("MS_WORKER_MUN", "MS_WORKER_MIN"),
        ("MS_SCHED_HOSTS", "MS_SCHED_HOST"),
        ("MS_ENABLE_RECOVRY", "MS_ENABLE_RECOVERY"),
    ],
)
def test_a_variable_that_is_nearly_one_of_musters_is_reported(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    main(["certs", "show", "nothing"])
    assert f"muster: nothing reads {name}; did you mean {near}?" in capsys.readouterr().err


def test_variables_of_mindspore_and_known_ones_are_passed_over() -> None:
    theirs = (
        "MS_DEV_RUNTIME_CONF",
        "MS_ENABLE_GRACEFUL_EXIT",
        "MS_GRAPH_KERNEL_FLAGS",
        "MS_COMPILER_CACHE_ENABLE",
        "MS_BUILD_PROCESS_NUM",
        "MS_RECEIVE_MSG_TIMEOUT",
        "MS_JIT_MODULES",
        "MS_HCCL_CM_INIT",
        "MS_UPLINK",
    )
    assert misspelt(dict.fromkeys([*theirs, *TABLE], "1")) == []


@pytest.mark.parametrize("command", [("scheduler",), ("worker",)])
def test_each_process_that_is_started_by_hand_reports_it(command: tuple[str, ...], tmp_path: Path) -> None:
    program = ["-m", "scheduler"] if command == ("scheduler",) else ["-c", "import muster; muster.init()"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    env |= {"MS_WORKER_MUN": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "nothing reads MS_WORKER_MUN; did you mean MS_WORKER_MIN?" in done.stderr


def test_what_installs_muster_asks_no_package_index() -> None:
    """It is on none: pages and errors name a checkout or a wheel."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    by_name = re.compile(r"pip install[^\n]*\bmuster-rendezvous\b|[Ii]nstall muster-rendezvous\[")
    found = []
    for name in listed.stdout.split():
        path = ROOT / name
        if name.startswith("tests/") or name == "CHANGELOG.md" or not path.is_file() or path.suffix == ".png":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {line.strip()}" for line in text.splitlines() if by_name.search(line)]
    assert found == []
