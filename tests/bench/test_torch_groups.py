"""The benchmark of torch's process groups: both backends, and the verdict on their ratio."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, environment

pytest.importorskip("torch")


@pytest.mark.parametrize(("limit", "code"), [("100000", 0), ("0.00001", 1)])
def test_both_backends_are_measured_and_the_ratio_is_judged(tmp_path: Path, limit: str, code: int) -> None:
    words = ["--sizes", "4K", "--turns", "1", "--check", f"4K={limit}", "--json", str(tmp_path / "x.json")]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "torch-groups", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert [row["backend"] for row in found["rows"]] == ["gloo", "muster"]
    medians = {row["backend"]: row["median_ms"] for row in found["rows"]}
    assert found["ratios"]["4096"] == pytest.approx(medians["muster"] / medians["gloo"])
