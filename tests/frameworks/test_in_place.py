"""Frameworks' programs that go on in the same processes when a rank is killed: the weights are the same."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, Pki, environment

NEEDS = {"trainer": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
SCRIPT = str(ROOT / "tests" / "frameworks" / "in_place_programs.py")
LIMIT_S = 300.0
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def ends(name: str, folder: Path, pki: Pki, dies_in: int) -> list[tuple[str, str, str]]:
    """Each rank, whether its first process came to the end, and the weights that it had then."""
    launch = [sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--tail", "all"]
    launch += ["--in-place", "--max-restarts", "1", "--", sys.executable, SCRIPT, name]
    done = subprocess.run(
        [*launch, str(folder), str(dies_in)],
        cwd=folder.parent,
        env=environment(**pki.env(), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return sorted(re.findall(r"ended (\d) (\w+) (\w+)", done.stdout))


@pytest.mark.parametrize("name", NEEDS)
def test_a_killed_rank_is_replaced_and_the_other_goes_on_in_its_process(
    name: str, pki: Pki, tmp_path: Path
) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: make test-frameworks installs it")
    whole = ends(name, tmp_path / "whole", pki, -1)
    found = ends(name, tmp_path / "killed", pki, 5)
    assert [weights for *_, weights in found] == [weights for *_, weights in whole]
    assert [lived for _, lived, _ in found] == ["True", "False"]
