"""``.ci/run`` with a stand-in for make: what it asks for, and that a failure of any part fails the run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT

PARTS = [
    *("test", "test-newest", "test-lowest", "test-torch", "test-torch-oldest"),
    *("test-system", "test-frameworks", "docs"),
]
INSTALLED_FIRST = ["test-lowest", "test-torch-oldest", "test-frameworks"]
INSTALL = "NOX_ARGS=--install-only"


def ci(folder: Path, fails: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs it where make fails for what begins with these words; returns how it ended, and what was made.

    Args:
        folder: where it runs.
        fails: the words.
    """
    tools = folder / "tools"
    tools.mkdir()
    (folder / ".ci").mkdir()
    shutil.copy2(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (tools / "make").write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/asked\ncase "$*" in "$FAILS"*) [ -z "$FAILS" ] ;; esac\n'
    )
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")  # an ordinary user: no packages are installed
    for tool in tools.iterdir():
        tool.chmod(0o755)
    ran = subprocess.run(
        ["sh", ".ci/run"],
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "FAILS": fails},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return ran, (folder / "asked").read_text().splitlines()


def test_each_part_is_run_once_and_only_listed_skips_are_allowed(tmp_path: Path) -> None:
    ran, asked = ci(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line.split()[0] for line in asked if INSTALL not in line] == PARTS
    assert [line.split()[0] for line in asked if INSTALL in line] == INSTALLED_FIRST
    for line in asked:
        if line.startswith("test") and INSTALL not in line:
            assert (ROOT / line.rpartition("PYTEST_ARGS=--allowed-skips ")[2]).is_file(), line
    for part in PARTS:
        assert f"== make {part} " in ran.stdout and " took " in ran.stdout


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_fails_the_run_and_ends_it(tmp_path: Path, part: str) -> None:
    words = f"{part} PYTEST_ARGS" if part.startswith("test") else part
    ran, asked = ci(tmp_path, words)
    assert ran.returncode != 0
    assert asked[-1].split()[0] == part
    assert [line.startswith(words) for line in asked].count(True) == 1


@pytest.mark.parametrize("part", INSTALLED_FIRST)
def test_what_cannot_be_installed_today_is_named_and_left_out(tmp_path: Path, part: str) -> None:
    ran, asked = ci(tmp_path, f"{part} {INSTALL}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"== make {part} was NOT run" in ran.stdout
    assert not [line for line in asked if line.startswith(f"{part} PYTEST_ARGS")]
    assert asked[-1] == "docs"
