"""torch over NCCL with sealed traffic, on ranks that share one GPU; see `nccl_sealed.py` for what it runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("nccl_sealed.py")


def run_script(path: Path, *options: str) -> dict[str, dict[str, object]]:
    """Runs it; its results by run."""
    command = [sys.executable, str(SCRIPT), "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    results = {result["run"]: result for result in json.loads(path.read_text())["results"]}
    assert done.returncode == 0, done.stdout + done.stderr
    return results


@pytest.mark.gpu
@pytest.mark.timeout(580)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sealed_results_are_those_of_nccl_s_own_sockets_and_nothing_is_read(
    tmp_path: Path, ranks: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if shutil.which("cc") is None:
        pytest.skip("needs a GPU machine with a C compiler")
    results = run_script(tmp_path / "results.json", "--ranks", str(ranks))
    assert set(results) == {"off", "sealed", "sealed-LL", "sealed-LL128", "another-secret", "no-secret"}


@pytest.mark.system
@pytest.mark.timeout(200)
def test_the_recorder_sees_what_is_sent_in_plain_text(tmp_path: Path) -> None:
    """So that a pattern which it does not see was not sent: Gloo in NCCL's place, which needs no GPU."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    results = run_script(tmp_path / "results.json", "--backend", "gloo", "--runs", "off", "--limit", "170")
    assert set(results) == {"off"}
