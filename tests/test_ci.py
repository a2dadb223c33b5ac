"""``.ci/run``: what fails once may race, what fails twice fails the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT

MAKEFILE = """
test test-torch test-system test-newest docs .venv-torch-oldest/.ready-torch test-torch-oldest:
\t@echo "$@ TORCH=$(TORCH) $(PYTEST_ARGS)" >> made
\t@[ $@ != test-torch ] || ./play $(filter tests/attacks/ --last-failed,$(PYTEST_ARGS))
"""
PLAY = """#!/bin/sh
mkdir -p .pytest_cache/v/cache
[ -z "$1" ] && cp failed.json .pytest_cache/v/cache/lastfailed
[ -n "$1" ] && [ -e passes ]
"""


@pytest.mark.parametrize(
    ("failed", "passes", "well"), [(1, True, True), (3, True, True), (4, True, False), (1, False, False)]
)
def test_a_few_that_fail_are_run_once_more_alone(
    tmp_path: Path, failed: int, passes: bool, well: bool
) -> None:
    names = [f"tests/test_{i}.py::test_it[a b]" for i in range(failed)]
    ran, made = ci_of(tmp_path, names, passes)
    assert (ran.returncode == 0) == well, ran.stdout + ran.stderr
    assert made.count("test-torch ") == (2 if failed <= 3 else 1)
    assert ("docs" in made) == well
    assert ("passed alone:\n" + "\n".join(names) in ran.stdout) == well


def test_all_of_torch_s_tests_run_on_the_newest_and_a_short_set_on_the_oldest(tmp_path: Path) -> None:
    ran, made = ci_of(tmp_path, ["tests/test_0.py::test_it"], passes=True, CI_TORCH="")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    asked = {line.split()[0]: line.split()[1] for line in made.splitlines()}
    assert asked["test-torch"] == "TORCH=torch"
    assert asked[".venv-torch-oldest/.ready-torch"] == "TORCH=torch==2.5.1"
    assert "tests/skips/torch-oldest.txt" in made


def test_of_the_attacks_all_are_run_once_more(tmp_path: Path) -> None:
    names = ["tests/attacks/test_5_the_job_went_on.py::test_it", "tests/test_0.py::test_it"]
    ran, made = ci_of(tmp_path, names, passes=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, attacks, others = [line for line in made.splitlines() if line.startswith("test-torch ")]
    assert "tests/attacks/" not in first
    assert "tests/attacks/" in attacks
    assert "--last-failed" not in attacks
    assert "--last-failed" in others


def ci_of(
    tmp_path: Path, names: list[str], passes: bool, **env: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Runs ``.ci/run`` where torch fails at first; returns how it ended, and what was made."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name, text in (("play", PLAY), ("apt-get", "#!/bin/sh\n"), ("npm", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "failed.json").write_text(json.dumps(dict.fromkeys(names, True)))
    if passes:
        (tmp_path / "passes").touch()
    ran = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MAKEFLAGS": "", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ran, (tmp_path / "made").read_text()
