"""Torch programs under ``muster run`` that exit without goodbye, run into a timeout, or fork."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_torch_programs import run
from tests.scheduler.processes import ROOT, Pki

PROGRAM = str(ROOT / "tests" / "end_to_end" / "torch_survival.py")
LIMIT_S = 300
pytestmark = pytest.mark.timeout(LIMIT_S + 40)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    pytest.importorskip("torch")
    return Pki.make(tmp_path_factory.mktemp("pki"))


def lines_of(pki: Pki, folder: Path, name: str, **env: str) -> list[str]:
    """What two ranks say, in order."""
    done = run(folder, pki, sys.executable, PROGRAM, name, options=("-n", "2"), timeout_s=LIMIT_S, **env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return sorted(re.findall(r"said (\d .*)", done.stdout))


@pytest.mark.system
@pytest.mark.alone  # Gloo's threads run when nothing else wants to
@pytest.mark.parametrize("gloo", ["", "muster"])
def test_fifty_processes_end_well_without_destroying_their_groups(
    pki: Pki, tmp_path: Path, gloo: str
) -> None:
    said = lines_of(pki, tmp_path, "exits", MS_TORCH_GLOO=gloo)
    assert said == [f"{rank} ends {{0: 25}}" for rank in range(2)]


@pytest.mark.system
@pytest.mark.parametrize("gloo", ["", "muster"])
def test_after_a_timeout_there_is_a_record_and_the_store_goes_on(pki: Pki, tmp_path: Path, gloo: str) -> None:
    said = lines_of(pki, tmp_path, "timeout", MS_TORCH_GLOO=gloo, TORCH_FR_BUFFER_SIZE="200")
    raised = next(line for line in said if line.startswith("0 raised"))
    if gloo:
        assert "CollectiveTimeoutError" in raised and "rank 1 (node" in raised
    else:
        assert "0 recorded [('gloo:all_reduce', " in "\n".join(said)
    assert [line for line in said if "after" in line] == ["0 after 3.0", "1 after 3.0"]


@pytest.mark.system
def test_a_forked_child_is_refused_its_parent_s_group_which_goes_on(pki: Pki, tmp_path: Path) -> None:
    said = lines_of(pki, tmp_path, "forks", MS_TORCH_GLOO="muster")
    assert [line.split(" ", 2)[1:] for line in said if " child " not in line] == 2 * [
        ["after", "3.0"],
        ["ended", "0"],
        ["loaded", "140"],
    ]
    refused = [line for line in said if " child " in line]
    assert len(refused) == 2
    assert all("CommunicatorAbortedError" in each and "forked" in each for each in refused), refused
