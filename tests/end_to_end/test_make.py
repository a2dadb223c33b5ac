"""``make``'s own set-up, with a stand-in for Python, and ``make train`` for real."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import free_port

ROOT = Path(__file__).parent.parent.parent
SOURCES = (
    "Makefile",
    "noxfile.py",
    "pyproject.toml",
    "train.py",
    "muster",
    "packaging",
    "scheduler",
    "worker",
    "certs",
)
SESSIONS = [
    "test-torch",
    "test-torch-oldest",
    "test-system",
    "test-frameworks",
    "test-newest",
    "test-lowest",
    "test-jax",
    "docs",
]

STAND_IN = """#!/bin/sh
# Does what make asks of Python, and writes down what it was.
echo "$@" >> "{record}"
case "$1 $2" in
    "-c ") ;;
    "-c import"*) exit {too_old} ;;
    "-V "*) echo "Python {version}" ;;
    "-m venv") [ {venv_works} = 1 ] || {{ echo "No module named ensurepip"; exit 1; }}
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what make works on, without a virtual environment."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, tmp_path / name, symlinks=True)
        else:
            shutil.copy2(source, tmp_path / name, follow_symlinks=False)
    return tmp_path


def make(checkout: Path, *arguments: str) -> tuple[int, str]:
    """Runs make there, on CPUs: exit code and all that it printed."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MS_", "MFLAGS"))
    }
    env["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        ["make", *arguments],
        cwd=checkout,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, printed


def stand_in(checkout: Path, *, version: str = "3.12.1", too_old: int = 0, venv_works: int = 1) -> str:
    """Makes a Python that only writes down what it is asked for."""
    path = checkout / "stand-in-python"
    record = checkout / "asked"
    path.write_text(STAND_IN.format(record=record, version=version, too_old=too_old, venv_works=venv_works))
    path.chmod(0o755)
    return f"PYTHON={path}"


def asked(checkout: Path) -> list[str]:
    lines = (checkout / "asked").read_text().splitlines()
    (checkout / "asked").unlink()
    return lines


def test_train_sets_itself_up_once(checkout: Path) -> None:
    python = stand_in(checkout)
    code, printed = make(checkout, "train", python, "WORKERS=3", "MODEL=net", "ARGS=--epochs 2", "CUDA=")
    assert code == 0, printed
    assert printed.splitlines() == [
        "Making a virtual environment in .venv/ with Python 3.12.1",
        "Installing what training needs (once; a minute or two)",
    ]
    first = asked(checkout)
    assert "-m pip install -qq --disable-pip-version-check -e .[train]" in first
    assert first[-1] == "-m muster train -n 3 --model net --epochs 2"
    code, printed = make(checkout, "train", python, "CUDA=")
    assert (code, printed) == (0, "")
    assert len(asked(checkout)) == 1


def test_tests_install_what_they_need_besides(checkout: Path) -> None:
    python = stand_in(checkout)
    make(checkout, "train", python, "CUDA=")
    asked(checkout)
    code, printed = make(checkout, "test", python, "CUDA=")
    assert (code, printed) == (0, "Installing what the tests need (once; a minute or two)\n")
    install, test = asked(checkout)
    assert install.endswith("-e .[dev]")
    assert test.startswith("-m pytest")
    make(checkout, "train", python, "CUDA=")
    assert len(asked(checkout)) == 1


def test_a_changed_pyproject_is_installed_again(checkout: Path) -> None:
    python = stand_in(checkout)
    make(checkout, "train", python, "CUDA=")
    asked(checkout)
    later = (checkout / ".venv" / ".ready-train").stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (later, later))
    make(checkout, "train", python, "CUDA=")
    assert any("pip install" in line for line in asked(checkout))


def test_gpus_bring_their_extra(checkout: Path) -> None:
    make(checkout, "train", stand_in(checkout), "CUDA=cuda13")
    assert any(line.endswith("-e .[train,cuda13]") for line in asked(checkout))


def test_an_old_python_is_refused_in_one_sentence(checkout: Path) -> None:
    code, printed = make(checkout, "-s", "train", stand_in(checkout, version="3.9.2", too_old=1))
    assert code == 2
    assert "is Python 3.9.2, but Muster needs Python 3.11 or later: make PYTHON=python3.12.\n" in printed
    assert not (checkout / ".venv").exists()


def test_a_missing_python_is_named(checkout: Path) -> None:
    code, printed = make(checkout, "-s", "test", "PYTHON=no-such-python")
    assert code == 2
    assert printed.startswith("no-such-python is not found or does not run: install Python 3.11 or later")


def test_a_python_without_venv_is_explained_and_leaves_nothing(checkout: Path) -> None:
    code, printed = make(checkout, "-s", "train", stand_in(checkout, venv_works=0))
    assert code == 2
    assert "No module named ensurepip\n" in printed
    assert "cannot make a virtual environment with pip: install its venv package" in printed
    assert not list(checkout.glob(".venv*"))


def test_help_names_the_targets(checkout: Path) -> None:
    code, printed = make(checkout)
    assert code == 0
    for target in ("train", "test", "lint", "format", "proto", "clean", *SESSIONS):
        assert f"make {target} " in printed


@pytest.mark.parametrize("target", SESSIONS)
def test_what_has_an_environment_of_its_own_is_a_session_of_nox(checkout: Path, target: str) -> None:
    python = stand_in(checkout)
    code, printed = make(checkout, target, python, "CUDA=", "PYTEST_ARGS=-x --last-failed", "NOX_ARGS=-v")
    assert code == 0, printed
    assert asked(checkout)[-1] == f"-m nox -s {target} -v -- -x --last-failed"
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "-f", ROOT / "noxfile.py", "-l"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert re.search(rf"^[*-] {target}(?:-3\.\d+)? -> ", listed.stdout, re.MULTILINE)


def equip(checkout: Path) -> None:
    """Gives the copy the virtual environment that this test runs in."""
    (checkout / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (checkout / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (checkout / ".venv" / ".ready-train").touch()


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.:-]*", "#", line)


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="runs outside a virtual environment")
@pytest.mark.parametrize("workers", [2, 4])
def test_train_trains(checkout: Path, workers: int) -> None:
    equip(checkout)
    code, printed = make(checkout, "train", f"WORKERS={workers}", "CUDA=")
    assert code == 0, printed
    lines = printed.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100, printed
    assert f"muster: {workers} workers on 1 host, CPU, tcp, encrypted" in lines
    assert re.fullmatch(r"muster: ended well after \d:\d\d; logs: muster-runs/default-\S+", lines[-1])
    pattern = r"\[(\d+)\] (epoch: \d+ step: \d+, loss is ([\d.e-]{1,9}))"
    shown = [found for found in map(re.compile(pattern).fullmatch, lines) if found]
    assert {found[1] for found in shown} == {"0"}
    values = [float(found[3]) for found in shown]
    assert values[-1] < values[0] / 2
    logs = [
        (checkout / "muster-runs" / "latest" / f"worker_{rank}.log").read_text() for rank in range(workers)
    ]
    assert all(found[2] in log for found in shown for log in logs)
    accuracy = re.search(r"accuracy\D*([01]\.\d+)", printed)
    assert accuracy is not None, printed
    assert float(accuracy[1]) >= 0.95
    assert (checkout / ".muster" / "ca.key").stat().st_mode & 0o077 == 0
    shown_there = (ROOT / "docs" / "quickstart.md").read_text().partition("```text\n")[2].partition("```")[0]
    there = [line for line in shown_there.splitlines() if line != "..."]
    assert workers != 2 or {without_numbers(line) for line in there} <= set(map(without_numbers, lines))


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="runs outside a virtual environment")
def test_the_quick_start_s_lines_for_terminals_work(checkout: Path) -> None:
    equip(checkout)
    section = (ROOT / "docs" / "quickstart.md").read_text().partition("## In terminals of your own")[2]
    lines = section.partition("```sh\n")[2].partition("```")[0].replace("6667", free_port("127.0.0.1"))
    first: list[str] = []
    apart: list[str] = []
    for line in lines.splitlines():
        (apart if line.startswith("MS_ROLE=") else first).append(line)
    assert [line.split()[0] for line in apart] == [
        "MS_ROLE=MS_SCHED",
        "MS_ROLE=MS_WORKER",
        "MS_ROLE=MS_WORKER",
    ]
    (checkout / "Makefile").write_text("lines:\n\t@bash lines.sh\n")
    script = ["set -e", ". .venv/bin/activate", *first]
    for index, line in enumerate(apart):
        script += [f"{line} > out.{index} 2>&1 &", f"pid{index}=$!"]
    script += [f"wait $pid{index} || {{ cat out.*; exit 1; }}" for index in range(len(apart))]
    (checkout / "lines.sh").write_text("\n".join(script))
    code, printed = make(checkout, "lines")
    assert code == 0, printed
    outputs = [(checkout / f"out.{index}").read_text() for index in (1, 2)]
    assert all("test accuracy: 0.9" in output for output in outputs), outputs
