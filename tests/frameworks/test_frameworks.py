"""Frameworks that know nothing of Muster, under ``muster run`` and under torchrun: the same losses.

`make test-frameworks` installs them in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, Pki, environment

NEEDS = {
    "by_hand": "torch",
    "accelerate": "accelerate",
    "trainer": "transformers",
    "lightning_ddp": "lightning",
    "lightning_fsdp": "lightning",
    "deepspeed": "deepspeed",
}
SCRIPT = str(ROOT / "tests" / "frameworks" / "programs.py")
WRAPPED = str(ROOT / "tests" / "frameworks" / "wrapped.py")
LIMIT_S = 300.0
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def said(output: str) -> list[str]:
    return sorted(re.findall(r"said (\d .*?)\s*$", output, re.MULTILINE))


def run(
    command: list[str], folder: Path, env: dict[str, str], script: str = SCRIPT, *, peer: bool = False
) -> list[str]:
    folder.mkdir()
    with subprocess.Popen(
        [*command, script, folder.name.split("-")[0], str(folder)],
        cwd=folder,
        env=environment(**env, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launched:
        stop = threading.Timer(LIMIT_S, launched.terminate)  # torchrun, if killed, leaves its workers behind
        stop.start()
        out, errors = launched.communicate()
        stop.cancel()
    # Plain torch aborts now and then at a process's end (docs/torch.md); all is said by then.
    aborted = peer and "terminate called without an active exception" in errors
    assert launched.returncode == 0 or aborted, out[-4000:] + errors[-4000:]
    return said(out)


@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_torchruns_and_the_traffic_is_encrypted(name: str, pki: Pki, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: make test-frameworks installs it")
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    theirs = run(
        [torchrun, "--nproc-per-node=2", "--standalone"], tmp_path / f"{name}-torchrun", {}, peer=True
    )
    launch = [sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--tail", "all", "--"]
    env = {**pki.env(), "MS_TORCH_GLOO": "muster"}
    ours = run([*launch, sys.executable], tmp_path / f"{name}-muster", env)
    groups = [line for line in ours if " group " in line]
    assert groups == [f"{rank} group GroupNamedGloo" for rank in range(2)]
    assert [line for line in ours if line not in groups] == [line for line in theirs if " group " not in line]
    assert sum(" loss " in line for line in ours) >= 4
    assert [line for line in ours if "processes" in line] == ["0 processes 2", "1 processes 2"]


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_a_framework_that_gives_every_rank_all_the_data_is_warned_of(
    name: str, pki: Pki, tmp_path: Path
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-frameworks installs it")
    launch = [sys.executable, "-m", "muster", "run", "-n", "2", "--scheduler", "--tail", "all", "--"]
    said = run([*launch, sys.executable], tmp_path / f"{name}-wrapped", pki.env(), WRAPPED)
    assert [line for line in said if "batches" in line] == ["0 batches 8", "1 batches 8"]
    warned = [line for line in said if "warned" in line]
    assert [line[0] for line in warned] == ["0", "1"]
    assert all("knows of this process alone, and there are 2 ranks" in line for line in warned)
